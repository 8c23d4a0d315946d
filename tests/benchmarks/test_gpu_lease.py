"""A lease rehearsed on the CPU: each row is kept, a killed lease is resumed, tables have its figures."""

import json
import random
import signal
import struct
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_lease import lease, recovery, rows, slim_nccl, start, tables
from benchmarks.harness.processes import GRACE, Measurement, ScriptError
from benchmarks.harness.results import read
from benchmarks.operators import kernels
from benchmarks.rows import checks
from benchmarks.training_steps import ours
from profiles import resolve
from profiles.arguments import Parser
from tests.waiting import until

pytestmark = pytest.mark.slow
NAMES = ["ranks-fsdp", "kernel-adamw-ours"]


def command(out: Path, *names: str) -> list[str]:
    given = ["--rehearse", "--minutes", "9", "--out", str(out), "--only", *names]
    return [sys.executable, "-m", "benchmarks.gpu", *given]


def test_killed_lease_keeps_its_results_and_the_next_one_runs_the_others(tmp_path):
    out = tmp_path / "lease.jsonl"
    with subprocess.Popen(command(out, *NAMES), stdout=subprocess.PIPE, text=True) as killed:
        until(lambda: read(out), 300)
        time.sleep(random.random() * 3)
        killed.send_signal(signal.SIGKILL)
    kept = [row["row"] for row in read(out)]
    assert kept == NAMES[: len(kept)]
    with out.open("a") as file:
        file.write('{"row": "torn')
    ran = subprocess.run(command(out, *NAMES), capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = read(out)
    assert [row["row"] for row in results] == NAMES
    assert ran.stdout.count("done in an earlier lease") == len(kept)
    assert results[0]["largest_difference"] < rows.RANKS_TOLERANCE  # over the product's process groups
    assert results[1]["ms"] > 0
    assert all("rehearsal" in row["card"] for row in results)
    assert tables.tables(results).startswith(tables.NOTHING)


def test_rows_run_in_their_order_within_the_time_and_a_failed_one_is_tried_again(
    tmp_path, capsys, monkeypatch
):
    def fail(machine):
        raise ScriptError("no memory")

    chosen = [
        lease.Row("long", 50, fail),
        lease.Row("bad", 1, fail),
        lease.Row("cudnn", 1, fail, needs_gpu=True),
        lease.Row("good", 1, lambda machine: {"ms": 1}),
    ]
    machine, out = lease.Machine(True, time.monotonic() + 20, tmp_path), tmp_path / "lease.jsonl"
    assert lease.run(chosen, machine, out) == 1
    assert lease.run(chosen, machine, out) == 1
    found = [(row["row"], "failed" in row) for row in read(out)]
    assert found == [("bad", True), ("good", False), ("bad", True)]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("long: not started, needs 50 s")
    assert printed[-2:] == ["cudnn: not rehearsed, needs a GPU", "good: done in an earlier lease"]
    monkeypatch.setattr(lease, "describe", lambda machine: {"card": "NVIDIA H200"})
    lease.run(chosen[3:], machine, out)  # what another card did, such as a rehearsal, does not count
    assert capsys.readouterr().out == "good: ms 1\n"


def test_hung_ranks_are_ended_before_the_deadline(tmp_path, monkeypatch):
    timeouts = []
    monkeypatch.setattr(lease, "measure_script", lambda script, timeout: timeouts.append(timeout))
    machine = lease.Machine(True, time.monotonic() + 60, tmp_path)
    for ranks in (1, 2):
        machine.run(rows.OURS, limit=90, ranks=ranks)
    assert timeouts == pytest.approx([60, 60 - GRACE], abs=5)


class Parsed(Exception):
    """A module has parsed its arguments."""


def start_only(script, timeout=0) -> Measurement:
    """Stand-in for a module on a GPU: it only parses its arguments, and our profile must be valid."""
    given, count = script.arguments, 1
    if lease.ONE_DEVICE in given:
        count, given = int(given[len(lease.TORCHRUN)]), given[given.index(lease.ONE_DEVICE) + 1 :]
    module, *given = given
    parse, found = Parser.parse_args, []

    def parse_only(self, arguments=None):
        found.append(parse(self, arguments))
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_args", parse_only)
        patch.setattr(sys, "argv", [module, *given])
        with pytest.raises(Parsed):
            import_module(module).main()
    (options,) = found
    if module == rows.OURS:
        profile = ours.make_profile(options, count)
        return Measurement([1.0] * options.steps, [3.0] * profile.train.steps)
    if module == recovery.TRAIN:
        profile = resolve.load(str(options.run_folder / "profile.yaml"))
        assert profile.world_size == count
        losses = ({"step": step + 1, "loss": 3.0} for step in range(profile.train.steps))
        (options.run_folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in losses))
        return Measurement([])
    assert options.side in kernels.KERNELS[options.kernel][1]
    return Measurement([1.0] * options.steps)


