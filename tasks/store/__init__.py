"""Store of artifacts and runs: a folder or s3:// prefix, safe for concurrent processes and machines.

Start with store.py (what a store contains), then artifacts.py (publish, find, verify) and run_folder.py; both keep their files in
a folder or on S3 through backends/. runs.py and run_artifacts.py are what flows and steps call; ledger.py records which data each
run was trained on. A failed read is an error, never treated as absence, and nothing is deleted on a read path
(artifacts.py). Imports `modeling`, `parallel`, `profiles`, `tasks` and `tasks.launchers`.
"""
