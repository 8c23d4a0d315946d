"""Device telemetry: read from devices that provide it, omitted silently elsewhere."""

import contextlib

import pytest
import torch

from modeling.supervision.telemetry import READERS, Telemetry, neuron_readings
from parallel import device

# abridged output of neuron-monitor
REPORT = {
    "neuron_runtime_data": [
        {
            "pid": 1,
            "report": {
                "neuroncore_counters": {
                    "neuroncores_in_use": {
                        "0": {"neuroncore_utilization": 80.0},
                        "1": {"neuroncore_utilization": 40.0},
                    }
                },
                "memory_used": {"neuron_runtime_used_bytes": {"host": 1, "neuron_device": 3 << 30}},
            },
        }
    ]
}


def test_neuron_monitor_document_is_parsed():
    assert neuron_readings(REPORT) == {
        "device_utilization": pytest.approx(0.6),
        "device_memory_bytes": 3 << 30,
    }
    assert neuron_readings({"neuron_runtime_data": []}) == {}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("kind", ["cpu", "cuda", "neuron"])
def test_machine_without_the_device_reads_only_host_telemetry(kind, capfd, caplog):
    telemetry = Telemetry(device.resolve(kind))
    readings = telemetry.readings()
    telemetry.close()
    assert "memory_bytes" in readings
    assert not any(name.startswith("device_") for name in readings)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_every_device_has_a_telemetry_reader():
    for each in device.KINDS.values():
        with contextlib.ExitStack() as stack:
            assert iter(READERS[each.monitor](stack))
