"""Readers of training data by file format.

Start with `readers.py`, which reads the documents of a shard by its format; `columnar.py` has parquet and arrow, `records.py`
complete records of fine-tuning data, and `long_text.py` splits texts that are too long to tokenize at once. Imports
`profiles` and `tasks.sources`.
"""
