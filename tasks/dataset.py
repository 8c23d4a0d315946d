"""Dataset step: text to tokens in Megatron's indexed format, shard by shard, and the corpus that joins the shards.

A shard is an artifact of its own ("tokens"), so that a new file in a growing source tokenizes only itself; the "dataset"
artifact holds corpus.json, which counts and points to them, and report.json, which says what became of each source's records. A
document is held out for validation by its own hash, so which are never changes when data is added.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from modeling.data.indexed import token_dtype
from modeling.data.sample_order import LONGEST_PATTERN, quotas
from profiles import check
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks import keys
from tasks.sources import corpus as corpora
from tasks.sources import duplicates
from tasks.sources.shard import Shard, local_path
from tasks.store import ledger
from tasks.store.artifacts import HASH_LIMIT, Artifact
from tasks.store.digest_cache import DigestCache
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import TOKENS, DatasetPlan
from tasks.tokenization.tokenize_shard import Counts, tokenize
from tasks.tokenization.worker_pool import WorkerPool

KIND = "dataset"
CORPUS = "corpus.json"
PLACE = {"path", "anonymous"}  # of an entry of corpus.json, what says where a shard is read
SPANS = 3  # that a node holds of each stream: the one it reads, the next, and shards that reach beyond them
Progress = Callable[[str, float], None]
log = logging.getLogger(__name__)
# How a list of shards is done: with the workers, an order and the shards' numbers.
Spread = Callable[[WorkerPool, DatasetPlan, str, Sequence[int]], Iterable[Artifact]]


class NothingNew(ValueError):
    """All of the data's shards have been trained on before."""


def key(
    profile: Profile,
    store: Store,
    tokenizer: Artifact,
    token: str | None = None,
    without: Collection[str] = (),
) -> str:
    """Cache key of the corpus: of its shards in their order, and of how they are read. Arguments as for `plan`.

    A corpus of this key that points to where ready-made pairs were, and are not now, is removed, to be made again.
    """
    made = plan(profile, store, tokenizer, token, without)
    identity = _key(profile, made)
    _standing(store, made, identity, limit=0)  # whoever wants it looks at its contents
    return identity


def plan(
    profile: Profile,
    store: Store,
    tokenizer: Artifact,
    token: str | None = None,
    without: Collection[str] = (),
) -> DatasetPlan:
    """What there is to tokenize; duplicates are not known yet.

    Args:
        token: for the hub.
        without: keys of shards that are left out, as the ledger has them.

    Raises:
        ProfileError: a source that lists nothing, or would never be read. SourceError: a damaged one. NothingNew: all are
            left out.
    """
    _require_shares(profile)
    whole = DatasetPlan.of(
        profile, tokenizer, corpora.shards(profile.data, DigestCache(store.local_cache), token)
    )
    new = tuple(shard for k, shard in enumerate(whole.shards) if whole.key(k) not in without)
    if not new:
        raise NothingNew(f"nothing new: all {len(whole.shards)} shards have been trained on")
    return replace(whole, shards=new)


def run(
    profile: Profile,
    store: Store,
    tokenizer: Artifact,
    progress: Progress | None = None,
    spread: Spread | None = None,
    token: str | None = None,
    without: Collection[str] = (),
) -> Artifact:
    """Tokenize every shard of the profile's sources that is not in the store yet, and publish the corpus of them.

    Args:
        progress: called with what is being done and the share of the shards that are done, 0 to 1.
        spread: how several shards are done; by default a process a core, one shard after another each.
        token: for the hub.
        without: keys of shards that are left out, as the ledger has them.

    Raises:
        ProfileError: sources without text, or a split that is shorter than one window.
        SourceError: a damaged source file.
    """
    report = progress or (lambda message, fraction: None)
    made = plan(profile, store, tokenizer, token, without)
    identity, keys_of_shards = _key(profile, made), [made.key(k) for k in range(len(made.shards))]
    if profile.data.deduplicate:
        which = duplicates.comparable(made)
        hashes = _all(made, store, "fingerprint", which, report, spread, token)
        made = duplicates.find(made, store, dict(zip(which, hashes, strict=True)))
    tokens = _all(made, store, "tokenize", range(len(made.shards)), report, spread, token)
    return assemble(profile, store, made, identity, tokens, keys_of_shards)


