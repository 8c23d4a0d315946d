"""Checkpoints at an `s3://` address: each rank reads only its shard; incomplete ones are removed."""

import errno
import os
from contextlib import nullcontext

import pytest
import s3fs
import torch

from parallel import Mesh, RMSNorm, ShardedAdamW, initialize
from parallel.checkpoint import checkpoint, locations, saver
from parallel.checkpoint.boxes import boxed_tensors
from parallel.checkpoint.reader import Reader
from tests import s3
from tests.pool import Pool, mesh

WIDTH = 1_200_000  # 4.8 MB a tensor


@pytest.fixture
def address(monkeypatch):
    with s3.bucket(monkeypatch) as bucket:
        yield f"{bucket}/runs/r/checkpoints"


def run_on_ranks(pool: Pool, ranks: int, function, address: str):
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return pool.run(call_with_environment, ranks, environment=environment, case=function, address=address)


def call_with_environment(environment: dict[str, str], case, address: str):
    """Call a function with the S3 server's address and credentials in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        return case(address)


def optimizer(on: Mesh, seed: int) -> ShardedAdamW:
    layer = RMSNorm(WIDTH, on.tensor)
    initialize(layer.named_parameters(), on.tensor, 1)
    built = ShardedAdamW(layer.named_parameters(), on)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(WIDTH, generator=generator)
    bucket = built.buckets[0]
    for state in bucket.states.values():
        own = values[bucket.first : bucket.first + bucket.length]
        state[: len(own)] = own  # padding follows
    return built


def save(address: str) -> None:
    with mesh(data=2) as on:
        checkpoint.save(f"{address}/step_3", optimizer(on, seed=1), {"step": 3})


def load(address: str) -> tuple[bool, int]:
    """Load at another topology; returns whether the states equal the saved ones, and the bytes fetched."""
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
            torch.equal(values, exact.buckets[0].states[state])
            for state, values in loaded.buckets[0].states.items()
        )
        return same, sum(map(len, fetched))


@pytest.mark.s3
def test_rank_fetches_only_its_shard(pool, address):
    run_on_ranks(pool, 2, save, address)
    assert [step for step, _ in locations.complete_checkpoints(address)] == [3]
    for same, fetched in run_on_ranks(pool, 8, load, address):
        assert same
        shard = 3 * 4 * WIDTH / 8
        # Besides the shard: the marker, the index, and partly needed blocks at both ends of each range read, from one or two
        # files.
        assert shard - 4 * 3 * 128 <= fetched < 1.1 * shard + 200_000
    files = s3fs.S3FileSystem()
    first_rank = next(path for path in files.ls(f"{address}/step_3") if path.endswith("_0_0.distcp"))
    content = bytearray(files.cat_file(first_rank))
    content[2_000_000] ^= 1
    files.pipe_file(first_rank, bytes(content))
    marker = locations.read_marker(f"{address}/step_3")
    for rank, corrupted in ((3, True), (4, False)):  # the second half is in the other file
        shards = boxed_tensors(optimizer(Mesh(data=8, rank=rank), seed=2).state_boxes())
        reader = Reader(f"{address}/step_3", marker["files"])
        with pytest.raises(locations.CorruptCheckpoint) if corrupted else nullcontext():
            reader.load(shards)


@pytest.mark.s3
def test_incomplete_checkpoints_are_ignored_and_removed(address):
    for step in (1, 2):
        checkpoint.save(f"{address}/step_{step}", optimizer(Mesh(), step), {"step": step})
    files = s3fs.S3FileSystem()
    files.rm(f"{address}/step_2/complete.json")
    assert [step for step, _ in locations.complete_checkpoints(address)] == [1]
    with pytest.raises(ValueError, match=r"step_2: not a complete checkpoint"):
        checkpoint.load(f"{address}/step_2", optimizer(Mesh(), 3))
    assert locations.discard_incomplete(address) == ["step_2"]
    assert not any("step_2" in path for path in files.find(address))
    aside = locations.free_aside(address)
    locations.move_aside(address, [1], aside)
    assert aside == f"{address}~1"
    assert [step for step, _ in locations.complete_checkpoints(aside)] == [1]
    assert list(locations.complete_checkpoints(address)) == []
    moved = locations.quarantine(aside, 1, "why")
    assert moved == f"{address}~1/quarantine/step_1"
    assert list(locations.complete_checkpoints(aside)) == []
    assert locations.quarantined(aside) == ["step_1"]
    assert not any(path.endswith(locations.MARKER) for path in files.find(aside))


def test_refusal_without_a_message_is_reported_by_its_cause():
    """Ceph answers with a code only."""
    error = PermissionError(errno.EACCES, None)
    error.__cause__ = RuntimeError("An error occurred (AccessDenied) when calling PutObject: None")
    failure = RuntimeError("DCP hides why")
    failure.__cause__ = error
    assert saver._reason(failure).startswith("An error occurred (AccessDenied)")
