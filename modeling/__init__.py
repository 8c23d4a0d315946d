"""Models and their training on the devices, with data, compilation, planning and conversion.

Start with the training loop, `training/train.py`. `models/`, `data/`, `compilation/` and `supervision/` are the lowest layer;
`training/`, `planning/`, `scaling/` and `conversion/` build on them, and `tracing/` and `check_device/` on training and planning.
Imports `parallel` and `profiles`.
"""
