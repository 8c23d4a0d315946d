"""Continual pretraining: a series' promoted model, the data new to it, promotion of its successor.

A series is named after the run that started it. `runs/<name>/standing.json` in the store names the model that was promoted last
and the dataset whose held-out text all models are evaluated on. It is written atomically and last, so a failed round changes
nothing. The data ledger (store/ledger.py) records what that model and its ancestors were trained on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from modeling import run_files
from profiles import resolve, state_files
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks import keys
from tasks.inputs import EXPORT
from tasks.steps import dataset
from tasks.steps.dataset import CORPUS, DatasetStep, read_file
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.ledger import SHARDS
from tasks.store.store import Store

# Phases of the learning-rate schedule, in order of priority.
PHASES = ("warmup_steps", "constant_steps", "minimum_steps")
Entry = dict[str, Any]  # a shard in corpus.json
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Promoted:
    """Promoted model of a series, with the tokenizer and dataset of the series' first run."""

    run: str
    identity: str
    round: int
    tokenizer: str
    dataset: str


def promoted_model(store: Store, name: str) -> Promoted | None:
    """The promoted model of a series; None until its first run has been trained and exported."""
    recorded = store.backend.read(_name(name, run_files.STANDING))
    if recorded is not None:  # if it is corrupted, raise: ignoring it would restart the series from round 0
        return Promoted(
            **state_files.require_json(recorded, store.backend.location(_name(name, run_files.STANDING)))
        )
    recorded = store.backend.read(_name(name, run_files.INPUTS))
    if recorded is None or not store.run_folder(name).files(EXPORT):
        return None
    inputs = state_files.require_json(recorded, store.backend.location(_name(name, run_files.INPUTS)))
    if ledger.find(store, inputs["identity"]) is None or not _is_finished(store, name):
        return None  # perhaps exported before training finished
    return Promoted(name, inputs["identity"], 0, inputs["tokenizer"], inputs["dataset"])


def _is_finished(store: Store, name: str) -> bool:
    steps = resolve.load(str(runs.fetch(store, name) / run_files.PROFILE)).train.steps
    return steps in store.run_folder(name).checkpoint_steps()


def record_not_promoted(store: Store, name: str) -> None:
    """Record that a round's model was evaluated and not promoted."""
    store.run_folder(name).write(run_files.NOT_PROMOTED, b"{}")


def was_not_promoted(store: Store, name: str) -> bool:
    """Whether a round's model was evaluated and not promoted."""
    return store.run_folder(name).read(run_files.NOT_PROMOTED) is not None


def recorded_inputs(store: Store, name: str) -> dict[str, str] | None:
    """What a round trains on and starts from (runs.read_inputs); None before it has begun to train."""
    recorded = store.run_folder(name).read(run_files.INPUTS)
    where = store.backend.location(_name(name, run_files.INPUTS))
    return None if recorded is None else state_files.require_json(recorded, where)


def latest_step(store: Store, promoted: Promoted) -> int:
    """Step of the promoted model's latest checkpoint. Raises ProfileError if it has none."""
    run = store.run_folder(promoted.run)
    if steps := run.checkpoint_steps():
        return steps[-1]
    reason = f"the promoted model has no checkpoint in {run.location(run_files.CHECKPOINTS)}, from which a round starts"
    raise ProfileError("name", promoted.run, f"{reason}; restore it there")


def latest_checkpoint(store: Store, promoted: Promoted) -> AbstractContextManager[Path]:
    """Local folder of the promoted model's latest checkpoint, for a block; see RunFolder.local_checkpoint."""
    part = run_files.checkpoint(latest_step(store, promoted))
    return store.run_folder(promoted.run).local_checkpoint(part, keep_on_error=True)


