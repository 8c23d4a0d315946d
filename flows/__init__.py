"""Prefect flows and the `trainshed` command.

`pretrain.py`, `continual.py`, `export.py`, `evaluate.py`, `fleet.py` and `chain.py` hold one flow each; start reading at
`pretrain.py`. `experiments/` has the flows that train several runs. `runner/` runs steps as Prefect tasks, `run_setup.py` has
what a flow does before and after its steps, `start_checks.py` what is checked before Prefect starts, and `final_states.py` a
flow's final states. `registration.py` prepares a server: work pool, automations and deployments. `cli/` is the command, `ui/` the
output in the terminal and in Prefect's UI, `alerts/` Prefect events and automations, `server/` the Prefect server and its
settings. Imports `modeling`, `profiles` and `tasks`.
"""
