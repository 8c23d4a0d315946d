"""Rules between the keys of a profile, by subject: what correct types alone do not guarantee.

Start at objectives.py. Each module has functions `check…(profile)` that raise ProfileError; ../check.py lists them in the order
in which they run, so a new subject is a module here and a line there. Imports `parallel`, `profiles` and `profiles.sections`.
"""
