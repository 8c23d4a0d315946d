"""Larger sections of a profile, their base class, and the registry of model families.

`profiles/schema.py` has the other sections and the complete profile. Start with `model.py`. `roles.py` declares what a change of
a key runs again: each key's role is in its annotation, or its section's `default_role`; `tasks/keys.py` hashes the keys of each
step, and docs/caching.md has the table by key.
`families.py` has the table of model families with their config.json, also those that packages add, `family.py` what a family can
differ in, and `hybrid_families.py` those with linear attention. Imports `parallel` and `profiles`.
"""
