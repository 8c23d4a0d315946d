"""Profiler traces of steps: failures to write them."""

import torch

from modeling.supervision.profiling import StepTrace


def test_trace_that_cannot_be_written_does_not_end_training(tmp_path, caplog):
    (tmp_path / "traces").touch()  # no folder can be created
    trace = StepTrace(tmp_path, (1, 1))
    trace.begin(1)
    torch.ones(2).sum()
    assert trace.active
    assert trace.ends_with(1)
    trace.write(1)
    assert not trace.active
    assert (
        "steps_1-1.json.gz: the trace cannot be written: [Errno 20] a file, a pipe or a dangling link"
        in caplog.text
    )
    trace.begin(2)
    assert not trace.ends_with(2)
