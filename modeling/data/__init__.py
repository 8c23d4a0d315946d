"""Training data as the devices read it: from tokenized shards to batches.

Start with `corpus.py` (samples over many shards); `sample_order.py` is the shuffle, `indexed.py` the Megatron file
format, `shard_cache.py` the cache for remote shards, `prefetch.py` the background reader. Imports numpy, torch and
`profiles` only.
"""
