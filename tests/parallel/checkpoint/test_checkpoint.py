"""Checkpoints: resume at the same and other topologies, asynchronous and failed saves, rejected files."""

import io
import json
import os
import pickle
import platform
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from modeling.data.prefetch import Batch
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import Mesh, RMSNorm, ShardedAdamW, initialize
from parallel.checkpoint import checkpoint, locations, reader, writer
from parallel.checkpoint.reader import Reader
from parallel.checkpoint.saver import SaveFailed, Saver, StaleAttempt
from parallel.layers.linear import ReplicatedLinear
from parallel.optimizer.grouping import EverywhereRule
from parallel.optimizer.muon import Muon
from tests.parity.harness import BATCH, LOSS, NORM, RATE, SEQUENCE, Case, Results, batch, train
from tests.pool import Pool

SAVED, STEPS = 2, 4
TOPOLOGIES = {
    "one process": Case(),
    "tensor 2": Case(tensor=2),
    "tensor 4": Case(tensor=4),  # KV heads replicated
    "tensor 8": Case(tensor=8, sequence_parallel=False),  # and a padded vocabulary
    "data 4": Case(data=4),
    "fsdp 4": Case(data=4, sharding="fsdp"),
    "hsdp 2 x 2, pipeline 2": Case(data=4, pipeline=2, sharding="fsdp", shard_degree=2),
    "data 2, replicated optimizer": Case(data=2, sharding="none"),
    "tensor 2, data 2": Case(tensor=2, data=2),
    "context 4": Case(context=4),
    "pipeline 2": Case(pipeline=2),
    "pipeline 2, tensor 4": Case(pipeline=2, tensor=4),
    "tensor 2, context 2, data 2": Case(tensor=2, context=2, data=2),
    "gpt, one process": Case("gpt dropout"),
    "gpt, tensor 2, data 2": Case("gpt dropout", tensor=2, data=2),
    "gpt, pipeline 2, tensor 2": Case("gpt dropout", pipeline=2, tensor=2),  # embedding tied over stages
    "gpt, pipeline 2, context 2": Case("gpt dropout", pipeline=2, context=2),
    "muon, one process": Case(optimizer="muon"),
    "muon, fsdp 2, tensor 4": Case(optimizer="muon", data=2, tensor=4, sharding="fsdp"),
    "muon, pipeline 2, data 2": Case(optimizer="muon", pipeline=2, data=2),
}
PAIRS = [
    ("one process", "tensor 4"),
    ("tensor 2", "hsdp 2 x 2, pipeline 2"),
    ("tensor 4", "data 2, replicated optimizer"),
    ("tensor 8", "tensor 2, data 2"),
    ("data 4", "fsdp 4"),
    ("fsdp 4", "tensor 8"),
    ("hsdp 2 x 2, pipeline 2", "data 4"),
    ("data 2, replicated optimizer", "pipeline 2"),
    ("tensor 2, data 2", "data 4"),
    ("context 4", "pipeline 2, tensor 4"),
    ("pipeline 2", "context 4"),
    ("pipeline 2, tensor 4", "tensor 2, context 2, data 2"),
    ("tensor 2, context 2, data 2", "one process"),
    ("gpt, one process", "gpt, pipeline 2, tensor 2"),
    ("gpt, tensor 2, data 2", "gpt, pipeline 2, context 2"),
    ("gpt, pipeline 2, tensor 2", "gpt, tensor 2, data 2"),
    ("gpt, pipeline 2, context 2", "gpt, one process"),
    ("muon, fsdp 2, tensor 4", "muon, pipeline 2, data 2"),
]


class Runs:
    """Uninterrupted runs with a checkpoint after SAVED steps, one per topology, trained on first use."""

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

    def resume(self, source: str, target: str) -> Results:
        """Train the remaining steps at topology `target` from the checkpoint of `source`."""
        case, arguments = TOPOLOGIES[target], {"steps": range(SAVED, STEPS), "resume": self(source)[0]}
        return self.pool.run(train, case.world, case=case, **arguments)[0]


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory, pool) -> Runs:
    return Runs(tmp_path_factory.mktemp("checkpoints"), pool)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[" -> ".join(pair) for pair in PAIRS])
def test_resume_at_another_topology_matches_one_process(saved_runs, source, target):
    kind = source.partition(", ")[0]
    one = f"{kind}, one process" if kind in ("gpt", "muon") else "one process"
    _, exact = saved_runs(one)
    resumed = saved_runs.resume(source, target)
    assert resumed.losses == pytest.approx(exact.losses[SAVED:], rel=LOSS)
    assert resumed.norms == pytest.approx(exact.norms[SAVED:], rel=NORM)


