"""Training data as the devices read it: from tokenized shards to batches.

Start with `corpus.py` (samples over many shards) and `records.py` (samples for fine-tuning); `sample_order.py` has the
positions of a step's samples (shuffle, mixture, skipped ranges), `indexed.py` the Megatron file format, `shard_cache.py` the
cache for remote shards, `prefetch.py` the background reader. Imports `parallel` and `profiles`.
"""
