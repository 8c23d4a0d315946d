"""Figures of the leading rank's device and host while training goes on, beside the metrics of each step.

A thread reads them every few seconds; the training loop takes the newest, which costs it nothing. What a machine cannot tell is
left out without a word. How a kind of device is read is in READERS, under the name that parallel/device.py gives it:

    psutil           this process and the host
    nvml             NVIDIA's management library
    neuron-monitor   AWS's program of that name, which prints a JSON document a period
                     (awsdocs-neuron.readthedocs-hosted.com, tools/neuron-sys-tools/neuron-monitor-user-guide)
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from parallel.device import Device

PERIOD = 5.0  # seconds
KIB = 1024
Figures = dict[str, float]


class Monitor:
    """Reads figures from its making until `close`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = _psutil()
        self._newest: Figures = next(self._host)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="monitor", daemon=True)
        self._thread.start()

    def figures(self) -> Figures:
        """The newest of each figure, with `memory_bytes`: the most that this process has taken, of the device or the host."""
        peak = self._device.allocated_bytes
        if peak is None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        return {"memory_bytes": peak, **self._newest}

    def close(self) -> None:
        self._ended.set()

    def _follow(self) -> None:
        with contextlib.ExitStack() as stack:
            readers = [self._host, READERS[self._device.monitor](stack)]
            while not self._ended.is_set():
                for reader in readers:
                    self._newest |= next(reader, {})
                self._ended.wait(PERIOD)


def _psutil() -> Iterator[Figures]:
    """Of this process and its host; shares are of 1."""
    process = psutil.Process()
    process.cpu_percent()  # the first call only starts the count
    while True:
        yield {
            "host_memory_bytes": process.memory_info().rss,
            "host_memory_share": psutil.virtual_memory().percent / 100,
            "host_cpu_cores": process.cpu_percent() / 100,
        }


def _nothing(stack: contextlib.ExitStack) -> Iterator[Figures]:
    return iter(())


def _nvml(stack: contextlib.ExitStack) -> Iterator[Figures]:
    """Of the GPU that this process computes on."""
    try:
        import pynvml

        pynvml.nvmlInit()
        stack.callback(pynvml.nvmlShutdown)
        name = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        card = pynvml.nvmlDeviceGetHandleByUUID(name)
    except Exception:  # no such library, driver or card: nothing to tell
        return
    reads: dict[str, Callable[[], float]] = {
        "device_utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(card).gpu / 100,
        "device_memory_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(card).used,
        "device_power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(card) / 1000,
        "device_celsius": lambda: pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU),
    }
    while True:
        found: Figures = {}
        for name, read in reads.items():
            with contextlib.suppress(pynvml.NVMLError):  # some cards tell some figures
                found[name] = float(read())
        yield found


def _neuron(stack: contextlib.ExitStack) -> Iterator[Figures]:
    """Of all Neuron cores that programs of this host use."""
    try:
        program = subprocess.Popen(
            ["neuron-monitor"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return
    stack.callback(program.kill)
    for line in program.stdout or ():
        with contextlib.suppress(ValueError):
            yield neuron_figures(json.loads(line))


def neuron_figures(report: dict[str, Any]) -> Figures:
    """The figures of one document of neuron-monitor: mean utilization of the cores in use, and device memory in use."""
    used, memory = [], 0.0
    for runtime in report.get("neuron_runtime_data") or ():
        told = runtime.get("report") or {}
        cores = (told.get("neuroncore_counters") or {}).get("neuroncores_in_use") or {}
        used += [core["neuroncore_utilization"] / 100 for core in cores.values()]
        bytes_used = (told.get("memory_used") or {}).get("neuron_runtime_used_bytes") or {}
        memory += bytes_used.get("neuron_device", 0)
    return {"device_utilization": sum(used) / len(used), "device_memory_bytes": memory} if used else {}


READERS: dict[str, Callable[[contextlib.ExitStack], Iterator[Figures]]] = {
    "psutil": _nothing,
    "nvml": _nvml,
    "neuron-monitor": _neuron,
}
