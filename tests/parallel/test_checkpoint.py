"""Checkpoints saved at one topology and loaded at another."""

import json
import os
import pickle
import platform
import time
from pathlib import Path

import pytest
import torch

from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import Mesh, RMSNorm, ZeRO1, initialize
from parallel.checkpoint import checkpoint
from parallel.checkpoint.reader import Reader
from tests.parity.harness import BATCH, LOSS, NORM, RATE, SEQUENCE, Case, Results, batch, train
from tests.pool import Pool

SAVED, STEPS = 6, 10
TOPOLOGIES = {
    "one process": Case(),
    "tensor 2": Case(tensor=2),
    "tensor 4": Case(tensor=4),  # KV heads replicated
    "tensor 8": Case(tensor=8, sequence_parallel=False),  # and a padded vocabulary
    "data 4": Case(data=4),
    "data 2, whole optimizer": Case(data=2, zero1=False),
    "tensor 2, data 2": Case(tensor=2, data=2),
    "context 4": Case(context=4),
    "pipeline 2": Case(pipeline=2),
    "pipeline 2, tensor 4": Case(pipeline=2, tensor=4),
    "tensor 2, context 2, data 2": Case(tensor=2, context=2, data=2),
    "gpt, one process": Case("gpt dropout"),
    "gpt, tensor 2, data 2": Case("gpt dropout", tensor=2, data=2),
    "gpt, pipeline 2, tensor 2": Case("gpt dropout", pipeline=2, tensor=2),  # embedding tied over stages
    "gpt, pipeline 2, context 2": Case("gpt dropout", pipeline=2, context=2),
}
PAIRS = [
    ("one process", "tensor 4"),
    ("one process", "data 4"),
    ("tensor 2", "one process"),
    ("tensor 4", "tensor 2"),
    ("tensor 4", "data 2, whole optimizer"),
    ("tensor 8", "tensor 2, data 2"),
    ("data 4", "tensor 8"),
    ("data 2, whole optimizer", "pipeline 2"),
    ("tensor 2, data 2", "data 4"),
    ("context 4", "pipeline 2, tensor 4"),
    ("pipeline 2", "context 4"),
    ("pipeline 2, tensor 4", "tensor 2, context 2, data 2"),
    ("tensor 2, context 2, data 2", "one process"),
    ("gpt, one process", "gpt, pipeline 2, tensor 2"),
    ("gpt, tensor 2, data 2", "gpt, pipeline 2, context 2"),
    ("gpt, pipeline 2, tensor 2", "gpt, tensor 2, data 2"),
    ("gpt, pipeline 2, context 2", "gpt, one process"),
]


class Saved:
    """Runs that were not interrupted, with a checkpoint of each from the middle; each is made when first asked for."""

    def __init__(self, folder: Path, pool: Pool) -> None:
        self.folder, self.pool = folder, pool
        self.runs: dict[str, Results] = {}

    def __call__(self, topology: str) -> tuple[Path, Results]:
        path = self.folder / topology
        if topology not in self.runs:
            case = TOPOLOGIES[topology]
            arguments = {"steps": range(STEPS), "save": {SAVED: path}}
            self.runs[topology] = self.pool.run(train, case.world, case=case, **arguments)[0]
        return path, self.runs[topology]

    def resumed(self, source: str, target: str) -> Results:
        """The remaining steps at another topology."""
        case, arguments = TOPOLOGIES[target], {"steps": range(SAVED, STEPS), "resume": self(source)[0]}
        return self.pool.run(train, case.world, case=case, **arguments)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, pool) -> Saved:
    return Saved(tmp_path_factory.mktemp("checkpoints"), pool)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[" -> ".join(pair) for pair in PAIRS])
def test_goes_on_at_another_topology(saved, source, target):
    one = "gpt, one process" if source.startswith("gpt") else "one process"
    _, exact = saved(one)
    resumed = saved.resumed(source, target)
    assert resumed.losses == pytest.approx(exact.losses[SAVED:], rel=LOSS)
    assert resumed.norms == pytest.approx(exact.norms[SAVED:], rel=NORM)


