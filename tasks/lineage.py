"""The run whose weights another one starts from: a fork's parent, or the exporter of init.from."""

from __future__ import annotations

import logging
from contextlib import suppress

from profiles.files import run_files
from profiles.files.state_files import CorruptedState
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import Parent, RunFolder
from tasks.store.store import Store
from tasks.tokenization.tokenizer_files import load

log = logging.getLogger(__name__)


def find_origin(
    context: Context, tokenizer: Artifact, identity: str, parent: Parent | None = None
) -> str | None:
    """Identity of the run whose weights a run starts from; the ledger has its data, and its ancestors'.

    Args:
        tokenizer: of the run.
        identity: of the run. What the ledger has of it stays if its parent cannot be found again.
        parent: that it was forked from.

    Returns:
        None from scratch, and if the ledger cannot say what the initial weights were trained on: those of the hub or another
        store, and those of a run whose tokens have other ids.
    """
    store = context.store
    known: str | None = None
    with suppress(CorruptedState):  # replaced by the new entry
        entry = ledger.find(store, identity)
        known = entry.parent if entry else None
    if parent is not None:
        name, origin = parent.run, parent.identity
        known = origin  # without its data, no data is known to be new
    elif exporter := (context.inputs.weights or {}).get("run"):
        name, origin = exporter["name"], exporter["identity"]
    else:
        return known
    if not record_data(store, name, origin, is_fork=parent is not None):
        return known
    same = _has_same_tokens(store, name, origin, tokenizer)
    if same:
        return str(origin)
    replayed = f"a continual series of {context.profile.name} cannot replay its data"
    if same is not None:
        log.warning("tokenizer.source: tokens of %s have other ids, so %s", name, replayed)
        return None
    if known is None:
        log.warning("run %s: its tokenizer is not in the store any more, so %s", name, replayed)
    return known


def record_data(store: Store, name: str, identity: str, *, is_fork: bool = False) -> bool:
    """Record in the ledger what a run and its ancestors were trained on; returns whether that is known.

    Runs of earlier versions were not recorded if they did not end.

    Args:
        is_fork: whether it is recorded for a fork of it, which a warning is for.
    """
    consequence = "rounds after %s cannot replay it"
    if is_fork:
        consequence = (
            "rounds after a fork of %s are rejected; restore its folder and dataset, and start the fork again"
        )
    message = f"run %s: its training data is unknown, so {consequence}"
    above: tuple[str, str] | None = (name, identity)
    while above and ledger.find(store, above[1]) is None:
        run, key = _inputs_of(store, *above, "dataset")
        dataset = store.artifacts.find(DatasetStep.id(key), hash_limit=0) if key else None
        if run is None or dataset is None:
            log.warning(message, above[0], name)
            return False
        parent = run.parent
        weights = None if parent else _initial_weights(run)
        ledger.record(store, *above, dataset, parent.identity if parent else None, weights)
        above = (parent.run, parent.identity) if parent else None
    last = name
    try:
        for entry in ledger.lineage(store, identity):
            last = entry.run
    except ledger.MissingEntry:
        log.warning(message, f"that {last} started from", name)
        return False
    return True


def _initial_weights(run: RunFolder) -> str | None:
    """A run's `init.from`; empty from scratch, None if its profile.yaml is gone or corrupted."""
    try:
        return str(run.sections()["init"]["from"] or "")
    except (LookupError, TypeError):
        return None


def _has_same_tokens(store: Store, name: str, identity: str, tokenizer: Artifact) -> bool | None:
    """Whether a tokenizer has all tokens of another run's, with the same ids; None if that one is gone."""
    _, key = _inputs_of(store, name, identity, "tokenizer")
    if key == tokenizer.key:
        return True
    theirs = store.artifacts.find(TokenizerStep.id(key), hash_limit=0) if key else None
    if theirs is None:
        return None
    old, new = (load(store.artifacts.path(each)).get_vocab() for each in (theirs, tokenizer))
    return old.items() <= new.items()


def _inputs_of(store: Store, name: str, identity: str, kind: str) -> tuple[RunFolder | None, str | None]:
    """The folder of a run, and the key of one of its inputs; None if they are gone."""
    run = runs.find_folder(store, name, identity)
    found = run.read_json(run_files.INPUTS) if run else {}
    return run, found.get(kind) if found.get("identity") == identity else None
