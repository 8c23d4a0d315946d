"""Loss anomalies and rollback, stragglers, and metrics on a full disk."""

import json
import os
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from modeling.data.corpus import Samples
from modeling.data.indexed import IndexedDatasetBuilder, token_dtype
from modeling.data.sample_order import sample_number
from modeling.supervision.stragglers import WINDOW, Stragglers
from modeling.training.anomalies import AnomalyGuard
from profiles.files import exit_codes
from profiles.schema import Train
from tests.modeling import micro

pytestmark = pytest.mark.slow

STEPS, BATCH = 60, 4
BAD = (33, 34, 35, 36)  # steps whose samples are random tokens
SETTINGS = (
    *("parallel.tensor=1", "cluster.devices_per_node=1", f"train.steps={STEPS}", "evaluate.every=0"),
    *("checkpoint.every=10", "train.spike_factor=1.4"),
)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """The learnable corpus, with random tokens in the samples that the steps BAD read."""
    folder = micro.dataset(tmp_path_factory.mktemp("data"), tokens=12000)
    corpus = json.loads((folder / "corpus.json").read_text())
    from modeling.data.corpus import Corpus

    samples = Samples(Corpus.open(folder, "train"), 32, 1234)
    stream = samples.corpus.read(0, samples.corpus.tokens)
    chance = np.random.default_rng(1)
    for step in BAD:
        for start in samples.window_starts(np.arange((step - 1) * BATCH, step * BATCH)).tolist():
            stream[start : start + 33] = chance.integers(micro.VOCABULARY, size=33)
    prefix = folder.parent.parent / corpus["train"][0]["path"]
    with IndexedDatasetBuilder(prefix, token_dtype(micro.VOCABULARY)) as builder:
        builder.add_document(stream.tolist())
    return folder


def train(run, dataset, code=0, processes=0):
    return micro.run(
        "training.train", "--run-folder", run, "--dataset", dataset, processes=processes, code=code
    )


