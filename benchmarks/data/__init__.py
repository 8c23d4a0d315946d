"""Benchmarks of training data: tokenization and its memory.

Start with `tokenizing`, which compares the dataset step with `datasets.map`. `tokenizing_memory` measures one of its workers.
May import `harness`.
"""
