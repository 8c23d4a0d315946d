"""Profiles: the YAML files that describe a run, their schema, validation and resolution.

Start at schema.py (every key) and resolve.py (`load`: file, `extends`, overrides). check.py has the rules between sections;
errors.py the one error type that all of it raises. The shipped profiles are the *.yaml files beside. Imports
parallel.constraints and nothing else of Trainshed.
"""
