"""What the benchmarks share: alternating rounds and medians, processes and their results, text, the training workload.

`timing` has rounds and tables, `processes` runs one side of a comparison in its own processes, `workload` is the model and the
batches that ours and every peer train.
"""
