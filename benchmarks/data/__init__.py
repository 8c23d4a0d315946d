"""Benchmarks of training data: tokenization, its memory, and reading samples.

Start with `tokenizing`, which compares the dataset step with `datasets.map`. `tokenizing_memory` measures one of its workers, and
`reading` the reading of samples while training. May import `harness`.
"""
