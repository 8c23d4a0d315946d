"""Model definitions, one file per architecture, each written like its paper.

Start with `llama.py`, from whose parts the other families but GPT are made. `language_model.py` has what architectures share
(embedding, head, pipeline split), `build.py` makes the mesh and the stages of a profile, `flops.py` is the analytic FLOP count,
`weight_names.py` maps to Hugging Face names. Imports `parallel` and `profiles` only.
"""
