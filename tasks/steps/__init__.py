"""The steps of a run: one file each, one artifact each; evaluation, which is more than a step, has a folder of its own beside.

Start with `tokenizer.py`, the smallest, after the protocol that all follow (`tasks/step.py`); `flows/pretrain.py` says which
needs which. A step imports what makes its artifact, from `tasks` and `modeling`.
"""
