"""Experiment trackers in addition to TensorBoard: W&B, MLflow, Trackio or a class of the user's own.

Start with `protocol`, what a tracker implements. `process` is the flow's side: it starts `worker` once for each tracker, a
separate process that follows metrics.jsonl and calls the tracker. `trackers` has ours, and alone imports their packages.
Imports `modeling`, `profiles`, `tasks.launchers`, `tasks.reporting` and `tasks.store`.
"""
