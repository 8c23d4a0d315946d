"""Code shared by the benchmarks: alternating rounds, medians, processes, text, the training workload.

`timing` has rounds and tables. `processes` runs one side of a comparison in its own processes. `workload` defines the model and
the batches on which ours and every peer train. `comparisons` and `checks` are rows of `report`'s table.
"""
