"""Training and evaluation programs, one process per device, and what watches them.

Start at train.py: `TrainingRun` is the loop, `Trainer` (trainer.py) the model with its forward and backward passes, and
`Checkpoints` decides what to resume from and what to keep. torchrun.py starts the processes under an external watchdog.
Imports modeling.models, modeling.data, modeling.compilation, parallel and profiles; never Prefect.
"""
