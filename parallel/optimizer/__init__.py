"""AdamW and Muon with sharded states (ZeRO-1), and with sharded parameters and gradients too (FSDP).

Start with `sharded_adamw.py` (the optimizer step), then `grouping.py` (which parameters share a bucket), `buckets.py` (flat
memory behind parameters and gradients), `gradient_sums.py` (how gradients are summed during backward), `gathers.py` and `fsdp.py`
(when parameters are gathered: ZeRO-1, FSDP), `rules.py` (what an update rule is), `adamw.py` (the first of them; on GPUs by
`gpu_kernels.py`) and `muon.py` (the second, on whole matrices). The rank that owns each matrix is chosen in `matrices.py`, or in
`stacks.py` where programs are compiled ahead. Imports `parallel`.
"""
