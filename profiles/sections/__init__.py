"""Sections of a profile that have a file of their own, and the files of ladders and mixtures.

`profiles/schema.py` has the other sections, and the profile of all.

Start with `model.py`.
"""
