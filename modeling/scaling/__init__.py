"""Scaling laws: forecast the loss of a large run from those of small ones, with an interval, and optimal sizes for a budget.

Start at law.py; fit.py has the fit and its bootstrap, forecast.py the forecast, metrics.py that of other metrics, and rungs.py
the small runs of a ladder. mixture.py fits losses by source as a function of mixture weights, proxies.py defines its runs.
Imports numpy, modeling.models and profiles.
"""
