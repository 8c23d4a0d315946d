"""Scaling laws: forecast a large run's loss from small runs, and find the optimal size for a budget.

Start at law.py; fit.py has the fit and its bootstrap, forecast.py the forecast, metrics.py that of other metrics, and rungs.py
the small runs of a ladder. mixture.py fits losses by source as a function of mixture weights, proxies.py defines its runs.
Imports numpy, modeling.models and profiles.
"""
