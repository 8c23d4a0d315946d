"""Overview of all runs of a store: state, progress, speed, time by category, failures by node, cost.

Start with `fleet.py`, which reads what changed since the last read; `run_summary.py` reads one run at a cost that does not depend
on its length, `goodput.py` divides its time by category, and `page.py` renders the page. Imports `modeling`, `parallel`,
`profiles`, `tasks.reporting` and `tasks.store`.
"""
