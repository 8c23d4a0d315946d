"""Output of a run: terminal lines (`console.py`), progress (`progress.py`), artifacts in Prefect's UI (`artifacts.py`).

`overview.py` renders a flow run's overview artifact, `summaries.py` plans and clusters in one line. Start reading at
`progress.py`. May import tasks, modeling and profiles, but no other part of flows.
"""
