"""Model definitions: one file per architecture in `families/`, and what they share.

Start with `families/llama.py`, then `language_model.py`, which has what architectures share (embedding, head, pipeline split).
`build.py` makes the mesh and the stages of a profile, `flops.py` is the analytic FLOP count, `weight_names.py` says how
Hugging Face stores a tensor. Imports `parallel` and `profiles` only.
"""
