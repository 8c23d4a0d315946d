"""Tokenizes shards of the history again that the store lacks, from the sources of their runs."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import replace
from pathlib import Path

from modeling.data.replay import HistoryStream
from profiles.errors import ProfileError
from profiles.files import run_files, state_files
from tasks import inputs
from tasks.continual import series, stand_in
from tasks.continual.replay import Entry, tokens_of
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps.dataset import ShardJob, without_duplicates
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.tokenization.dataset_plan import TOKENS, DatasetPlan

log = logging.getLogger(__name__)


def restore(context: Context, tokenizer: Artifact, drawn: Iterable[tuple[HistoryStream, Entry]]) -> None:
    """Make the shards that a round draws from its history and that the store lacks.

    Raises ProfileError if one cannot be made again: which, of which run, and what to do.
    """
    wanted: dict[tuple[str, str], set[str]] = defaultdict(set)
    for stream, entry in drawn:
        wanted[stream.run, stream.identity] |= tokens_of([entry])
        path = Path(entry["path"])  # absolute: a local Megatron pair, which is read where it is
        if path.is_absolute() and not state_files.exists(path.with_name(f"{path.name}.bin")):
            raise _lost(stream.run, {entry["path"]}, "there is no such pair of files")
    for (run, identity), keys in wanted.items():
        if (missing := _missing(context, keys)) and (
            lost := missing - _tokenize_again(context, tokenizer, run, identity, missing)
        ):
            raise _lost(run, lost, "its sources make other shards in this version")


def restore_held_out(context: Context, tokenizer: Artifact, identity: str, entries: Iterable[Entry]) -> None:
    """Make the shards of held-out text that the store lacks.

    Args:
        identity: of the promoted model, of which a run in the lineage has read each shard, or else a stand-in source has it.

    Raises ProfileError as `restore`.
    """
    wanted = tokens_of(entries)
    missing = _missing(context, wanted)
    failure: ProfileError | None = None
    for entry in ledger.lineage(context.store, identity) if missing else ():
        try:
            missing -= _tokenize_again(context, tokenizer, entry.run, entry.identity, missing)
        except ProfileError as error:  # an ancestor may have read the same shard
            failure = error
        if not missing:
            return
    if missing and stand_in.make(context, tokenizer) is not None:
        missing = _missing(context, wanted)
    if missing:
        raise failure or _lost(context.profile.name, missing, "its sources make other shards in this version")


def _missing(context: Context, keys: Set[str]) -> set[str]:
    ids = [ArtifactId(TOKENS, key) for key in sorted(keys)]
    return {*keys} - {each.key for each in context.store.artifacts.find_many(ids, hash_limit=0) if each}


def _tokenize_again(
    context: Context, tokenizer: Artifact, run: str, identity: str, missing: Set[str]
) -> set[str]:
    """Make those of the missing shards that a run's sources have; returns their keys."""
    store = context.store
    folder = runs.find_folder(store, run, identity)
    recorded = folder and series.recorded_inputs(store, folder.name)
    pins = folder and folder.read(run_files.LOCKFILE)
    if folder is None or not recorded or not pins:
        where = store.run_folder(run).path
        raise _lost(run, missing, f"its run folder, {where}, is not that of the run any more")
    profile = runs.load_profile(runs.fetch(store, folder.name))
    own = store.artifacts.find(TokenizerStep.id(recorded["tokenizer"]), hash_limit=0)
    lockfile = inputs.Lockfile.from_bytes(pins, folder.location(run_files.LOCKFILE))
    pinned = inputs.resolve(profile, store, context.token, lockfile, data_only=True)
    origin = replace(context, profile=profile, resolved=pinned)
    name = f"of run {run}"
    try:
        plan = DatasetPlan.of(profile, own or tokenizer, list(pinned.shards), store)
        plan = without_duplicates(origin, plan)
        numbers = {plan.key(k): k for k in range(len(plan.shards))}
        wanted = sorted(numbers[key] for key in missing & numbers.keys())
        if not wanted:
            return set()
        name = ", ".join(plan.shards[k].name for k in wanted)
        log.info(
            "%d tokenized shards that %s read are not in the store; tokenizing them again", len(wanted), run
        )
        ShardJob.tokenize(plan).run(origin, wanted)
    except (SourceError, OSError) as error:
        raise _lost(run, missing, f"{name}: {error}") from error
    return {plan.key(k) for k in wanted}


def _lost(run: str, shards: Set[str], reason: str) -> ProfileError:
    named = ", ".join(sorted(shards)[:3]) + (f" and {len(shards) - 3} more" if len(shards) > 3 else "")
    text = (
        f"the round needs shards that {run} read, which are neither in the store nor can be made again ({named}): {reason}; "
        "restore the source, or, if they are only replayed, set continual.replay to 0"
    )
    return ProfileError("continual.replay", None, text)
