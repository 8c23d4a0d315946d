"""Files of experiments, several runs for a target: ladders, mixtures, replay shares and branches.

Start with `experiment.py`, what all have; `load.py` reads a file. Imports `profiles`, `profiles.files` and `profiles.sections`.
"""
