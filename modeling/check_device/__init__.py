"""Checks of a machine's devices, run first on new hardware: `python -m modeling.check_device`.

Start with `checks.py`, which lists them. `kernel_errors.py` and `product_errors.py` compute errors of kernels on the shapes of a
profile, and `kernel_check.py` compares these with tolerances. `isolation.py` runs each check in separate processes, and
`__main__.py` is the command. Imports `modeling.compilation`, `modeling.data`, `modeling.models`, `modeling.planning`,
`modeling.training`, `parallel` and `profiles`.
"""
