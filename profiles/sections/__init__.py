"""Larger sections of a profile, their base class, and the registry of model families.

`profiles/schema.py` has the other sections and the complete profile. Start with `model.py`; `roles.py` has what a change of each
key runs again, `families.py` the table of model families with their config.json, also those that packages add, and
`hybrid_families.py` those with linear attention. Imports `parallel` and `profiles`.
"""
