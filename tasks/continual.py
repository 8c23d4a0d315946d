"""Continual pretraining: which model of a series stands, what data is new to it, and what takes its place.

A series is named like the run that began it. The store's `runs/<name>/standing.json` says which of its models was promoted last,
and which dataset holds the held-out text that all are measured on. It is written whole and last, so a round that fails changes
nothing.
What that model and its forerunners were trained on, the ledger knows (ledger.py).
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profiles.schema import Profile
from tasks import export, keys
from tasks.dataset import CORPUS, SHARDS, DatasetStep
from tasks.dataset import with_steps as steps_of_epochs
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

log = logging.getLogger(__name__)

FILE = "standing.json"


@dataclass(frozen=True)
class Standing:
    """The promoted model of a series: its run and that one's identity, how many rounds it took, the first run's inputs."""

    run: str
    identity: str
    round: int
    tokenizer: str
    dataset: str


def standing(store: Store, name: str) -> Standing | None:
    """What stands; None where nothing was trained to its end and exported yet."""
    promoted = store.backend.read(_name(name, FILE))
    if promoted is not None:
        return Standing(**json.loads(promoted))
    noted = store.backend.read(_name(name, runs.INPUTS))
    if noted is None or not store.run_folder(name).files(export.PART):
        return None
    inputs = json.loads(noted)
    if ledger.find(store, inputs["identity"]) is None:  # it was exported before its end
        return None
    return Standing(name, inputs["identity"], 0, inputs["tokenizer"], inputs["dataset"])


def newest(store: Store, stands: Standing) -> Path:
    """The newest checkpoint of the model that stands, on this machine."""
    run = store.run_folder(stands.run)
    return run.download(f"checkpoints/step_{run.checkpoint_steps()[-1]}")


def fresh(store: Store, stands: Standing, corpus: Artifact, sequence_length: int) -> Artifact | None:
    """A dataset of what a corpus has beyond what the model was trained on; None where that is less than one window.

    Its held-out text is that of the series.
    """
    whole = _read(store, corpus, CORPUS)
    held_out = _read(store, store.artifacts.expect(DatasetStep.kind, stands.dataset), CORPUS)["validation"]
    known = ledger.trained_on(store, stands.identity)
    pairs = zip(whole["train"], _read(store, corpus, SHARDS), strict=True)
    new = [(entry, shard) for entry, shard in pairs if shard not in known]
    train = [entry for entry, _ in new]
    if sum(entry["tokens"] for entry in train) <= sequence_length:
        return None
    made = {**whole, "train": train, "validation": held_out, "blend": None}
    key = keys.digest({"step": "fresh", "corpus": made})
    with store.artifacts.lock(DatasetStep.kind, key):
        found = store.artifacts.find(DatasetStep.kind, key)
        if found:
            return found
        used = {
            entry["path"].split("/")[1] for entry in train + held_out if entry["path"].startswith("tokens/")
        }
        requires = [{"kind": "tokens", "key": shard} for shard in sorted(used)]
        summary = {
            "tokens": sum(entry["tokens"] for entry in train),
            "validation_tokens": sum(entry["tokens"] for entry in held_out),
            "shards": len(train),
        }
        with store.artifacts.publish(DatasetStep.kind, key, summary, requires) as folder:
            (folder / CORPUS).write_text(json.dumps(made))
            (folder / SHARDS).write_text(json.dumps([shard for _, shard in new]))
    return store.artifacts.expect(DatasetStep.kind, key)


def with_steps(profile: Profile, new: Artifact) -> Profile:
    """The profile with the steps that its epochs over the new data take; a warm-up that is longer is cut to them."""
    train = profile.train
    if train.epochs is None:
        return profile
    free = train.model_copy(update={"warmup_steps": 0, "constant_steps": 0})
    steps = steps_of_epochs(profile.model_copy(update={"train": free}), new).train.steps
    warmup = min(train.warmup_steps, steps)
    fitting = {"warmup_steps": warmup, "constant_steps": min(train.constant_steps, steps - warmup)}
    for name, fits in fitting.items():
        if fits < (wanted := getattr(train, name)):
            log.info("train.%s %d is cut to %d: the new data makes %d steps", name, wanted, fits, steps)
    fitting |= {"steps": steps, "epochs": None}
    return profile.model_copy(update={"train": train.model_copy(update=fitting)})


def promote(store: Store, name: str, stands: Standing, run: str, identity: str) -> Standing:
    """Let a run's model take the place of the one that stands."""
    after = Standing(run, identity, stands.round + 1, stands.tokenizer, stands.dataset)
    store.backend.write(_name(name, FILE), json.dumps(asdict(after), indent=1).encode())
    return after


def _name(run: str, file: str) -> str:
    return f"runs/{run}/{file}"


def _read(store: Store, artifact: Artifact, file: str) -> Any:
    return json.loads((store.artifacts.path(artifact, with_required=False) / file).read_text())
