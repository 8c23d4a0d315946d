"""Output of a run: terminal lines, progress, and artifacts in Prefect's UI.

`console.py` prints terminal lines, `progress.py` reports progress, `artifacts.py` creates and updates artifacts. `overview.py`
renders a flow run's overview artifact, `pages.py` those of stores and series, `summaries.py` plans and clusters in a line.
Start reading at `progress.py`. Imports `modeling`, `profiles` and `tasks`.
"""
