"""Profiles: the YAML files that describe a run, their schema, validation and resolution.

Start at schema.py (every key) and resolve.py (`load`: file, `extends`, overrides). check.py has the rules between sections, with
those of one subject in `rules/`, and errors.py the error type that all of them raise. Shipped profiles are in `shipped/`, with
ladders and branches. Imports `parallel`.
"""
