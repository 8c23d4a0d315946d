"""Rules between the keys of a profile, by subject: what correct types alone do not guarantee.

Start at objectives.py. Each module has a `check(profile)` that raises ProfileError, and ../check.py calls all of them, so a new
subject is a module here and a line there. Imports `parallel`, `profiles` and `profiles.sections`.
"""
