"""Model definitions: the architectures, in `families/`, and what they share.

Start with `families/llama.py`, then `language_model.py`, the common part of all architectures (embedding, head, pipeline split).
`build.py` builds the mesh and the stages of a profile, `lora_targets.py` lists the layers that LoRA can update, `flops.py` is the
analytic FLOP count, `weight_names.py` has the forms of a family's map to Hugging Face's tensors, `qk_clip.py` knows which rows
QK-clip scales. Imports `parallel` and `profiles`.
"""