def test_every_row_starts_its_modules_with_arguments_that_they_accept(tmp_path, monkeypatch):
    def run_tests(tests, *_):
        assert all((checks.ROOT / path).is_dir() for path in tests.paths)
        return checks.CheckResult(tests.name, tests.title, tests.against, "23 passed")

    def kill(machine, run, dataset, reached):
        start_only(machine.script(recovery.TRAIN, "--run-folder", run, "--dataset", dataset, ranks=2))
        kept = (run / "metrics.jsonl").read_text().splitlines()[: recovery.EVERY + 1]
        (run / "metrics.jsonl").write_text("\n".join(kept))

    monkeypatch.setattr(lease, "measure_script", start_only)
    monkeypatch.setattr(recovery, "run_script", start_only)
    monkeypatch.setattr(recovery, "kill_when", kill)
    monkeypatch.setattr(recovery, "saved_steps", lambda run: [recovery.EVERY])
    monkeypatch.setattr(checks.MarkedTests, "run", run_tests)
    facts = {"card": "NVIDIA H200", "memory_mib": 143156, "cuda": "13.0", "nccl": "2.30.7"}
    monkeypatch.setattr(lease, "describe", lambda machine: {**facts, "torch": "2.13.0"})
    machine = lease.Machine(False, time.monotonic() + 600, tmp_path / "graphs", tmp_path / "libnccl.so.2")
    out = tmp_path / "lease.jsonl"
    assert lease.run(rows.ROWS, machine, out) == 0
    results = read(out)
    names = [row["row"] for row in results]
    groups = ("1b-", "ranks-", "8b-", "cuda-tests", "mixtral", "kernel-", "lora-", "8b-2-layers-128k")
    firsts = [next(i for i, name in enumerate(names) if name.startswith(group)) for group in groups]
    assert firsts == sorted(firsts)  # the most valuable rows come first
    assert len({*names}) == len(names) == len(rows.ROWS)
    found = next(row for row in results if row["row"] == "ranks-recovery")
    assert (found["resumed_from"], found["killed_after_step"]) == (recovery.EVERY, recovery.EVERY + 1)
    text = tables.tables(results)
    assert all(f"| {name} |" in text for name in names)


def test_tables_have_the_latest_figures_with_date_card_and_versions():
    facts = {
        "time": "2026-11-29T08:00:00+00:00",
        "arguments": ["--minutes", "9"],
        "card": "NVIDIA H200",
        "memory_mib": 143156,
        "torch": "2.13.0",
    }
    facts |= {"cuda": "13.0", "nccl": "2.30.7", "took": 3.0}
    figures = {
        "1b-deterministic": 400.0,
        "1b": 320.0,
        "8b-2-layers": 100.0,
        "8b-layers": 150.0,
        "lora-8b": 640.0,
    }
    results = [{"row": "1b", **facts, "failed": "Failed: out of memory\nmore"}]
    results += [
        {"row": name, **facts, "ms": ms, "tokens_per_second": 8192e3 / ms, "losses": [3.0]}
        for name, ms in figures.items()
    ]
    text = tables.tables(results)
    assert "NVIDIA H200, 143,156 MiB:" in text
    assert "| 1b | ms 320.0, tokens per second 25600.0 |  | 2026-11-29 | 2.13.0 | 13.0 | 2.30.7 |" in text
    assert "| lora-8b | ms 640.0, tokens per second 12800.0 | 12,473 tokens/s | 2026-11-29 |" in text
    assert {*tables.PUBLISHED} <= {row.name for row in rows.ROWS}
    assert "Deterministic kernels make the 1B step 25% longer." in text
    assert f"follow {8192e3 / (150 + 28 * 25):,.0f} tokens/s for 8B at full depth, with the fastest" in text
    assert "failed" not in text
    page = tables.PAGE.read_text()
    assert page.count(tables.BEGIN) == page.count(tables.END) == 1
    assert tables.tables([]) in page or tables.NOTHING not in page


def test_slimmed_library_keeps_the_code_of_one_architecture(tmp_path):
    def entry(kind: int, architecture: int, image: bytes) -> bytes:
        header = bytearray(64)
        slim_nccl.ENTRY.pack_into(header, 0, kind, 1, len(header), len(image))
        struct.pack_into("<I", header, slim_nccl.ARCHITECTURE, architecture)
        return bytes(header) + image

    entries = entry(2, 80, b"a" * 8) + entry(2, 90, b"b" * 8) + entry(1, 90, b"c" * 8)
    binary = slim_nccl.HEADER.pack(0xBA55ED50, 1, 16, len(entries)) + entries
    library = b"ELF" + slim_nccl.MAGIC + b"chance" + binary + b"end"
    (tmp_path / "whole").write_bytes(library)
    assert slim_nccl.slim(tmp_path / "whole", tmp_path / "slim", keep=90) == 8
    expected = library.replace(b"a" * 8, bytes(8)).replace(b"c" * 8, bytes(8))
    assert (tmp_path / "slim").read_bytes() == expected


def test_older_torch_gets_what_it_lacks(monkeypatch):
    from modeling.check_device import checks
    from modeling.compilation import graph_cache

    monkeypatch.setattr(graph_cache, "OPTIONS", dict(graph_cache.OPTIONS))
    monkeypatch.setattr(checks, "WAYS", checks.WAYS)
    for name in start.COLLECTIVES:
        monkeypatch.delattr(start.dist, name)
    monkeypatch.setattr(start.torch, "__version__", "2.11.0+cu130")
    assert start.is_older()
    start.adapt()
    for name, older in start.COLLECTIVES.items():
        assert getattr(start.dist, name) is getattr(start.dist, older)
    assert "recompile_limit" not in graph_cache.OPTIONS
    assert "pipeline" not in checks.WAYS


def test_lease_without_a_gpu_is_rejected(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--minutes", "9"])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err
