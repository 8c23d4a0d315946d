"""The run whose weights another one starts from: a fork's parent, or the exporter of init.from."""

from __future__ import annotations

import logging

from profiles.files import run_files, state_files
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import Parent, RunFolder
from tasks.store.store import Store
from tasks.tokenization.tokenizer_files import load

log = logging.getLogger(__name__)


def find_origin(context: Context, tokenizer: Artifact, parent: Parent | None = None) -> str | None:
    """Identity of the run whose weights a run starts from; the ledger has its data, and its ancestors'.

    Args:
        tokenizer: of the run.
        parent: that it was forked from.

    Returns:
        None from scratch, and if the ledger cannot say what the initial weights were trained on: those of the hub or another
        store, and those of a run whose tokens have other ids.
    """
    store = context.store
    if parent is not None:
        record_data(store, parent.run, parent.identity)
        return parent.identity
    exporter = (context.inputs.weights or {}).get("run")
    if exporter is None:
        return None
    name, identity = exporter["name"], exporter["identity"]
    if not record_data(store, name, identity):
        return None
    if not _has_same_tokens(store, name, identity, tokenizer):
        message = "tokenizer.source: tokens of %s have other ids, so a continual series of %s cannot replay its data"
        log.warning(message, name, context.profile.name)
        return None
    return str(identity)


def record_data(store: Store, name: str, identity: str) -> bool:
    """Record in the ledger what a run and its ancestors were trained on; returns whether that is known.

    Runs of earlier versions were not recorded if they did not end.
    """
    above: tuple[str, str] | None = (name, identity)
    while above and ledger.find(store, above[1]) is None:
        run, key = _inputs_of(store, *above, "dataset")
        dataset = store.artifacts.find(DatasetStep.id(key), hash_limit=0) if key else None
        if run is None or dataset is None:
            message = (
                "run %s: its training data is unknown, so continual pretraining cannot replay it after %s"
            )
            log.warning(message, above[0], name)
            return False
        parent = run.parent
        ledger.record(store, *above, dataset, parent.identity if parent else None)
        above = (parent.run, parent.identity) if parent else None
    return True


def _has_same_tokens(store: Store, name: str, identity: str, tokenizer: Artifact) -> bool:
    """Whether a tokenizer has all tokens of another run's, with the same ids."""
    _, key = _inputs_of(store, name, identity, "tokenizer")
    if key == tokenizer.key:
        return True
    theirs = store.artifacts.find(TokenizerStep.id(key), hash_limit=0) if key else None
    if theirs is None:
        return False
    old, new = (load(store.artifacts.path(each)).get_vocab() for each in (theirs, tokenizer))
    return old.items() <= new.items()


def _inputs_of(store: Store, name: str, identity: str, kind: str) -> tuple[RunFolder | None, str | None]:
    """The folder of a run, and the key of one of its inputs; None if they are gone."""
    run = runs.find_folder(store, name, identity)
    found = (state_files.parse(run.read(run_files.INPUTS) or b"") if run else None) or {}
    return run, found.get(kind) if found.get("identity") == identity else None
