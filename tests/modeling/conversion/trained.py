"""Save a checkpoint of a trained model on every rank; imports little, since each rank imports it."""

from pathlib import Path

from parallel.checkpoint import checkpoint
from tests.parallel.checkpoint.test_checkpoint import build, train_step
from tests.parity.harness import Case


def save_trained(folder: Path, case: Case) -> None:
    trainer, optimizer = build(case)
    try:
        train_step(trainer, optimizer, case, 0)
        checkpoint.save(folder, optimizer, {"step": 1, "profile": case.profile().model_dump(mode="json")})
    finally:
        trainer.mesh.close()