@pytest.mark.parametrize(
    "topology",
    ["one process", "tensor 4", "data 4", "tensor 2, context 2, data 2", "gpt, pipeline 2, tensor 2"],
)
def test_goes_on_at_the_same_topology_to_the_bit(saved, topology):
    _, run = saved(topology)
    resumed = saved.resumed(topology, topology)
    assert (resumed.losses, resumed.norms) == (run.losses[SAVED:], run.norms[SAVED:])


def global_weights(path: Path) -> dict[str, torch.Tensor]:
    """Every global weight of a checkpoint, assembled from its boxes."""
    reader, weights = Reader(path), {}
    for name, stored in reader.tensors.items():
        if name.startswith("weights."):
            weights[name] = torch.full(stored.shape, float("nan"))
            for box in stored.boxes:
                index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                weights[name][index] = reader.map(box)
    return weights


def test_holds_each_global_tensor_whole_and_unpadded(saved):
    ours, exact = (global_weights(saved(topology)[0]) for topology in ("tensor 8", "one process"))
    assert ours.keys() == exact.keys()
    assert ours["weights.embedding.weight"].shape == (100, 64)
    for name, tensor in exact.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5)


def small(width: int = 4, steps: int = 1) -> ZeRO1:
    """An optimizer over one weight, after some steps."""
    layer = RMSNorm(width, Mesh().tensor)
    initialize(layer, Mesh().tensor, 1)
    optimizer = ZeRO1(layer.named_parameters(), Mesh())
    for _ in range(steps):
        optimizer.begin_step(1)
        layer.weight.square().sum().backward()
        optimizer.step(0.1)
    return optimizer


def test_weights_alone_leave_the_optimizer_anew(tmp_path):
    checkpoint.save(tmp_path / "step_3", trained := small(steps=3), {"step": 3})
    fresh = small(steps=0)
    assert checkpoint.load(tmp_path / "step_3", fresh, weights_only=True)["step"] == 3
    assert torch.equal(fresh.buckets[0].master, trained.buckets[0].master)
    assert fresh.steps == 0
    assert fresh.buckets[0].exp_avg.eq(0).all()


def test_without_its_marker_it_does_not_count(tmp_path):
    for step in (2, 10, 30):
        checkpoint.save(tmp_path / f"step_{step}", small(), {"step": step})
    (tmp_path / "step_30" / checkpoint.MARKER).unlink()
    assert [step for step, _ in checkpoint.complete_checkpoints(tmp_path)] == [2, 10]
    with pytest.raises(ValueError, match=r"step_30: not a complete checkpoint; complete.json is missing"):
        checkpoint.load(tmp_path / "step_30", small())


def test_a_writer_that_is_superseded_completes_nothing(tmp_path):
    def refuse():
        raise checkpoint.StaleAttempt("attempt 2 has taken over")

    checkpoint.save(tmp_path / "step_1", small(), {})
    for step in (1, 2):  # of which the successor has saved the first
        with pytest.raises(checkpoint.StaleAttempt):
            checkpoint.save(tmp_path / f"step_{step}", small(), {}, refuse)
    checkpoint.load(tmp_path / "step_1", small())
    assert [step for step, _ in checkpoint.complete_checkpoints(tmp_path)] == [1]


def test_saving_again_replaces_what_was_there(tmp_path):
    checkpoint.save(tmp_path / "step_1", small(steps=1), {"step": 1})
    checkpoint.save(tmp_path / "step_1", again := small(steps=2), {"step": 1})
    loaded = small(steps=0)
    checkpoint.load(tmp_path / "step_1", loaded)
    assert torch.equal(loaded.buckets[0].exp_avg_sq, again.buckets[0].exp_avg_sq)
    assert loaded.steps == 2