def _all(
    plan: DatasetPlan,
    store: Store,
    order: str,
    numbers: Sequence[int],
    report: Progress,
    spread: Spread | None,
    token: str | None,
) -> list[Artifact]:
    """The artifacts of these shards; those that are not there are made."""
    kind, identity, do, word = {
        "tokenize": (TOKENS, plan.key, tokenize, "tokenizing"),
        "fingerprint": (
            duplicates.HASHES,
            lambda k: keys.hashes(plan.shards[k].digest),
            duplicates.fingerprint,
            "looking for duplicates in",
        ),
    }[order]
    limit = HASH_LIMIT // max(1, len(numbers))  # of contents: sizes are looked at for all
    identities = [identity(k) for k in numbers]
    found = dict(zip(numbers, store.artifacts.find_many(kind, identities, limit), strict=True))
    missing = list(
        {identity(k): k for k in numbers if found[k] is None}.values()
    )  # equal files are done once
    cores = os.cpu_count() or 1

    def tell(k: int, tokens: int, done: int) -> None:
        share = (len(numbers) - len(missing) + done) / len(numbers)
        report(f"{word} {plan.shards[k].name}" + (f": {tokens:,} tokens" if tokens else ""), share)

    if len(missing) == 1:  # starting a process would take longer than many a corpus
        tell(missing[0], 0, 0)
        do(plan, store, missing[0], lambda tokens: tell(missing[0], tokens, 0), cores, token)
        tell(missing[0], 0, 1)
    elif missing:
        count = min(cores, len(missing))
        with WorkerPool(plan, store, count, max(1, cores // count), token) as workers:
            for done, _ in enumerate((spread or in_threads)(workers, plan, order, missing), 1):
                tell(missing[min(done, len(missing) - 1)], 0, done)
    made = [identity(k) for k in numbers if found[k] is None]
    new = dict(zip(made, store.artifacts.find_many(kind, made, 0), strict=True))
    return [found[k] or new[identity(k)] or store.artifacts.expect(kind, identity(k)) for k in numbers]


def in_threads(
    workers: WorkerPool, plan: DatasetPlan, order: str, numbers: Sequence[int]
) -> Iterable[Artifact]:
    """Each shard once, on as many workers as there are."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda k: workers.run(order, k), numbers)


def assemble(
    profile: Profile,
    store: Store,
    plan: DatasetPlan,
    identity: str,
    tokens: Sequence[Artifact],
    keys_of_shards: Sequence[str],
) -> Artifact:
    """Publish the corpus of these shards. Its summary: Counts of them all, shards and bytes_per_token.

    Args:
        keys_of_shards: as the ledger records them: of the shards by themselves, whatever they repeat of others.
    """
    total = _sum(tokens)
    _require_text(profile, plan, tokens)
    _require_windows(profile, plan, tokens, total)
    _require_room(profile, store, plan, total)
    made = total["tokens"] + total["validation_tokens"]
    summary = {**total, "shards": len(tokens), "bytes_per_token": round(total["bytes"] / made, 3)}
    pairs = list(zip(plan.shards, tokens, strict=True))
    corpus = {
        "format": 1,
        "vocabulary_size": plan.tokenizer.summary["vocabulary_size"],
        "eos": plan.tokenizer.summary["eos"] if plan.append_eos else None,
        "sequence_length": profile.train.sequence_length,
        "train": [_entry(*pair, "train", "") for pair in pairs],
        "validation": [_entry(*pair, "validation", "validation_") for pair in pairs],
        "blend": _blend(profile, plan),
        "span": profile.data.shuffle_tokens,
    }
    requires = [{"kind": TOKENS, "key": key} for key in dict.fromkeys(shard.key for shard in tokens)]
    with store.artifacts.lock(KIND, identity):
        found = _standing(store, plan, identity)
        if found:
            return found
        with store.artifacts.publish(KIND, identity, summary, requires) as folder:
            (folder / CORPUS).write_text(json.dumps(corpus))
            (folder / ledger.SHARDS).write_text(json.dumps(list(keys_of_shards)))
            (folder / "report.json").write_text(json.dumps(_report(profile, plan, tokens), indent=1))
    return store.artifacts.expect(KIND, identity)


def with_steps(profile: Profile, corpus: Artifact) -> Profile:
    """The profile with the number of steps that its epochs over this corpus take; the last batch is filled up.

    Raises:
        ProfileError: warm-up and constant steps are more than that.
    """
    train = profile.train
    if train.epochs is None:
        return profile
    windows = (corpus.summary["tokens"] - 1) // train.sequence_length
    steps = -(-windows * train.epochs // train.global_batch_size)
    resolved = profile.model_copy(update={"train": train.model_copy(update={"steps": steps, "epochs": None})})
    check.check(resolved)
    return resolved


def _key(profile: Profile, plan: DatasetPlan) -> str:
    weights = [source.weight for source in profile.data.sources]
    return keys.dataset(
        [plan.key(k) for k in range(len(plan.shards))],
        profile.train.sequence_length,
        span=profile.data.shuffle_tokens,
        deduplicate=plan.deduplicate and [shard.source for shard in plan.shards],
        blend=any(weights) and [[weights[shard.source] for shard in plan.shards], weights],
    )


def _standing(store: Store, plan: DatasetPlan, identity: str, limit: int = HASH_LIMIT) -> Artifact | None:
    """The corpus of this key, if it is in the store and its ready-made pairs lie where the plan has them.

    The key is of contents, so it stays when a pair is moved; the paths in the corpus then lead nowhere, or to another pair.
    """
    found = store.artifacts.find(KIND, identity, limit)
    if found is None:
        return None
    entries = json.loads((store.artifacts.path(found, with_required=False) / CORPUS).read_text())["train"]
    for shard, entry in zip(plan.shards, entries, strict=True):
        if shard.format == "megatron" and _place(shard) != {
            name: entry[name] for name in PLACE & entry.keys()
        }:
            log.info("%s was at %s: the corpus that points there is made again", shard.name, entry["path"])
            store.artifacts.remove(KIND, identity)
            return None
    return found


def _place(shard: Shard) -> dict[str, str | bool]:
    """Where a ready-made pair is read."""
    local = local_path(shard.paths[0])
    path = str(local.absolute()) if local else shard.paths[0]
    return {"path": path.removesuffix(".idx"), **({"anonymous": True} if shard.anonymous else {})}


def _entry(shard: Shard, tokens: Artifact, split: str, prefix: str) -> dict[str, str | int]:
    """Where a split of a shard lies: in the store, or where the pair is that is used as it is."""
    if shard.format == "megatron":
        return {**_place(shard), **tokens.summary["pair"][split]}
    counts = {name: tokens.summary[f"{prefix}{name}"] for name in ("tokens", "documents")}
    return {"path": f"{TOKENS}/{tokens.key}/{split}", "start": 0, **counts}


def _blend(profile: Profile, plan: DatasetPlan) -> list[dict[str, Any]] | None:
    """Weight and number of shards, in their order, of each source that is trained on; None where they are one stream."""
    counts = [sum(shard.source == i for shard in plan.shards) for i in range(len(profile.data.sources))]
    blend = [
        {"weight": source.weight if count else None, "shards": count}
        for source, count in zip(profile.data.sources, counts, strict=True)
    ]
    return blend if any(part["weight"] for part in blend) else None


def _report(profile: Profile, plan: DatasetPlan, tokens: Sequence[Artifact]) -> list[dict[str, Any]]:
    """What each source came to."""
    rows = []
    for i, source in enumerate(profile.data.sources):
        own = [found for shard, found in zip(plan.shards, tokens, strict=True) if shard.source == i]
        counts = _sum(own)
        made = counts["tokens"] + counts["validation_tokens"]
        where = source.repository or source.path or source.kind
        rate = round(counts["bytes"] / made, 3) if made else None
        engines = sorted({shard.summary["engine"] for shard in own if shard.summary.get("engine")})
        row = {"source": where, "shards": len(own), **counts, "bytes_per_token": rate, "engines": engines}
        rows.append(row)
    return rows


def _sum(tokens: Sequence[Artifact]) -> dict[str, int]:
    return {field.name: sum(shard.summary[field.name] for shard in tokens) for field in fields(Counts)}


def _require_text(profile: Profile, plan: DatasetPlan, tokens: Sequence[Artifact]) -> None:
    """Refuse sources too many of whose records have no text."""
    limit = profile.data.maximum_missing
    for row in _report(profile, plan, tokens):
        read = row["documents"] + row["validation_documents"] + row["short"] + row["duplicates"]
        share = row["missing"] / max(1, read + row["missing"])
        if share > limit:
            reason = (
                f"{row['source']} has {row['missing']:,} records without text of {read + row['missing']:,}"
            )
            raise ProfileError("data.maximum_missing", limit, reason, [round(share + 5e-4, 3)])


def _require_room(profile: Profile, store: Store, plan: DatasetPlan, total: dict[str, int]) -> None:
    """Refuse data that is read from elsewhere in an order that would fetch most of it again and again."""
    data = profile.data
    pairs = [shard.paths[0] for shard in plan.shards if shard.format == "megatron"]
    elsewhere = store.is_remote or any(local_path(path) is None for path in pairs)
    size = token_dtype(plan.tokenizer.summary["vocabulary_size"]).itemsize / 1e9
    needed = total["tokens"] * size
    streams = max(1, sum(source.weight is not None for source in data.sources))
    if data.shuffle_tokens:
        needed = min(needed, SPANS * streams * data.shuffle_tokens * size)
    if elsewhere and needed > data.cache_gigabytes:
        reason = f"{needed:,.1f} GB of data are shuffled together, which would be fetched again and again"
        fitting = int(data.cache_gigabytes / size / SPANS / streams)
        if data.shuffle_tokens:
            raise ProfileError("data.shuffle_tokens", data.shuffle_tokens, reason, [fitting])
        reason += f"; shuffle less at a time, by data.shuffle_tokens = {fitting}"
        raise ProfileError("data.cache_gigabytes", data.cache_gigabytes, reason, [math.ceil(needed)])


def _require_shares(profile: Profile) -> None:
    """Refuse weights so small beside the others that their sources would never be read."""
    weighted = [(i, source.weight) for i, source in enumerate(profile.data.sources) if source.weight]
    each = quotas([weight for _, weight in weighted]) if weighted else []
    if 0 in each:
        i, weight = weighted[each.index(0)]
        least = (sum(own for _, own in weighted) - weight) / (LONGEST_PATTERN - 1)
        reason = f"is less than one of {LONGEST_PATTERN:,} samples, so that the source would never be read"
        raise ProfileError(f"data.sources.{i}.weight", weight, reason, [float(f"{1.01 * least:.2g}")])


def _require_windows(
    profile: Profile, plan: DatasetPlan, tokens: Sequence[Artifact], total: dict[str, int]
) -> None:
    """Refuse a corpus that training or evaluation could read nothing from, or one that a weighted source has no part in."""
    length, fraction = profile.train.sequence_length, profile.data.validation_fraction
    streams = [("the sources hold", total["tokens"])]
    for i, part in enumerate(_blend(profile, plan) or ()):
        own = [found for shard, found in zip(plan.shards, tokens, strict=True) if shard.source == i]
        if part["weight"]:
            streams.append((f"data.sources.{i} has a weight and holds", _sum(own)["tokens"]))
    for holds, count in streams:
        if count <= length:
            reason = f"{holds} {count} tokens to train on, fewer than one window of {length} + 1"
            raise ProfileError("train.sequence_length", length, reason)
    held_out = total["validation_tokens"]
    if (fraction or held_out) and held_out <= length:
        reason = f"holds out {held_out} tokens, fewer than one window of {length} + 1; hold out more"
        raise ProfileError("data.validation_fraction", fraction, reason)
