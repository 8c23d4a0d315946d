"""Checkpoints under an `s3://` address, where each rank moves its own bytes."""

import os

import pytest
import s3fs
import torch

from parallel import Mesh, RMSNorm, ZeRO1, initialize
from parallel.checkpoint import checkpoint
from tests import s3
from tests.pool import Pool, mesh

WIDTH = 1_200_000  # 4.8 MB a tensor


@pytest.fixture
def address(monkeypatch):
    with s3.bucket(monkeypatch) as made:
        yield f"{made}/runs/r/checkpoints"


def on_ranks(pool: Pool, ranks: int, act, address: str):
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return pool.run(within, ranks, environment=environment, act=act, address=address)


def within(environment: dict[str, str], act, address: str):
    """Call a function with the server's address and keys in the environment, as a launcher would hand them on."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        return act(address)


def optimizer(on: Mesh, seed: int) -> ZeRO1:
    layer = RMSNorm(WIDTH, on.tensor)
    initialize(layer, on.tensor, 1)
    made = ZeRO1(layer.named_parameters(), on)
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(WIDTH, generator=generator)
    bucket = made.buckets[0]
    for state in (bucket.master, bucket.exp_avg, bucket.exp_avg_sq):
        state.copy_(whole[bucket.first : bucket.first + bucket.length])
    return made


def save(address: str) -> None:
    with mesh(data=2) as on:
        checkpoint.save(f"{address}/step_3", optimizer(on, seed=1), {"step": 3})


def load(address: str) -> tuple[bool, int]:
    """Whether a rank of another topology has loaded what was saved, and how many bytes it has fetched for it."""
    with mesh(data=8) as on:
        fetched = []
        cat, fetch = s3fs.S3FileSystem._cat_file, s3fs.S3File._fetch_range

        async def counted_cat(self, *arguments, **named):
            fetched.append(data := await cat(self, *arguments, **named))
            return data

        def counted_fetch(self, *arguments):
            fetched.append(data := fetch(self, *arguments))
            return data

        exact, loaded = optimizer(on, seed=1), optimizer(on, seed=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(s3fs.S3FileSystem, "_cat_file", counted_cat)
            patch.setattr(s3fs.S3File, "_fetch_range", counted_fetch)
            s3fs.S3FileSystem.clear_instance_cache()
            checkpoint.load(f"{address}/step_3", loaded)
        same = all(
            torch.equal(getattr(loaded.buckets[0], state), getattr(exact.buckets[0], state))
            for state in ("master", "exp_avg", "exp_avg_sq")
        )
        return same, sum(map(len, fetched))


def test_a_rank_fetches_its_own_bytes_alone(pool, address):
    on_ranks(pool, 2, save, address)
    assert [step for step, _ in checkpoint.complete_checkpoints(address)] == [3]
    for same, fetched in on_ranks(pool, 8, load, address):
        assert same
        own = 3 * 4 * WIDTH / 8
        assert (
            own <= fetched < 1.1 * own + 100_000
        )  # marker, index, and where in a file an item's elements begin


def test_partial_ones_are_not_seen_and_are_removed(address):
    for step in (1, 2):
        checkpoint.save(f"{address}/step_{step}", optimizer(Mesh(), step), {"step": step})
    files = s3fs.S3FileSystem()
    files.rm(f"{address}/step_2/complete.json")
    assert [step for step, _ in checkpoint.complete_checkpoints(address)] == [1]
    with pytest.raises(ValueError, match=r"step_2: not a complete checkpoint"):
        checkpoint.load(f"{address}/step_2", optimizer(Mesh(), 3))
    assert checkpoint.discard_incomplete(address) == ["step_2"]
    assert not any("step_2" in path for path in files.find(address))
    aside = checkpoint.move_aside(address, [1])
    assert aside == f"{address}~1"
    assert [step for step, _ in checkpoint.complete_checkpoints(aside)] == [1]
    assert list(checkpoint.complete_checkpoints(address)) == []
