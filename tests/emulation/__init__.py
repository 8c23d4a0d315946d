"""Emulated accelerator for tests: computes on the CPU, rejects what accelerators reject; no hardware.

`device.py` is the device, `process_group.py` its collectives, `usage.py` what a program did on it, `compiler.py` its compiler,
`program.py` runs training on it. It takes the place of TorchNeuron, under whose name the trainer finds it: its device type, its
process-group backend and its compiler are all called "neuron". Limits: one device a process, no streams, no custom kernels,
no measure of memory or speed.
"""
