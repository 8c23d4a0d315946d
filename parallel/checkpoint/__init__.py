"""Distributed checkpoints as torch.distributed.checkpoint (DCP) folders that any topology can load.

A *box* is a hyperrectangle of a global tensor, given by offsets and sizes: ranks save and load boxes, and files store boxes.
Start with `checkpoint.py` (save, load), then `saver.py` (synchronous and asynchronous saves). `reader.py` and `writer.py` are the
folder format, `files.py` and `checksums.py` its verified files, `locations.py` where checkpoints are stored, `boxes.py` a rank's
tensors, `object_stores.py` how S3 servers differ. Imports `parallel` and `parallel.optimizer`.
"""
