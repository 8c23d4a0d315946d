"""Sources of data and pretrained weights: files, Hugging Face hub, Megatron pairs, object stores.

Start with corpus.py, which turns a profile's data sources into shards (listing.py finds their files), then shard.py and
formats/readers.py, which read the documents of a shard. tables.py reads batches of rows from parquet and arrow files, and
formats/columnar.py the documents in these rows; megatron.py verifies pairs. remote.py repeats failed requests, and weights.py
fetches checkpoints. Imports `modeling`, `parallel`, `profiles`, `tasks` and `tasks.store`.
"""
