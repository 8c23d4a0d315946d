"""Goodput of simulated runs whose true time by category is known."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.files.jsonl import LogFollower
from tasks.fleet.goodput import CATEGORIES, time_use
from tasks.store.runs import last_training_row
from tests.tasks.fleet.histories import EVALUATE_EVERY, SAVE_EVERY, SimulatedRun

SECONDS = st.floats(0.125, 100.0, width=16)
ATTEMPTS = st.lists(
    st.fixed_dictionaries(
        {
            "idle": SECONDS,
            "queue": SECONDS,
            "dies": st.booleans(),  # before its ranks are ready
            "start": SECONDS,
            "restore": SECONDS,
            "step": SECONDS,
            "compiling": SECONDS,
            "steps": st.integers(0, 9),
            "skipped": st.integers(2, 9),
            "rolls_back": st.booleans(),
            "end": st.sampled_from(["crash", "hang", "requeue", "stop"]),
            "lost": SECONDS,
        }
    ),
    min_size=1,
    max_size=5,
)


def simulate(folder, attempts):
    """A run of these attempts; all but a requeued one are submitted by the flow."""
    run, requeued = SimulatedRun(folder), False
    for attempt in attempts:
        dies = attempt["dies"] and not requeued
        if requeued:
            run.wait("queue", attempt["queue"])
        else:
            run.submit(attempt["idle"], 0.0 if dies else attempt["queue"])
        if dies:
            run.wait("start", attempt["start"])
            run.fail("rank 0 ended with exit code 1")
            continue
        run.start(attempt["start"], attempt["restore"])
        for index in range(attempt["steps"]):
            compiling = attempt["compiling"] if index == 0 and attempt["steps"] > 1 else 0.0
            run.train(attempt["step"], compiling, skipped=index == attempt["skipped"])
            if index + 1 < attempt["steps"]:  # `end` is what follows the last step
                run.pause(0.25)
                if run.step % EVALUATE_EVERY == 0:
                    run.evaluate(3.5)
                # A start from a process's first step would count what that compiled as training.
                if index and run.step % SAVE_EVERY == 0:
                    run.save(1.5)
        requeued = attempt["end"] == "requeue"
        if attempt["rolls_back"] and attempt["steps"]:
            run.roll_back(attempt["restore"])
            run.train(attempt["step"], 0.0)
        if attempt["end"] in ("crash", "hang"):
            run.wait("hang" if attempt["end"] == "hang" else "repeated", attempt["lost"])
            run.fail("a rank hung" if attempt["end"] == "hang" else "rank 1 on n1 was killed by SIGKILL")
        elif attempt["steps"]:
            run.save(2.0)
            run.end()
    return run


def read(folder):
    rows = [list(LogFollower(folder / name).rows()) for name in ("attempts.jsonl", "events.jsonl")]
    return time_use(*rows, last_training_row(folder))


@settings(max_examples=30, deadline=None)
@given(ATTEMPTS)
def test_time_by_category_is_that_of_the_simulation(attempts):
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(Path(folder) / "run", attempts)
        found = read(run.folder)
    assert found.seconds == pytest.approx(run.truth, abs=1e-3)
    assert found.total == pytest.approx(run.clock - 1_800_000_000.0, abs=1e-2)


def test_a_queued_job_counts_as_queue_until_now_and_holds_no_devices(tmp_path):
    run = SimulatedRun(tmp_path / "run")
    run.submit(0, 5.0)
    attempts = list(LogFollower(run.folder / "attempts.jsonl").rows())
    found = time_use(attempts, [], None, now=run.clock + 60)
    assert found.seconds == {**dict.fromkeys(CATEGORIES, 0.0), "queue": 65.0}
    assert found.held == 0
    assert found.goodput is None
