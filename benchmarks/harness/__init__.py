"""Code shared by the benchmarks: rounds, results, processes, the workload, zigzag shards and text.

Start with `timing`: alternating rounds, tables and command-line parsers. `results` prints and keeps each row when
it exists, so that a benchmark that is ended loses nothing. `processes` runs programs in their own
processes and reads their measurements. `workload` defines the model, batches and loop of a training step; `training` trains a
profile in this process; `rungs` describes a ladder. May import none of the other folders of `benchmarks`.
"""
