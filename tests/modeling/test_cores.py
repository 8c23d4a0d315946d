"""Cores and memory that a process may use, and how work is shared among cores, also imitated ones."""

import os
import threading
from types import SimpleNamespace

import psutil
import pytest

from modeling import cores
from modeling.training import trainer
from profiles.resolve import load
from tasks.step import Context
from tasks.steps import dataset, programs
from tasks.store.store import Store

MACHINE = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "", MACHINE),
        ({"memory.max": "3221225472"}, "0::/\n", 3 << 30),  # a container
        ({"memory.max": "max", "job/memory.max": "max", "job/step/memory.max": "99"}, "0::/job/step\n", 99),
        (
            {"job/memory.max": "99", "job/step/memory.max": "max"},
            "0::/job/step\n",
            99,
        ),  # the limit of a parent
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, "4:memory:/\n0::/\n", MACHINE),  # unlimited
        ({"memory/job/memory.limit_in_bytes": "99"}, "9:name=systemd:/x\n4:memory:/job\n0::/\n", 99),
    ],
)
def test_usable_memory_is_that_of_the_control_group(tmp_path, monkeypatch, files, membership, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    assert cores.usable_memory() == expected


@pytest.mark.parametrize(
    ("variables", "memory", "count"),
    [
        ({"SLURM_CPUS_ON_NODE": "1", "SLURM_MEM_PER_NODE": "64"}, 64 << 20, 1),
        ({"SLURM_CPUS_ON_NODE": "1", "SLURM_MEM_PER_CPU": "32"}, 32 << 20, 1),
        ({"SLURM_CPUS_ON_NODE": "512", "SLURM_MEM_PER_NODE": "0"}, None, None),  # all of the node
        ({}, None, None),
    ],
)
def test_slurm_job_has_the_cores_and_the_memory_that_are_allotted_to_it(
    monkeypatch, variables, memory, count
):
    for name in ("SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cores.allotted_memory() == (memory or cores.usable_memory())
    assert cores.allotted_cores() == (count or cores.usable_cores())


@pytest.mark.parametrize(("count", "at_once", "each"), [(1, 1, 1), (4, 3, 1), (64, 3, 21)])
def test_work_is_shared_among_the_cores_of_the_affinity_mask(tmp_path, monkeypatch, count, at_once, each):
    """Threads that train, and the compiles and tokenizing workers of three programs and shards."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    for processes in (1, 2):
        profile = load("tiny", [f"cluster.devices_per_node={processes}", "cluster.threads=null"])
        assert trainer.threads(profile) == max(1, count // processes)

    together, options = threading.Barrier(at_once), []

    def compile_program(context, work, program, limits, watch):
        if program < at_once:
            together.wait(timeout=60)
        options.append(limits)

    monkeypatch.setattr(programs, "compile_program", compile_program)
    context = Context(profile, Store(str(tmp_path)))
    programs.compile_all(context, tmp_path, range(3))
    assert [dict(zip(given[::2], given[1::2], strict=True))["--jobs"] for given in options] == 3 * [str(each)]

    class Pool:
        def __init__(self, plan, store, workers, threads, token):
            assert (workers, threads) == (at_once, each)
            raise InterruptedError

    monkeypatch.setattr(dataset, "WorkerPool", Pool)
    shards = [SimpleNamespace(name=str(k)) for k in range(3)]
    plan = SimpleNamespace(key=str, shards=shards)
    with pytest.raises(InterruptedError):
        dataset.ShardJob.tokenize(plan).run(context, range(3))
