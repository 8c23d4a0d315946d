"""Models, training and what surrounds it on the devices: data, compilation, planning, conversion.

`training/train.py` is the training loop and a good start. `models/` and `data/` are at the bottom, `compilation/`
beside them; `training/`, `planning/` and `conversion/` build on those, `tracing/` on training and planning. Imports
`parallel` and `profiles`, never `tasks`, `flows` or Prefect.
"""
