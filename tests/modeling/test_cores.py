"""The memory that a process may use is that of its control group, if that has less than the machine."""

import psutil
import pytest

from modeling import cores

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