def events(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def rows(run):
    return {row["step"]: row for row in micro.metrics(run) if "loss" in row}


def test_loss_spike_skips_step_and_keeps_weights(poisoned, tmp_path):
    run = micro.run_folder(tmp_path / "run", *SETTINGS, "train.bad_steps=10", "train.qk_clip=0.1")
    train(run, poisoned)
    found = rows(run)
    assert list(found) == list(range(1, STEPS + 1))
    assert tuple(step for step, row in found.items() if row["skipped"]) == BAD
    assert {found[step]["parameter_norm"] for step in BAD} == {found[BAD[0] - 1]["parameter_norm"]}
    assert {step: row["clipped_heads"] > 0 for step, row in found.items() if row["max_logit"] > 0.1} == {
        step: not row["skipped"] for step, row in found.items() if row["max_logit"] > 0.1
    }
    assert [event["step"] for event in events(run)] == list(BAD)
    assert "times the median" in events(run)[0]["reason"]


def test_skipped_steps_in_a_row_roll_back_and_exclude_their_samples(poisoned, tmp_path):
    settings = ("train.bad_steps=4", "checkpoint.keep=0", "train.optimizer=muon", "train.qk_clip=0.1")
    run = micro.run_folder(tmp_path / "run", *SETTINGS, *settings)
    log = train(run, poisoned)
    assert "rolled back to step 30: steps 33 to 36 were skipped" in log
    assert [event["event"] for event in events(run)] == ["skipped"] * 4 + ["rollback"]
    assert events(run)[-1]["samples"] == [(BAD[0] - 1) * BATCH, BAD[-1] * BATCH]
    found = rows(run)
    assert list(found) == list(range(1, STEPS + 1))
    assert not any(row["skipped"] for row in found.values())
    assert any(row["clipped_heads"] > 0 for row in found.values())
    assert all((row["max_logit"] > 0.1) == (row["clipped_heads"] > 0) for row in found.values())

    # Excluded samples are part of the checkpoint: the resumed run has the same losses.
    for later in (50, 60):
        for path in sorted((run / f"checkpoints/step_{later}").iterdir()):
            path.unlink()
    log = train(run, poisoned)
    assert "resumed from step 40" in log
    assert {step: row["loss"] for step, row in rows(run).items()} == {
        step: row["loss"] for step, row in found.items()
    }


def test_run_stops_as_diverged_after_allowed_rollbacks(poisoned, tmp_path):
    run = micro.run_folder(
        *(tmp_path / "run", *SETTINGS, "train.learning_rate=1e30", "train.clip=null", "train.warmup_steps=0"),
        # The only checkpoint to keep is that from before the skipped steps.
        *("checkpoint.every=1", "checkpoint.keep=1", "train.bad_steps=3", "train.rollbacks=1"),
        "checkpoint.async=true",
    )
    log = train(run, poisoned, code=exit_codes.DIVERGED)
    assert [event["event"] for event in events(run)] == ["skipped"] * 3 + ["rollback"] + ["skipped"] * 3 + [
        "stopped"
    ]
    assert "rolled back 1 time" in log
    saved = list((run / "checkpoints").glob("step_*"))
    assert saved
    assert all((path / "complete.json").exists() for path in saved)  # the pending one too
    attempts = (run / "attempts.jsonl").read_text().splitlines()
    assert json.loads(attempts[-1])["event"] == "ended"


def test_sample_number_omits_exactly_the_excluded_ranges():
    excluded = [(40, 48), (8, 12)]
    read = [sample_number(position, excluded) for position in range(60)]
    assert read == [number for number in range(72) if not (8 <= number < 12 or 40 <= number < 48)]


def test_sample_number_subtracts_overlapping_ranges_once():
    excluded = [(90, 120), (80, 140), (130, 150)]
    read = [sample_number(position, excluded) for position in range(100)]
    assert read == [number for number in range(170) if not 80 <= number < 150]


@pytest.mark.parametrize(
    ("median", "plausible", "spike", "reason"),
    [(2.0, 2.9, 3.1, "1.6 times the median 2.0000"), (-2.0, -1.1, -0.9, "above the median -2.0000")],
)
def test_spike_exceeds_the_median_by_a_factor_of_its_magnitude(median, plausible, spike, reason):
    settings = Train.model_construct(spike_factor=1.5, bad_steps=10)
    guard = AnomalyGuard(settings, torch.device("cpu"), {"good": [median] * 20, "in_a_row": 0})
    losses = (median, plausible, spike)
    assert [guard.decide(torch.tensor(loss)).item() for loss in losses] == [False, False, True]
    assert guard.reason(spike, 1.0) == f"loss {spike:.4f} is {reason}"


def test_no_loss_is_a_spike_above_a_median_of_zero():
    settings = Train.model_construct(spike_factor=1.5, bad_steps=10)
    guard = AnomalyGuard(settings, torch.device("cpu"), {"good": [0.0] * 20 + [0.3], "in_a_row": 0})
    assert not guard.decide(torch.tensor(0.5))
    assert guard.reason(0.5, 1.0) == "loss 0.5000 is above the median 0.0000"


def slow_on_rank_1(logits, targets):
    """A user-defined loss that slows rank 1 far more than any load of the machine could slow rank 0."""
    if os.environ["RANK"] == "1":
        time.sleep(0.3)
    return functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def test_slow_rank_is_recorded_as_straggler(poisoned, tmp_path):
    run = micro.run_folder(
        *(tmp_path / "run", "parallel.tensor=1", f"train.steps={WINDOW + 2}", "checkpoint.every=0"),
        *("evaluate.every=0", f"train.loss={__name__}:{slow_on_rank_1.__name__}"),
    )
    train(run, poisoned, processes=2)
    (event,) = events(run)
    assert event["event"] == "straggler"
    assert event["reason"].startswith("rank 1 on ")
    assert all(len(row["rank_seconds"]) == 2 for row in rows(run).values())


def test_equal_ranks_are_not_stragglers():
    stragglers = Stragglers(["n1", "n1", "n2", "n2"])
    assert not any(stragglers.update(step, [0.1, 0.1, 0.13, 0.1]) for step in range(1, 100))
    warnings = [stragglers.update(step, [0.1, 0.1, 0.2, 0.1]) for step in range(100, 400)]
    assert next(filter(None, warnings)).startswith("rank 2 on n2 is a straggler: ")
    assert sum(map(bool, warnings)) == 2


def test_metrics_are_buffered_while_disk_is_full(tmp_path, monkeypatch):
    from modeling.training.metrics import MetricsWriter

    run = tmp_path / "run"
    run.mkdir()
    metrics = MetricsWriter(run, 0, 10)
    metrics.write({"step": 1, "loss": 1.0})
    ours = metrics.file
    with open("/dev/full", "ab", buffering=0) as full:
        metrics.file = full
        metrics.write({"step": 2, "loss": 2.0})
        metrics.write({"step": 3, "loss": 3.0})
    metrics.file = ours
    metrics.write({"step": 4, "loss": 4.0})
    metrics.close()
    assert [row["step"] for row in micro.metrics(run)] == [1, 2, 3, 4]
