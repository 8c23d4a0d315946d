"""Training steps of other libraries on `benchmarks.harness.workload`, one script per library.

`llama` is the plain torch model for peers that have none. Scripts import torch, transformers and `benchmarks.harness.workload`.
"""
