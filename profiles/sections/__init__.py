"""Larger sections of a profile.

`profiles/schema.py` has the other sections and the complete profile. Start with `model.py`. Imports `profiles`.
"""
