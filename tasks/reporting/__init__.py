"""HTML pages of runs and experiments, charts, numbers as text, and warnings about plans and runs.

Start with `run_report` (report.html) and `history` (what metrics.jsonl holds). `comparison_page` compares runs; `ladder_page`,
`mixture_page`, `share_page` and `branches_page` are the pages of experiments. `html` and `chart` are the building blocks of
pages, `format` turns numbers into text, `advice` has the warnings, `outcome` is the result of one step. Imports `modeling`,
`parallel`, `profiles` and `tasks.store`.
"""
