"""Train, kill and resume ranks on the one device, with the trainer and the checkpoints of runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_lease.lease import Machine
from benchmarks.harness import workload
from benchmarks.harness.processes import Measurement, ScriptError, largest_difference, run_script
from benchmarks.training_steps import ours
from modeling.data.indexed import IndexedDatasetBuilder, token_dtype
from parallel.checkpoint import locations
from profiles import resolve
from profiles.files import run_files

TRAIN = "modeling.training.train"
RANKS = 2
STEPS, EVERY = 12, 4  # of training; steps between checkpoints
FSDP = ("--data-sharding", "fsdp")
TENSOR = ("--tensor", "2", "--sequence-parallel")
SAVING = (f"checkpoint.every={EVERY}", "checkpoint.async=true", "checkpoint.keep=0")
TOLERANCE = 1e-4  # relative, of losses in float32 after a change of the topology
LIMIT = 60  # seconds of an attempt
POLL = 0.01  # seconds


def recovery(machine: Machine) -> dict[str, Any]:
    """Losses of FSDP ranks that were killed and resumed, also as tensor ranks, against undisturbed ones.

    At the same topology, they must be equal bit for bit.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-recovery-") as name:
        folder = Path(name)
        dataset = write_dataset(folder, workload.WORKLOADS[_workload(machine)])
        undisturbed, killed, moved = (folder / each for each in ("undisturbed", "killed", "moved"))
        for run in (undisturbed, killed):
            write_profile(machine, run, FSDP)
        train(machine, undisturbed, dataset)
        kill_when(machine, killed, dataset, lambda: bool(saved_steps(killed)))
        last, saved = max(losses(killed)), max(saved_steps(killed))
        if last == STEPS:
            raise ValueError("the ranks were killed too late: all steps had ended")
        shutil.copytree(killed, moved)
        write_profile(machine, moved, TENSOR)
        train(machine, killed, dataset)
        train(machine, moved, dataset)
        expected, resumed, tensor = (
            Measurement([], [*losses(run).values()]) for run in (undisturbed, killed, moved)
        )
    if resumed.losses != expected.losses:
        message = "losses after a resume are not those of an undisturbed run: "
        raise ValueError(f"{message}{resumed.losses}, {expected.losses}")
    difference = largest_difference([tensor, expected])
    if not difference <= TOLERANCE:
        raise ValueError(f"losses after a resume with TP differ by {difference:.1e}")
    figures = {"ranks": RANKS, "killed_after_step": last, "resumed_from": saved}
    return {**figures, "resumed_with_tensor_difference": difference}


def _workload(machine: Machine) -> str:
    return "tiny" if machine.rehearse else "small"


def write_profile(machine: Machine, run: Path, options: tuple[str, ...]) -> None:
    """Write the profile of a run folder, of our training step with these options."""
    given = ["--workload", _workload(machine), "--device", machine.device, "--deterministic", *options]
    given += ["--steps", str(STEPS), "--warm-up", "0"]
    run.mkdir(exist_ok=True)
    path = run / run_files.PROFILE
    path.write_text(resolve.dump(ours.make_profile(ours.parser().parse_args(given), RANKS)))
    path.write_text(resolve.dump(resolve.load(str(path), SAVING)))


def write_dataset(folder: Path, work: workload.Workload) -> Path:
    """Write the tokens of the workload's batches as a dataset; returns its folder."""
    tokens = torch.cat([workload.batch(work, number).flatten() for number in range(STEPS + 1)])
    prefix = folder / "artifacts/tokens/t/train"
    prefix.parent.mkdir(parents=True)
    with IndexedDatasetBuilder(prefix, token_dtype(work.model.vocab_size)) as builder:
        builder.add_document(tokens.tolist())
    entries = [{"path": "tokens/t/train", "tokens": len(tokens), "documents": 1}]
    corpus = {
        "format": 1,
        "vocabulary_size": work.model.vocab_size,
        "eos": 0,
        "sequence_length": work.sequence,
    }
    dataset = folder / "artifacts/dataset/d"
    dataset.mkdir(parents=True)
    (dataset / "corpus.json").write_text(json.dumps({**corpus, "train": entries, "validation": entries}))
    return dataset


def train(machine: Machine, run: Path, dataset: Path) -> None:
    """Train, or resume, to the last step."""
    script = machine.script(TRAIN, "--run-folder", run, "--dataset", dataset, ranks=RANKS)
    run_script(script, timeout=machine.timeout(LIMIT, RANKS))


def kill_when(machine: Machine, run: Path, dataset: Path, reached: Callable[[], bool]) -> None:
    """Train until a condition holds, then end torchrun, and by its death all ranks, by SIGKILL.

    Raises:
        ScriptError: training ended before, or took longer than an attempt may.
    """
    script = machine.script(TRAIN, "--run-folder", run, "--dataset", dataset, ranks=RANKS)
    deadline = time.monotonic() + machine.timeout(LIMIT, RANKS)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(script.command, env=script.environment, stdout=output, stderr=output)
        try:
            while not reached():
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    how = "timed out" if process.poll() is None else f"exit code {process.poll()}"
                    raise ScriptError(f"{TRAIN}: no checkpoint, {how}\n{output.read()[-2000:]}")
                time.sleep(POLL)
        finally:
            process.kill()
            process.wait()


def saved_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    return [step for step, _ in locations.complete_checkpoints(run / run_files.CHECKPOINTS)]


def losses(run: Path) -> dict[int, float]:
    """The loss of each step that the metrics have."""
    rows = map(json.loads, (run / run_files.METRICS).read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
