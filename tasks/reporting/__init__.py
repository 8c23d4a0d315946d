"""Rendering of a run's results: the HTML report, the comparison of runs, charts, and numbers as text.

Start with `run_report` (report.html) and `history` (what metrics.jsonl holds). `comparison_page` compares runs, `html` and
`chart` are the building blocks of pages, `format` turns numbers into text, `outcome` is the result of one step. Imports
`modeling`, `profiles`, `tasks` and `tasks.store`.
"""
