"""The steps of a run, one file and one artifact each; the evaluation step is in tasks/evaluation.

Start with `tokenizer.py`, the smallest, after the protocol that all follow (`tasks/step.py`); `flows/pretrain.py` states which
needs which. A step imports what makes its artifact from `tasks` and `modeling`.
"""
