"""In-memory reference model: rating pairs in each step equals rating them before, on every topology."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from modeling.data.prefetch import Batch
from modeling.planning.planner import plan
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel.checkpoint import checkpoint
from profiles.schema import Profile
from tests.parity.harness import BATCH, LOSS, RATE, Case, batch

PAIRS, STEPS = BATCH // 2, 3


def variant(profile: Profile, *, seed: int = 0, rated_before: bool = True) -> Profile:
    objective = profile.objective.model_copy(update={"precompute_reference": rated_before})
    train = profile.train.model_copy(update={"seed": seed})
    return profile.model_copy(update={"objective": objective, "train": train})


def losses(trainer: Trainer, references: list) -> list[float]:
    """Losses of some steps on this rank's pairs, given each step's reference log-probabilities or None."""
    optimizer, found = make_optimizer(trainer), []
    count = BATCH // trainer.mesh.data.size
    rows = slice(trainer.mesh.data.rank * count, (trainer.mesh.data.rank + 1) * count)
    for step, reference in enumerate(references):
        optimizer.begin_step(trainer.profile.accumulation_steps)
        tokens = batch(step, "dpo")[rows] if trainer.reads_samples else None
        loss = trainer.forward_backward(Batch(tokens, reference=reference), 1 / PAIRS)
        optimizer.step(RATE)
        found += trainer.sum(loss[None]).tolist()
    return found


def rated_in_each_step(case: Case, start: Path) -> tuple[list[float], int, int]:
    """The losses, this rank's stage, and the bytes of its reference model between steps."""
    trainer = Trainer(variant(case.profile(), rated_before=False))
    try:
        with (
            pytest.raises(RuntimeError, match="used before its weights were loaded"),
            trainer.reference_weights(),
        ):
            pass
        trainer.reference_model.load(start)
        copy = [p for stage in trainer.reference_model.stages.values() for p in stage.parameters()]
        assert not any(parameter.requires_grad for parameter in copy)
        found = losses(trainer, [None] * STEPS)
        shards = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in copy}
        masters = [bucket.master for bucket in trainer.reference_model.weights.frozen_buckets]
        held = sum(shards.values()) + sum(master.nbytes for master in masters)
        return found, trainer.mesh.pipeline.rank, held
    finally:
        trainer.mesh.close()


@pytest.mark.parametrize(
    "topology",
    [{"tensor": 2, "pipeline": 2}, {"data": 2, "context": 2, "sharding": "fsdp"}],
    ids=["tensor 2, pipeline 2", "fsdp 4, context 2"],
)
def test_rating_pairs_in_each_step_equals_rating_them_before(pool, tmp_path, topology):
    case = replace(Case(objective="dpo"), **topology)
    with Trainer(variant(case.reference.profile(), seed=7)) as rater:
        checkpoint.save(tmp_path / "start", make_optimizer(rater), {"step": 0})
        references = [rater.answer_log_probabilities(Batch(batch(step, "dpo"))) for step in range(STEPS)]
    with Trainer(variant(case.reference.profile())) as trainer:
        expected = losses(trainer, references)
    ranks = pool.run(rated_in_each_step, case.world, case=case, start=tmp_path / "start")
    with_copy, without = (plan(variant(case.profile(), rated_before=before)) for before in (False, True))
    for found, stage, held in ranks:
        assert found == pytest.approx(expected, rel=LOSS)
        parameters = [each.stages[stage].bytes["parameters"] for each in (with_copy, without)]
        assert held == pytest.approx(parameters[0] - parameters[1], rel=0.01)
