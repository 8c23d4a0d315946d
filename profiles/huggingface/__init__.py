"""What profiles take from Hugging Face: revisions of hub repositories, and shapes from `config.json`.

Start with `config.py`, which turns a `config.json` into a profile's model section and back; `layer_kinds.py` has the keys that
list layers, `dbrx_config.py` the one that is nested, and `hub.py` queries the hub. Imports `profiles`, `profiles.files` and
`profiles.sections`.
"""
