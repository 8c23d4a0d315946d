"""Rows of the tables of `benchmarks.parallel` and `benchmarks.gpu`: comparisons and checks.

Start with `comparisons`: ours against a peer, in training steps, kernels or ring attention. `checks` has rows that verify rather
than measure. `report` runs rows with a progress bar and prints their results. The programs define their rows. May import
`operators`, `training_steps` and `harness`.
"""
