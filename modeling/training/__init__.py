"""Training and evaluation programs, one process per device.

Start at train.py: `TrainingRun` is the loop, `Trainer` (trainer.py) the model with its forward and backward passes, outputs.py
what these compute from the last hidden states, and `Checkpoints` decides what to resume from and what to keep.
modeling.supervision starts and watches the processes. Imports modeling.models, modeling.data, modeling.compilation,
modeling.supervision, parallel and profiles; never Prefect.
"""
