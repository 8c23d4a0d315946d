"""Files and outages: what every other folder reads, writes, locks and retries with.

`state_files.py` writes and reads small files durably, `jsonl.py` reads growing ones, `yaml_text.py` the YAML of profiles,
`folders.py` lists folders, and `file_locks.py` locks between processes. `run_files.py` names the files of a run folder.
`retry_policies.py` has the delays before all retries, and so how long an outage may last, `retries.py` retries network calls, and
`exit_codes.py` tells a job's failures apart. Imports nothing else of this project.
"""
