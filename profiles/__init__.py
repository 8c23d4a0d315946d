"""Profiles: the YAML files that describe a run, their schema, validation and resolution.

Start at schema.py (every key) and resolve.py (`load`: file, `extends`, overrides). check.py runs the rules between keys, which
are in `rules/` by subject, and errors.py has the error type that all of them raise. Shipped profiles are in `shipped/`, with
ladders and branches, which experiments.py reads; those for H100 are entries in `shipped/hardware/h100.yml`. `files/` is what
other folders use too. Imports `parallel`.
"""
