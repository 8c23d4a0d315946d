"""Flows that train several runs to answer one question: which loss, mixture, length or replay share.

`ladder.py` forecasts the loss of a large run from small ones, `mixture.py` proposes weights of data sources, `branches.py` decays
one trunk at several lengths, `share.py` proposes the share of replay of a continual round. Start reading at `plans.py`, which
plans the runs within a budget, and `side_by_side.py`, which trains several at a time; each is a run of `flows.pretrain`, or a
round of a small model. The four modules do not import each other. Imports `flows`, `flows.runner`, `flows.ui`, `modeling`,
`profiles` and `tasks`.
"""
