"""Device and host telemetry of the leading rank: utilization, memory, power and temperature.

A thread samples every PERIOD seconds, and the training loop uses the latest readings at no cost. Readings that a machine does not
provide are omitted without a warning. READERS has one reader for each kind of device, by its name in parallel/device.py:

    psutil           nothing but the readings of this process and its host, which every device has
    nvml             NVIDIA's management library
    neuron-monitor   AWS's tool, which prints one JSON document per period
                     (awsdocs-neuron.readthedocs-hosted.com, tools/neuron-sys-tools/neuron-monitor-user-guide)
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from parallel.device import Device

PERIOD = 5.0  # seconds
KIB = 1024
Readings = dict[str, float]


class Telemetry:
    """Samples readings from construction until `close`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = _host_readings()
        self._latest: Readings = next(self._host)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="telemetry", daemon=True)
        self._thread.start()

    def readings(self) -> Readings:
        """Latest readings, and `memory_bytes`: peak memory of this process on the device, else on the host."""
        peak = self._device.allocated_bytes
        if peak is None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        return {"memory_bytes": peak, **self._latest}

    def close(self) -> None:
        self._stop.set()

    def _sample(self) -> None:
        with contextlib.ExitStack() as stack:
            readers = [self._host, READERS[self._device.monitor](stack)]
            while not self._stop.is_set():
                for reader in readers:
                    self._latest |= next(reader, {})
                self._stop.wait(PERIOD)


def _host_readings() -> Iterator[Readings]:
    process = psutil.Process()
    since, used, cores = process.create_time(), 0.0, None  # the first mean is since the process began
    while True:
        now, total = time.time(), time.process_time()
        if cores is None or now - since >= 1:
            since, used, cores = now, total, round((total - used) / (now - since), 3)
        yield {
            "host_memory_bytes": process.memory_info().rss,
            "host_memory_share": psutil.virtual_memory().percent / 100,
            "host_cpu_cores": cores,
        }


def _nvml(stack: contextlib.ExitStack) -> Iterator[Readings]:
    """Readings of this process's GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        stack.callback(pynvml.nvmlShutdown)
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no library, driver or GPU
        return
    queries: dict[str, Callable[[], float]] = {
        "device_utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "device_memory_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "device_power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "device_celsius": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    }
    while True:
        readings: Readings = {}
        for name, query in queries.items():
            with contextlib.suppress(pynvml.NVMLError):  # not every GPU supports every query
                readings[name] = float(query())
        yield readings


def _neuron(stack: contextlib.ExitStack) -> Iterator[Readings]:
    """Readings of all Neuron cores in use on this host."""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        monitor = subprocess.Popen(
            ["neuron-monitor"], text=True, errors="replace", stdout=pipe, stderr=nothing
        )
    except OSError:
        return
    stack.callback(monitor.kill)
    for line in monitor.stdout or ():
        with contextlib.suppress(ValueError):
            yield neuron_readings(json.loads(line))


def neuron_readings(report: dict[str, Any]) -> Readings:
    """Readings from a neuron-monitor report: mean utilization of cores in use, and device memory in use."""
    utilization, memory = [], 0.0
    for runtime in report.get("neuron_runtime_data") or ():
        runtime_report = runtime.get("report") or {}
        cores = (runtime_report.get("neuroncore_counters") or {}).get("neuroncores_in_use") or {}
        utilization += [core["neuroncore_utilization"] / 100 for core in cores.values()]
        used = (runtime_report.get("memory_used") or {}).get("neuron_runtime_used_bytes") or {}
        memory += used.get("neuron_device", 0)
    if not utilization:
        return {}
    return {"device_utilization": sum(utilization) / len(utilization), "device_memory_bytes": memory}


READERS: dict[str, Callable[[contextlib.ExitStack], Iterator[Readings]]] = {
    "psutil": lambda stack: iter(()),
    "nvml": _nvml,
    "neuron-monitor": _neuron,
}
