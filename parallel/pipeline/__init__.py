"""Pipeline parallelism on torch.distributed.pipelining.

Start with `pipeline.py` (the microbatches of a step), then `schedules.py` (what each schedule costs, and which
layers a stage holds) and `runtime.py` (changes to torch's stage and schedule classes). Imports `parallel` and `parallel.layers`.
"""