@pytest.mark.parametrize(
    "topology",
    [
        "one process",
        "tensor 4",
        "fsdp 4",
        "tensor 2, context 2, data 2",
        "gpt, pipeline 2, tensor 2",
        "muon, fsdp 2, tensor 4",
    ],
)
def test_resume_at_the_same_topology_is_bit_identical(saved_runs, topology):
    _, run = saved_runs(topology)
    resumed = saved_runs.resume(topology, topology)
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


def test_global_tensors_are_complete_and_unpadded(saved_runs):
    weights, exact = (global_weights(saved_runs(topology)[0]) for topology in ("tensor 8", "one process"))
    assert weights.keys() == exact.keys()
    assert weights["weights.embedding.weight"].shape == (100, 64)
    for name, tensor in exact.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)


def trained_optimizer(width: int = 4, steps: int = 1) -> ShardedAdamW:
    """An optimizer of one weight after some steps."""
    layer = RMSNorm(width, Mesh().tensor)
    initialize(layer.named_parameters(), Mesh().tensor, 1)
    optimizer = ShardedAdamW(layer.named_parameters(), Mesh())
    for _ in range(steps):
        optimizer.begin_step(1)
        layer.weight.square().sum().backward()
        optimizer.step(0.1)
    return optimizer


def test_weights_only_keeps_the_fresh_optimizer(tmp_path):
    checkpoint.save(tmp_path / "step_3", trained := trained_optimizer(steps=3), {"step": 3})
    fresh = trained_optimizer(steps=0)
    assert checkpoint.load(tmp_path / "step_3", fresh, weights_only=True)["step"] == 3
    assert torch.equal(fresh.buckets[0].master, trained.buckets[0].master)
    assert fresh.steps == 0
    assert fresh.buckets[0].states["exp_avg"].eq(0).all()


def test_checkpoint_without_marker_is_not_loaded(tmp_path):
    for step in (2, 10, 30):
        checkpoint.save(tmp_path / f"step_{step}", trained_optimizer(), {"step": step})
    (tmp_path / "step_30" / locations.MARKER).unlink()
    assert [step for step, _ in locations.complete_checkpoints(tmp_path)] == [2, 10]
    with pytest.raises(ValueError, match=r"step_30: not a complete checkpoint; complete.json is missing"):
        checkpoint.load(tmp_path / "step_30", trained_optimizer())


def test_stale_attempt_publishes_nothing(tmp_path):
    def fencing_check():
        raise StaleAttempt("attempt 2 has taken over")

    checkpoint.save(tmp_path / "step_1", trained_optimizer(), {})
    for step in (1, 2):  # the successor has saved the first
        with pytest.raises(StaleAttempt):
            checkpoint.save(tmp_path / f"step_{step}", trained_optimizer(), {}, fencing_check)
    checkpoint.load(tmp_path / "step_1", trained_optimizer())
    assert [step for step, _ in locations.complete_checkpoints(tmp_path)] == [1]


def test_save_replaces_an_existing_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "step_1", trained_optimizer(steps=1), {"step": 1})
    checkpoint.save(tmp_path / "step_1", again := trained_optimizer(steps=2), {"step": 1})
    loaded = trained_optimizer(steps=0)
    checkpoint.load(tmp_path / "step_1", loaded)
    assert torch.equal(*(each.buckets[0].states["exp_avg_sq"] for each in (loaded, again)))
    assert loaded.steps == 2


