"""Scaling laws: forecast a large run's loss from small runs, and find the optimal size for a budget.

Start at law.py; fit.py has the fit and its bootstrap, forecast.py the forecast, and metrics.py that of other metrics.
planned_run.py makes small runs, of which rungs.py defines those of a ladder and proxies.py those of a mixture, whose losses by
source mixture.py fits as a function of the weights. share_runs.py makes small rounds, from whose losses shares.py
finds the share of replay. Imports `modeling.models` and `profiles`.
"""
