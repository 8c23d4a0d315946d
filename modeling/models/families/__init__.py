"""Model families, one file each, written like its paper.

Start with `llama.py`, from whose parts the other families but GPT are made. Imports what families
share in `modeling.models`, `parallel` and `profiles`.
"""
