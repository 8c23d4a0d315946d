"""What a run's metrics are written to: a file that is mended when training resumes, and TensorBoard's groups."""

import json

from modeling.training.metrics import MetricsWriter, tag
from modeling.training.telemetry import Telemetry
from parallel.device import resolve


def test_lines_that_are_damaged_are_dropped_when_training_resumes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2, "lo\n5\n{}\n\0\xff\n{"step": "two"}\n{"step": 2}\n{"step": 3}\n'
    )
    metrics = MetricsWriter(tmp_path, step=2, total_steps=9)
    metrics.write({"step": 3, "loss": 5.0})
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_metrics_of_the_users_own_stand_apart_from_what_the_device_tells():
    assert tag("accuracy") == "evaluation/accuracy"
    assert tag("device_celsius") == "device/device_celsius"
    monitor = Telemetry(resolve("cpu"))
    figures = monitor.readings()
    monitor.close()
    assert {tag(name).partition("/")[0] for name in figures} == {"device", "memory"}