def test_marker_says_what_it_was_told(tmp_path):
    checkpoint.save(tmp_path / "step_1", small(), {"step": 1, "profile": {"name": "p"}})
    marker = json.loads((tmp_path / "step_1" / checkpoint.MARKER).read_text())
    assert marker == {
        "step": 1,
        "profile": {"name": "p"},
        "optimizer_steps": 1,
        "mesh": {"pipeline": 1, "data": 1, "context": 1, "tensor": 1},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def test_another_model_is_refused_with_the_first_difference(tmp_path):
    checkpoint.save(tmp_path / "step_1", small(), {})
    with pytest.raises(ValueError, match=r"step_1: weights.weight has shape \(4,\), the model needs \(5,\)"):
        checkpoint.load(tmp_path / "step_1", small(width=5))
    other = RMSNorm(4, Mesh().tensor)
    with pytest.raises(ValueError, match=r"no tensor weights.norm.weight; it is of a different model"):
        checkpoint.load(tmp_path / "step_1", ZeRO1([("norm.weight", other.weight)], Mesh()))


def test_what_is_saved_beside_training_is_what_there_was_when_it_began(tmp_path, pool):
    plain = pool.run(saved_beside, 4, folder=tmp_path)
    assert all(plain)


def saved_beside(folder: Path) -> bool:
    """Whether a checkpoint written during further steps holds the weights from before them, to the bit."""
    case = Case(tensor=2, data=2)
    trainer, optimizer = made(case)
    try:
        saver = checkpoint.Saver(optimizer, asynchronous=True)
        for step in range(3):  # a second and third save write over the copies of the first
            train_step(trainer, optimizer, case, step)
            exact = [bucket.master.clone() for bucket in optimizer.buckets]
            random = torch.get_rng_state()
            saver._thread.submit(
                time.sleep, 0.3
            )  # so that the copying is late, and the next update has to wait
            saver.begin(folder / f"step_{step}", {})
            torch.rand(3)
            train_step(trainer, optimizer, case, step + 1)
            assert saver.pending
            saver.finish()
        saver.close()
        checkpoint.load(folder / "step_2", optimizer)
        same = [
            torch.equal(bucket.master, master)
            for bucket, master in zip(optimizer.buckets, exact, strict=True)
        ]
        return all(same) and torch.equal(torch.get_rng_state(), random) and optimizer.steps == 5
    finally:
        trainer.mesh.close()


def made(case: Case) -> tuple[Trainer, ZeRO1]:
    trainer = Trainer(case.profile(), start=False)
    return trainer, make_optimizer(trainer)


def train_step(trainer: Trainer, optimizer: ZeRO1, case: Case, step: int) -> None:
    own = BATCH // trainer.mesh.data.size
    first = trainer.mesh.data.rank * own
    optimizer.begin_step(trainer.profile.accumulation_steps)
    trainer.forward_backward(batch(step)[first : first + own], 1 / (BATCH * SEQUENCE), first)
    optimizer.step(RATE)


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks(tmp_path, pool):
    said = pool.run(one_cannot_write, 2, folder=tmp_path)
    assert said == ["rank 1: Is a directory"] * 2
    assert list(tmp_path.glob("step_*")) == []


def one_cannot_write(folder: Path) -> str:
    trainer, optimizer = made(Case(data=2))
    saver = checkpoint.Saver(optimizer, asynchronous=True)
    try:
        if trainer.mesh.rank == 1:
            write = saver._write

            def spoilt(writer):
                (folder / f"step_1/{writer.save_id}_1_0.distcp").mkdir(parents=True)
                return write(writer)

            saver._write = spoilt
        saver.begin(folder / "step_1", {})
        saver.finish()
    except checkpoint.SaveFailed as reason:
        return str(reason)
    finally:
        trainer.mesh.close()
    return ""


def test_an_index_that_would_run_code_is_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "done"),)

    checkpoint.save(tmp_path / "step_1", small(), {})
    (tmp_path / "step_1/.metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match=r".metadata: rejected: posix.mkdir is not allowed"):
        checkpoint.load(tmp_path / "step_1", small())
    assert not (tmp_path / "done").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is no fault of ours
def test_torch_can_read_it_with_its_own_tools(tmp_path):
    checkpoint.save(tmp_path / "step_1", ours := small(), {})
    state = {"weights.weight": torch.zeros(4)}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "step_1", no_dist=True)
    assert torch.equal(state["weights.weight"], ours.buckets[0].master)
