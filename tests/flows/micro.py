"""A pipeline small enough to run often: seconds of real training on a few hundred made-up documents."""

import contextlib
import itertools
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.profiles.pair import PAIR
from tests.waiting import until

PROFILE = {
    "description": "smallest profile that the flow can train",
    "extends": PAIR,
    "model": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    },
    "tokenizer": {"vocabulary_size": 300},
    "parallel": {"tensor": 1},
    "train": {
        "steps": 6,
        "warmup_steps": 2,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "sequence_length": 32,
        "precision": "float32",
    },
    "compile": {"enabled": False},
    "checkpoint": {"every": 2},
    "evaluate": {"every": 3, "batches": 1},
    "cluster": {"devices_per_node": 1, "threads": 1},
}
# Modules with the names of Trainshed's packages.
SHADOWING = ("flows.py", "tasks.py", "modeling.py", "parallel.py", "profiles/__init__.py")
# Two processes, and enough steps to be interrupted midway.
LONGER = (
    "parallel.tensor=2",
    "cluster.devices_per_node=2",
    "train.steps=240",
    "checkpoint.every=40",
    "evaluate.every=0",
)


# Leaves the cores to others while a run is waited with.
PATIENT = """
import time
from torch.nn.functional import cross_entropy

def loss(logits, targets):
    time.sleep(0.05)
    return cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
"""


def write_patient_loss(folder: Path) -> str:
    """Write a module with a slow loss to a folder; returns the override that uses it."""
    (folder / "patient.py").write_text(PATIENT)
    return "train.loss=patient:loss"


def write_profile(folder: Path) -> Path:
    """The profile `micro` and its text in a folder."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 6))) for _ in range(60)]
    texts = folder / "texts.jsonl"
    lines = (json.dumps({"text": " ".join(chance.choices(words, k=40))}) for _ in range(300))
    texts.write_text("\n".join(lines))
    path = folder / "micro.yaml"
    data = {"sources": [{"kind": "files", "path": str(texts)}], "validation_fraction": 0.1}
    path.write_text(yaml.safe_dump({**PROFILE, "data": data}))
    return path


def write_shadowing_modules(folder: Path) -> None:
    """Write modules with the names of Trainshed's packages, which raise when imported."""
    for name in SHADOWING:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise ImportError('imported instead of a package of Trainshed')\n")


class Command:
    """`trainshed` in a separate process, with access to all processes that it started."""

    program: tuple[str, ...] = (sys.executable, "-P", "-m", "trainshed")

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*self.program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "TRAINSHED_TEST": self.mark, **environment},
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Every running process that this command started, whatever its parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("TRAINSHED_TEST") == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left_behind(self) -> list[psutil.Process]:
        """Processes still running; a server stopped during its start may end a while after the command."""
        deadline = time.monotonic() + 60
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def result(self, timeout: float = 300) -> tuple[int, str, str]:
        """Exit code, standard output and error, once it has ended."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def end(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.communicate()


def settings(*overrides: str) -> list[str]:
    """Overrides as arguments of the command."""
    return list(itertools.chain.from_iterable(("--set", override) for override in overrides))


def done(result: dict) -> list[str]:
    """The steps of a flow run that made an artifact."""
    steps = [step for step, how in result["how"].items() if how == "done"]
    return [step for step in steps if step not in ("plan", "resolve", "report")]


def training_rows(folder: Path) -> list[dict]:
    """The metrics of each step that was trained."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def losses(folder: Path) -> dict[int, float]:
    """Training loss of each step; fails if a step occurs twice."""
    rows = training_rows(folder)
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row["loss"] for row in rows}


def shown(name: str) -> dict[str, str]:
    """Artifacts of the latest flow run of this name in Prefect's UI, by key, once they are sent."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    from flows.ui import artifacts

    artifacts._sender.flush(60)  # a flow waits less
    with get_client(sync_client=True) as client:
        within = FlowRunFilter(id=FlowRunFilterId(any_=[newest(client, name).id]))
        return {each.key: each.data for each in client.read_artifacts(flow_run_filter=within)}


def logged(name: str) -> list[str]:
    """The log of the latest flow run of this name in Prefect's UI."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=5)
    with get_client(sync_client=True) as client:
        within = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[newest(client, name).id]))
        return [entry.message for entry in client.read_logs(within, limit=200)]


def ended(name: str) -> tuple[str, str]:
    """Name and message of the final state of the latest flow run of this name."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        state = newest(client, name).state
    return state.name, state.message


def newest(client: Any, name: str) -> Any:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
    run, *_ = client.read_flow_runs(flow_run_filter=named, sort=FlowRunSort.START_TIME_DESC, limit=1)
    return run


def final_state(home: Path, name: str) -> tuple[str, str]:
    """State name and message of the latest flow run of this name, from an exited server's database."""
    query = """
        select flow_run.state_name, flow_run_state.message
        from flow_run join flow_run_state on flow_run.state_id = flow_run_state.id
        where flow_run.name = ? order by flow_run.created desc
    """
    with contextlib.closing(sqlite3.connect(home / "prefect.db")) as database:
        return database.execute(query, [name]).fetchone()


def exported(folder: Path, dataset: Path, length: int) -> tuple[float, str]:
    """An export in transformers: loss (nats per token) on held-out windows of a dataset, generated text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from modeling.data.corpus import Corpus, Samples

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = Samples(Corpus.open(dataset, "validation"), length, seed=None)
    windows = torch.from_numpy(samples.batch(0, samples.windows))
    prompt = tokenizer("abc", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        generated = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert generated.shape[1] > prompt.shape[1]
    return loss.item(), tokenizer.decode(generated[0])


def wait_for_step(folder: Path, step: int, timeout: float = 300) -> None:
    """Wait until training has completed this many steps."""
    path = folder / "metrics.jsonl"
    until(lambda: path.exists() and path.read_text().count('"loss"') >= step, timeout, every=0.02)
