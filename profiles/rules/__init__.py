"""Rules between the keys of a profile, by subject: what correct types alone do not guarantee.

Start at objectives.py (`objective` and `lora`). hyperparameters.py has the rules of `train`, with those of QK-clip and Muon,
parallel.py those of the topology, cluster.py those of `cluster` and `compile`, with what can only be planned, and the other
modules those of the subject in their name. Each has functions `check…(profile)` that raise ProfileError; ../check.py lists them
in the order in which they run, so a new subject is a module here and a line there. Imports `parallel`, `profiles`,
`profiles.files` and `profiles.sections`.
"""
