"""metrics.jsonl on resume, and TensorBoard tags."""

import json

from modeling.supervision.telemetry import Telemetry
from modeling.training.metrics import MetricsWriter, tag
from parallel.device import resolve


def test_resume_drops_corrupted_and_later_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2, "lo\n5\n{}\n\0\xff\n{"step": "two"}\n{"step": 2}\n{"step": 3}\n'
    )
    metrics = MetricsWriter(tmp_path, step=2, total_steps=9)
    metrics.write({"step": 3, "loss": 5.0})
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_user_metrics_and_telemetry_have_separate_tags():
    assert tag("accuracy") == "evaluation/accuracy"
    assert tag("device_celsius") == "device/device_celsius"
    telemetry = Telemetry(resolve("cpu"))
    readings = telemetry.readings()
    telemetry.close()
    assert {tag(name).partition("/")[0] for name in readings} == {"device", "memory"}
