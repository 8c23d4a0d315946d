"""Scaling laws: the loss of a large run from those of small ones, with an interval, and what a budget buys.

Start reading at law.py; fit.py has the fit and its bootstrap, forecast.py what is made of them, rungs.py the small runs of a
ladder and mixture.py losses by source as a function of mixture weights. May import modeling.models and profiles; numpy only.
"""
