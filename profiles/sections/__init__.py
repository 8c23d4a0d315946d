"""Larger sections of a profile, and the schemas of ladder, mixture and branches files.

`profiles/schema.py` has the other sections and the complete profile. Start with `model.py`.
"""