def test_marker_contains_about_mesh_and_versions(tmp_path):
    checkpoint.save(tmp_path / "step_1", trained_optimizer(), {"step": 1, "profile": {"name": "p"}})
    marker = json.loads((tmp_path / "step_1" / locations.MARKER).read_text())
    sizes = {name: described["size"] for name, described in marker.pop("files").items()}
    shard = next((tmp_path / "step_1").glob("*.distcp"))
    index = tmp_path / "step_1/.metadata"
    assert sizes == {path.name: path.stat().st_size for path in (shard, index)}
    assert marker == {
        "step": 1,
        "profile": {"name": "p"},
        "optimizer_steps": 1,
        "mesh": {"pipeline": 1, "data": 1, "context": 1, "tensor": 1},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def test_checkpoint_of_another_model_is_rejected_with_the_first_difference(tmp_path):
    checkpoint.save(tmp_path / "step_1", trained_optimizer(), {})
    with pytest.raises(ValueError, match=r"step_1: weights.weight has shape \(4,\), the model needs \(5,\)"):
        checkpoint.load(tmp_path / "step_1", trained_optimizer(width=5))
    other = RMSNorm(4, Mesh().tensor)
    with pytest.raises(ValueError, match=r"no tensor weights.norm.weight; it is of a different model"):
        checkpoint.load(tmp_path / "step_1", ShardedAdamW([("norm.weight", other.weight)], Mesh()))


def test_weights_of_another_optimizer_are_loaded_and_its_states_are_not(tmp_path):
    layers, on = [ReplicatedLinear(4, 4, Mesh().tensor) for _ in range(2)], Mesh(whole_matrices=True)
    for seed, layer in enumerate(layers):
        initialize(layer.named_parameters(), on.tensor, seed)
    checkpoint.save(tmp_path / "step_1", ShardedAdamW(layers[0].named_parameters(), on), {})
    muon = ShardedAdamW(layers[1].named_parameters(), on, rule=EverywhereRule(Muon()))
    with pytest.raises(
        checkpoint.OtherOptimizer, match=r"no momentum of weight; it was saved with another optimizer"
    ):
        checkpoint.load(tmp_path / "step_1", muon)
    checkpoint.load(tmp_path / "step_1", muon, weights_only=True)
    assert torch.equal(layers[1].weight, layers[0].weight)


def test_asynchronous_save_holds_the_state_at_begin(tmp_path, pool):
    assert all(pool.run(save_asynchronously, 4, folder=tmp_path))


def save_asynchronously(folder: Path) -> bool:
    """Whether a checkpoint written during further steps holds the state from before them, bit for bit."""
    case = Case(tensor=2, data=2)
    trainer, optimizer = build(case)
    try:
        saver = Saver(optimizer, asynchronous=True)
        for step in range(3):  # later saves reuse the host copies of the first
            train_step(trainer, optimizer, case, step)
            exact = [bucket.master.clone() for bucket in optimizer.buckets]
            random = torch.get_rng_state()
            saver._thread.submit(time.sleep, 0.3)  # delays the copy, so that the next update has to wait
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
        return all(same) and torch.equal(torch.get_rng_state(), random) and optimizer.steps.item() == 5
    finally:
        trainer.mesh.close()


def build(case: Case) -> tuple[Trainer, ShardedAdamW]:
    trainer = Trainer(case.profile())
    return trainer, make_optimizer(trainer)


def train_step(trainer: Trainer, optimizer: ShardedAdamW, case: Case, step: int) -> None:
    samples = BATCH // trainer.mesh.data.size
    first = trainer.mesh.data.rank * samples
    optimizer.begin_step(trainer.profile.accumulation_steps)
    local = Batch(batch(step)[first : first + samples])
    trainer.forward_backward(local, 1 / (BATCH * SEQUENCE), first)
    optimizer.step(RATE)


def test_failed_write_of_one_rank_fails_the_save_on_all_ranks(tmp_path, pool):
    errors = pool.run(save_with_failing_rank, 2, folder=tmp_path)
    assert errors == ["rank 1: Is a directory"] * 2
    assert list(tmp_path.glob("step_*")) == []


def save_with_failing_rank(folder: Path) -> str:
    trainer, optimizer = build(Case(data=2))
    saver = Saver(optimizer, asynchronous=True)
    try:
        if trainer.mesh.rank == 1:
            write = saver._write

            def failing_write(writer):
                (folder / f"step_1/{writer.save_id}_1_0.distcp").mkdir(parents=True)
                return write(writer)

            saver._write = failing_write
        saver.begin(folder / "step_1", {})
        saver.finish()
    except SaveFailed as reason:
        return str(reason)
    finally:
        trainer.mesh.close()
    return ""


def test_error_of_creating_a_writer_fails_the_save_at_finish(tmp_path, monkeypatch):
    saver = Saver(trained_optimizer())
    with monkeypatch.context() as patch:
        patch.setattr(writer, "renew_credentials", lambda files: int("half a file"))
        saver.begin(tmp_path / "step_1", {})
    with pytest.raises(SaveFailed, match=r"rank 0: ValueError: .*half a file"):
        saver.finish()
    saver.begin(tmp_path / "step_1", {})
    saver.finish()
    checkpoint.load(tmp_path / "step_1", trained_optimizer())


def test_enumeration_pickled_by_an_older_python_is_read_and_other_attributes_are_not():
    class Pickled:
        """Pickles as enumerations' members do before Python 3.11.5: as getattr(class, name)."""

        def __init__(self, owner, name):
            self.call = getattr, (owner, name)

        def __reduce__(self):
            return self.call

    def read(owner, name):
        return reader._Unpickler(io.BytesIO(pickle.dumps(Pickled(owner, name)))).load()

    assert read(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT") is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for owner, name in ((_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__")):
        with pytest.raises(ValueError, match=r"builtins.getattr is not allowed"):
            read(owner, name)


def test_malicious_metadata_is_rejected(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "done"),)

    checkpoint.save(tmp_path / "step_1", trained_optimizer(), {})
    (tmp_path / "step_1/.metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match=r".metadata: rejected: posix.mkdir is not allowed"):
        Reader(tmp_path / "step_1")
    assert not (tmp_path / "done").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP warns about its own no_dist
def test_torch_distributed_checkpoint_reads_our_files(tmp_path):
    checkpoint.save(tmp_path / "step_1", ours := trained_optimizer(), {})
    state = {"weights.weight": torch.zeros(4)}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "step_1", no_dist=True)
    assert torch.equal(state["weights.weight"], ours.buckets[0].master[:4])
