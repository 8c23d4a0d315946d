"""Continual pretraining: a series' promoted model, its rounds, their data, held-out sets and gates.

Start with `series.py`, the promoted model and its successor's promotion. `data.py` has what is new, `replay.py` the history
that is read again, `ancestors.py` the runs before the first one, `held_out.py` what no round trains on, `schedule.py` the
learning rate, `gates.py` how a round is judged, and `rounds.py` all rounds of a series, which `page.py` shows, and the promotion
of an earlier one again. `proxy_data.py` pins the data of proxies. Imports `modeling`, `parallel`, `profiles`, `tasks`,
`tasks.fleet`, `tasks.reporting`, `tasks.sources`, `tasks.steps`, `tasks.store` and `tasks.tokenization`.
"""
