"""Replica check: drifting copies of weights are reported at the next check, and equal from then on."""

import pytest

from tasks.store import runs
from tests.forked_jobs import run_forked
from tests.modeling import drift, micro

FOUR_RANKS = ("parallel.tensor=4", "cluster.devices_per_node=4")  # two for each KV head
SETTINGS = (*FOUR_RANKS, "train.steps=8", "train.check_replicas_every=2", "evaluate.every=0")


@pytest.mark.slow
def test_drift_is_reported_at_the_next_check_and_undone(tmp_path):
    run, dataset = micro.run_folder(tmp_path / "run", *SETTINGS), micro.dataset(tmp_path / "data")
    code, output = run_forked("tests.modeling.drift", ["--run-folder", run, "--dataset", dataset], 4)
    assert code == 0, output[-4000:]
    # There is one event, because neither later checks nor those before the saves of steps 4 and 8 find a difference.
    (event,) = [event for event in runs.read_events(run) if event["event"] == "replicas differ"]
    assert event["step"] == drift.STEP + 1
    assert set(event["weights"]) >= set(drift.DRIFT)
    assert "overwritten by those of the first rank" in event["reason"]
    assert f"warning: step {drift.STEP + 1}: replicas differ between ranks: " in output
    assert sorted(micro.losses(run)) == list(range(1, 9))
