"""Training and evaluation programs, one process per device.

Start at train.py: `TrainingRun` is the loop, `Trainer` (trainer.py) the model with its forward and backward passes, and
outputs.py what these compute from the last hidden states. `recovery/` saves checkpoints and resumes from them; `preference/` has
DPO and ORPO. metrics.py names the columns of metrics.jsonl, and multi_token.py computes the losses of multi-token prediction.
modeling.supervision starts and watches the processes. Imports `modeling`, `modeling.compilation`, `modeling.data`,
`modeling.models`, `modeling.supervision`, `parallel` and `profiles`.
"""
