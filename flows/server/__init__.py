"""The Prefect server that a command starts, and what a flow needs to connect to one.

Start with `shared_server.py` (one server for all commands of a store), then `serve.py`, the server's process, which decides who
may use it, `locks.py` and `prefect_settings.py`; `secrets.py` reads Prefect's secret blocks, and `deployments.py` registers given
deployments with any server. Imports `modeling` and `profiles`.
"""
