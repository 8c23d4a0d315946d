"""Checkpoint conversion between Hugging Face, NxD and Trainshed formats, in slices of bounded memory.

Start with `convert.py` (a conversion), `formats.py` (format detection) and `weights.py` (the common form of all sources). Each
format is a module: `huggingface.py`, `native.py` (Trainshed), and the folder `nxd/`. Which Hugging Face tensor each of ours is
stands with its family, in `modeling/models/families`. `adapters/` has LoRA adapters in the same formats and PEFT's; `compare.py`
compares any two checkpoints. Imports `modeling.models`, `parallel` and `profiles`.
"""