def new_data(store: Store, promoted: Promoted, dataset: Artifact, sequence_length: int) -> Artifact | None:
    """Dataset of the shards new to the promoted model; None if they are too few for one sample.

    Its held-out text is that of the series. A source with a weight keeps it; it is left out if its new shards are too few for one
    sample, and they remain new.
    """
    contents = read_file(store, dataset)
    first = store.artifacts.expect(DatasetStep.kind, promoted.dataset)
    of_series = read_file(store, first)
    held_out = of_series["validation"]
    known = ledger.trained_on(store, promoted.identity)
    pairs = zip(contents["train"], read_file(store, dataset, SHARDS), strict=True)
    new, blend = _select(pairs, contents.get("blend"), known, sequence_length)
    train = [entry for entry, _ in new]
    if sum(entry["tokens"] for entry in train) <= sequence_length:
        return None
    # The sources divide the held-out shards, so both are those of the series; datasets of earlier versions do not list sources.
    sources = of_series.get("sources", [])
    selected = {**contents, "train": train, "validation": held_out, "sources": sources, "blend": blend}
    key = keys.new_data(selected)
    with store.artifacts.lock(DatasetStep.kind, key):
        if found := store.artifacts.find(DatasetStep.kind, key):
            return found
        paths = [entry["path"] for entry in train + held_out]
        used = {path.split("/")[1] for path in paths if path.startswith("tokens/")}
        requires = [{"kind": "tokens", "key": shard} for shard in sorted(used)]
        summary = {
            "tokens": sum(entry["tokens"] for entry in train),
            "validation_tokens": sum(entry["tokens"] for entry in held_out),
            "shards": len(train),
        }
        with store.artifacts.publish(DatasetStep.kind, key, summary, requires) as folder:
            (folder / CORPUS).write_text(json.dumps(selected))
            (folder / SHARDS).write_text(json.dumps([shard for _, shard in new]))
    return store.artifacts.expect(DatasetStep.kind, key)


def _select(
    pairs: Iterable[tuple[Entry, str]],
    blend: list[dict[str, Any]] | None,
    known: Set[str],
    sequence_length: int,
) -> tuple[list[tuple[Entry, str]], list[dict[str, Any]] | None]:
    """The shards that are not known, as (entry of corpus.json, key), and their blend.

    Args:
        pairs: all shards, in the order of their sources.
        blend: corpus.json's weight and number of shards of each source; None if sources have no weights.
    """
    if blend is None:
        return [(entry, shard) for entry, shard in pairs if shard not in known], None
    selected, parts, pairs = [], [], iter(pairs)
    for part in blend:
        new = [(entry, shard) for entry, shard in islice(pairs, part["shards"]) if shard not in known]
        if part["weight"] and sum(entry["tokens"] for entry, _ in new) <= sequence_length:
            new = []  # a source with a weight is a stream of its own, of at least one sample
        selected += new
        parts.append({"weight": part["weight"] if new else None, "shards": len(new)})
    return selected, parts


def with_shortened_schedule(profile: Profile, new: Artifact) -> Profile:
    """Resolve `train.epochs` to steps over the new data; shortens schedule phases that do not fit.

    Ignores `data.schedule`: its steps are those of the series' first run, and its sources may have no new data.
    """
    if profile.data.schedule:
        log.warning(
            "data.schedule: ignored in continual pretraining; new data is drawn by the weights of data.sources"
        )
        data = profile.data.model_copy(update={"schedule": []})
        profile = profile.model_copy(update={"data": data})
    train = profile.train
    if train.epochs is None:
        return profile
    free = train.model_copy(update=dict.fromkeys(PHASES, 0))
    steps = dataset.with_steps(profile.model_copy(update={"train": free}), new).train.steps
    fitting: dict[str, int | None] = {"steps": steps, "epochs": None}
    left = steps
    for name in PHASES:
        wanted = getattr(train, name)
        fitting[name] = min(wanted, left)
        left -= fitting[name]
        if fitting[name] < wanted:
            message = "train.%s: reduced from %d to %d: the new data has %d steps"
            log.info(message, name, wanted, fitting[name], steps)
    return profile.model_copy(update={"train": train.model_copy(update=fitting)})


def promote(store: Store, name: str, promoted: Promoted, run: str, identity: str) -> Promoted:
    """Make a run's model the promoted one of its series."""
    after = Promoted(run, identity, promoted.round + 1, promoted.tokenizer, promoted.dataset)
    store.backend.write(_name(name, run_files.STANDING), json.dumps(asdict(after), indent=1).encode())
    return after


def _name(run: str, file: str) -> str:
    return f"runs/{run}/{file}"
