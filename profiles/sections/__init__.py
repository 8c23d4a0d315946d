"""Sections of a profile that have a file of their own, and the ladder file; `profiles/schema.py` has the other sections.

Start with `model.py`.
"""
