"""Scaling laws: forecast a large run's loss from small runs, and find the optimal size for a budget.

Start at law.py; fit.py has the fit and its bootstrap, forecast.py the forecast, and metrics.py that of other metrics.
planned_run.py makes small runs: a ladder's rungs, and small rounds, from whose losses shares.py finds the share of replay.
proxies.py defines those of a mixture, whose losses by source mixture.py fits as a function of the weights.
Imports `modeling.models` and `profiles`.
"""
