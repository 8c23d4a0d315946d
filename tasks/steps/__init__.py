"""The steps of a run, one file and one artifact each.

The evaluation step is in tasks/evaluation, the report step in tasks/report.py.

Start with `tokenizer.py`, the smallest, after the protocol that all follow (`tasks/step.py`); `flows/pretrain.py` states which
needs which. `jobs.py` runs programs on the profile's cluster, for several steps. A step imports what makes its artifact from
`tasks` and `modeling`.
"""
