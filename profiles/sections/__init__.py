"""Larger sections of a profile, their base class, and the registry of model families.

`profiles/schema.py` has the other sections and the complete profile. Start with `model.py`; `families.py` has the model families,
also those that packages add. Imports `parallel` and `profiles`.
"""
