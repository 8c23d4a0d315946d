"""Unpacking compiled graphs from several processes of a node, and counts of graphs over ranks."""

import errno
import fcntl
import os
import platform
import signal
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from modeling.compilation import compilers, manifest
from modeling.compilation.graph_cache import (
    CACHE,
    CompileStatistics,
    RegionBackends,
    prepare_cache,
    unpack,
)
from modeling.compilation.manifest import Manifest, capture, describe, digest
from modeling.tracing.trace import Recorder
from profiles import resolve
from profiles.errors import ProfileError
from tests.forkserver import forkserver
from tests.profiles.pair import PAIR

FILES = 20
RANKS = 4


def unpack_on(rank: int, artifact: Path, run: Path, missing: int | None) -> None:
    """Unpack as this rank, and record that it extracts; rank 0 is killed after the first file.

    Args:
        missing: error of the run folder's file system for locks, if it has none.
    """
    extract = tarfile.TarFile.extractall

    def reject(*_: object) -> None:
        raise OSError(missing, os.strerror(missing))

    def recorded(tar: tarfile.TarFile, path: Path, filter: str) -> None:
        (run / f"extracted-{rank}").touch()
        if rank == 0:
            tar.extract(tar.next(), path, filter=filter)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)  # the others come meanwhile
        extract(tar, path, filter=filter)

    tarfile.TarFile.extractall = recorded
    if missing is not None:
        fcntl.flock = reject
    folder = unpack(artifact, run)
    assert len(list(folder.iterdir())) == FILES


@pytest.mark.parametrize("missing", [None, errno.ENOSYS])
def test_graphs_are_unpacked_once_and_again_if_the_process_dies(tmp_path, missing):
    artifact, run = tmp_path / "key", tmp_path / "run"
    artifact.mkdir()
    run.mkdir()
    (tmp_path / "graph").write_bytes(b"code")
    with tarfile.open(artifact / CACHE, "w") as tar:
        for number in range(FILES):
            tar.add(tmp_path / "graph", arcname=str(number))

    ranks = [
        forkserver().Process(target=unpack_on, args=(rank, artifact, run, missing)) for rank in range(RANKS)
    ]
    ranks[0].start()
    ranks[0].join()
    for rank in ranks[1:]:
        rank.start()
    for rank in ranks[1:]:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL, 0, 0, 0]
    left = [] if missing is None else [f".key-{platform.node()}-{ranks[0].pid}"]
    assert missing is not None or len(list(run.glob("extracted-*"))) == 2
    assert sorted(path.name for path in (run / "graphs").iterdir() if path.is_dir()) == [*left, "key"]


