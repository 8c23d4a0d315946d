"""LoRA adapters: read from any format, merged into weights, or written in PEFT's format.

Start at `adapters.py`, the common form; `../formats.py` detects formats. Each format is a module: `trained.py` (Trainshed's
checkpoints), `peft.py` with `peft_experts.py`, and `nxd.py`. Imports `modeling.conversion`, `modeling.models`, `parallel` and
`profiles`.
"""