@pytest.mark.parametrize(
    ("triton", "error", "message"),
    [(True, RuntimeError, "no cuda device on"), (False, ProfileError, "no PyTorch for CUDA with Triton on")],
)
def test_node_without_its_device_is_retried_but_not_one_without_the_compiler(
    tmp_path, monkeypatch, triton, error, message
):
    """Only a ValueError ends the run at once."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(compilers, "find_spec", lambda name: triton or None)
    monkeypatch.setattr(compilers.toolchain, "missing", lambda: None)  # this machine's may be incomplete
    with pytest.raises(error, match=f"{message} {platform.node()}"):
        prepare_cache(resolve.load("llama3-8b-h100"), None, tmp_path)


def test_compiled_code_is_not_used_by_another_version_of_torch(tmp_path, monkeypatch):
    """In training, or ahead of time by a version of Trainshed that records it."""
    monkeypatch.setattr(compilers.toolchain, "missing", lambda: None)
    monkeypatch.setattr(compilers.toolchain, "fault", lambda folder: None)
    profile = resolve.load(PAIR, ["compile.enabled=true"])
    versions, artifact, found = ("2.13.0+cpu", "2.14.0", "2.14.1"), tmp_path / "key", []
    artifact.mkdir()
    with tarfile.open(artifact / CACHE, "w") as tar:
        tar.add(artifact, arcname=".", recursive=False)
    for version in versions:
        monkeypatch.setattr(torch, "__version__", version)
        found.append(prepare_cache(profile, None, tmp_path))
    assert len({*found}) == len(versions)
    Manifest({}).write(artifact)  # with the last
    folder, ahead = prepare_cache(profile, artifact, tmp_path)
    assert folder == tmp_path / "graphs/key"
    assert ahead is not None
    for version, own in zip(versions[:2], found, strict=False):
        monkeypatch.setattr(torch, "__version__", version)
        assert prepare_cache(profile, artifact, tmp_path) == own
    (artifact / manifest.FILE).write_text('{"block, training": {}}')  # as earlier versions did
    assert prepare_cache(profile, artifact, tmp_path) == (tmp_path / "graphs/key", None)


@pytest.mark.parametrize(
    ("misses", "cold"), [((2, 2, 2, 2), 2), ((0, 0, 1, 0), 1), ((0, 0, 0, 0), 0), ((None, 1, None, 1), 1)]
)
def test_misses_are_counted_in_distinct_graphs_of_all_ranks(misses, cold):
    """Of each rank; None: it does not run the program."""
    statistics = CompileStatistics(None, ahead=Manifest({}))
    sums = 0
    for missed in misses:
        statistics.programs = {} if missed is None else {"block, training": (missed, 3, 0)}
        sums = sums + statistics.local_counts()
    for _ in range(2):
        assert statistics.metrics(sums.tolist()) == {"graph_cache_misses": cold, "graph_cache_hits": 3}
    reason = f"block, training: the cache lacks {cold} graph{'s' * (cold > 1)} that the graphs step compiled"
    assert statistics.take_reasons() == ([reason] if cold else [])  # once


def test_missed_program_of_the_manifest_is_reported_beside_another_of_its_name():
    statistics = CompileStatistics(None, ahead=Manifest({}))
    statistics.programs = {"block, training": (3, 3, 1)}
    statistics.metrics(statistics.local_counts().tolist())
    other, missed = statistics.take_reasons()
    assert "differs from the programs that were compiled ahead of time" in other
    assert missed == "block, training: the cache lacks 2 graphs that the graphs step compiled"


class Cache:
    """A compiler that finds every graph in its cache, or none, and changes what it compiles."""

    def __init__(self, empty: bool = False) -> None:
        self.empty, self.compiled = empty, 0

    def cache_counts(self) -> tuple[int, int]:
        return (self.compiled, 0) if self.empty else (0, self.compiled)

    def compile(self, graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        self.compiled += 1
        compiled = capture(graph, inputs)[0]
        graph.graph.erase_node(next(node for node in graph.graph.nodes if node.op == "output"))
        return compiled


def test_program_that_was_not_compiled_ahead_is_a_miss_and_its_first_difference_is_reported(tmp_path):
    """Also if an earlier attempt has compiled it. Another variable's name only takes a trace."""

    def compile(function: Callable[..., object], programs: RegionBackends) -> None:
        torch.compiler.reset()
        torch.compile(function, backend=programs.backend("step"), fullgraph=True)(torch.ones(2))

    recorder = Recorder()
    compile(lambda x: (x + 1) * 2, recorder)
    recorder.manifest().write(tmp_path)
    ahead = Manifest.read(tmp_path)
    for function, traces in ((lambda x: (x + 1) * 2, 0), (lambda y: (y + 1) * 2, 1)):
        same = CompileStatistics(Cache(), ahead=ahead)
        with mock.patch.object(manifest, "capture", wraps=capture) as traced:
            compile(function, same)
        assert traced.call_count == traces
        assert same.metrics(same.local_counts().tolist()) == {"graph_cache_misses": 0, "graph_cache_hits": 1}
        assert same.take_reasons() == []
    traced_otherwise = Recorder()  # as by other decompositions
    compile(lambda x: (x + 1) * 3, traced_otherwise)
    regions = traced_otherwise.manifest().regions
    for cache, known in ((Cache(), ahead), (Cache(empty=True), Manifest(ahead.programs, regions))):
        other = CompileStatistics(cache, ahead=known)
        compile(lambda x: (x + 1) * 3, other)
        assert other.metrics(other.local_counts().tolist()) == {
            "graph_cache_misses": 1,
            "graph_cache_hits": 0,
        }
        (reason,) = other.take_reasons()
        assert reason.startswith(
            "step: differs from the programs that were compiled ahead of time: operator 3 is 'mul "
        )
        assert reason.index("[add, 3]") < reason.index("ahead of time it was") < reason.index("[add, 2]")
    missed = CompileStatistics(Cache(empty=True), ahead=ahead)
    compile(lambda x: (x + 1) * 2, missed)
    missed.metrics(missed.local_counts().tolist())
    (reason,) = missed.take_reasons()
    assert reason == "step: the cache lacks 1 graph that the graphs step compiled"
    assert Manifest({}).difference("step", ()) == "no program of this name was compiled ahead of time"


def test_programs_that_differ_in_what_they_write_to_an_input_have_different_digests():
    """Without gradients, as the optimizer's."""

    def digest_of(function: Callable[..., object]) -> str:
        graphs = []

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
            run, found = capture(graph, inputs)
            graphs.extend(found)
            return run

        torch.compiler.reset()
        given = torch.ones(2)
        torch.compile(function, backend=backend, fullgraph=True)(given)
        written.append(given.tolist())
        return digest(describe(graphs))

    written: list[list[float]] = []
    assert digest_of(lambda x: x.add_(1)) != digest_of(lambda x: x + 1)
    assert written == [[2.0, 2.0], [1.0, 1.0]]
