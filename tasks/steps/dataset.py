"""Dataset step: tokenizes text shards into Megatron's indexed format and joins them into a corpus.

Each shard is a separate artifact ("tokens"), so a new file in a growing source tokenizes only itself. The "dataset" artifact
holds corpus.json, which lists the shards, and report.json, which counts each source's records. A document is held out for
validation by its own hash, so adding data never changes the split of earlier documents; for Megatron pairs, the last ones are.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import groupby
from typing import Any

from modeling.cores import usable_cores
from modeling.data.indexed import token_dtype
from modeling.data.records import RECORD_DTYPE, rows_path
from modeling.data.sample_order import MAX_PATTERN_LENGTH, quotas
from profiles import check
from profiles.errors import ProfileError, counted
from profiles.files.state_files import retried
from profiles.rules import data_sources
from profiles.schema import Profile
from tasks import keys
from tasks.reporting.format import format_share
from tasks.sources import duplicates
from tasks.sources.changes import unchanged
from tasks.sources.shard import Shard, local_path
from tasks.step import Context, Step
from tasks.store.artifacts import HASH_LIMIT, Artifact, ArtifactId
from tasks.store.ledger import SHARDS
from tasks.store.store import Store
from tasks.tokenization import record_rows
from tasks.tokenization.dataset_plan import TOKENS, DatasetPlan
from tasks.tokenization.tokenize_shard import Counts, tokenize
from tasks.tokenization.worker_pool import WorkerPool, process_shards

CORPUS = "corpus.json"
LOCATION = {"path", "anonymous"}  # keys of an entry in corpus.json that locate a shard
# Shuffle spans a node caches per stream: the current one, the next, and shards that reach beyond them.
SPANS = 3
SHOWN_FILES = 5  # files with missing records that a warning names
Pair = tuple[Shard, Artifact]  # a shard, and its tokens
log = logging.getLogger(__name__)


@dataclass
class DatasetStep(Step):
    """Tokenizes each shard of the profile's sources that the store lacks, and publishes their corpus.

    The artifact's summary: the `Counts` of all shards, shards and bytes_per_token.
    """

    tokenizer: Artifact
    _plan: DatasetPlan | None = field(default=None, init=False, repr=False)

    kind = "dataset"
    name = "dataset"

    def title(self, profile: Profile) -> str:
        return f"dataset of {profile.name}"

    def plan(self, context: Context) -> DatasetPlan:
        """Plan of what to tokenize, before deduplication.

        Raises ProfileError for a source that would never be read.
        """
        if self._plan is None:
            profile = context.profile
            _require_shares(profile)
            self._plan = DatasetPlan.of(profile, self.tokenizer, context.inputs.shards, context.store)
        return self._plan

    def key(self, context: Context) -> str:
        """From the shards in their order, and how they are read."""
        profile, plan = context.profile, self.plan(context)
        weights = [source.weight for source in profile.data.sources]
        rows = {"packing": profile.packs} if plan.records else {}
        sources = [shard.source for shard in plan.shards]
        # Only where the other inputs do not imply it: another key makes another run.
        grouping = {} if plan.deduplicate or _weights_imply_sources(profile, plan) else {"sources": sources}
        return keys.dataset(
            _shard_keys(plan),
            profile.train.sequence_length,
            **rows,
            span=profile.data.shuffle_tokens,
            deduplicate=plan.deduplicate and sources,
            **grouping,
            blend=any(weights) and [[weights[source] for source in sources], weights],
        )

    def find(self, context: Context, key: str, limit: int = HASH_LIMIT) -> Artifact | None:
        """The corpus of this key, if its Megatron pairs are still at the recorded paths.

        Moving a pair does not change the key, which covers contents only, but makes the recorded paths invalid.

        Raises:
            SourceChanged: a pair, which training reads where it is, no longer has its contents.
        """
        store, found = context.store, context.store.artifacts.find(self.id(key), limit)
        if found is None:
            return None
        profile, plan, corpus = context.profile, self.plan(context), read_file(store, found)
        if profile.evaluate.by_source and corpus.get("sources") not in (None, _sources(profile, plan)):
            # Names and grouping of sources are not part of the key, and other runs use the corpus too.
            names = ", ".join(source["name"] for source in corpus["sources"])
            log.warning("the dataset was made with other sources: evaluate.by_source reports %s", names)
        for shard, entry in zip(plan.shards, corpus["train"], strict=True):
            if shard.format != "megatron":
                continue
            with unchanged(shard):
                recorded = {name: entry[name] for name in LOCATION & entry.keys()}
            if _location(shard) != recorded:
                reason = f"{shard.name} moved from {entry['path']}"
                log.info("%s: rebuilding the corpus", reason)
                if store.artifacts.is_locked(self.id(key)):
                    store.artifacts.quarantine(self.id(key), reason)
                return None
        return found

    def make(self, context: Context, key: str) -> Artifact:
        """Tokenize the shards that are missing and publish the corpus.

        Raises:
            ProfileError: sources without text, or a split that is shorter than one window.
            SourceError: a corrupted source file.
        """
        profile, store, plan = context.profile, context.store, self.plan(context)
        shard_keys = _shard_keys(plan)  # before deduplication, as the data ledger records them
        plan = without_duplicates(context, plan)
        tokens = ShardJob.tokenize(plan).run(context, range(len(plan.shards)))

        pairs = list(zip(plan.shards, tokens, strict=True))
        total, report = _sum(pairs), _report(profile, pairs)
        _require_text(profile, plan, report, pairs)
        if plan.records:
            _require_records(profile, total)
        else:
            _require_windows(profile, plan, report, total)
        _require_room(profile, store, plan, pairs, total["tokens"])
        count = total["tokens"] + total["validation_tokens"]
        summary: dict[str, Any] = {**total, "shards": len(tokens)}
        summary["bytes_per_token"] = round(total["bytes"] / count, 3)
        if incomplete := _missing_by_file(pairs):
            summary["incomplete_files"] = dict(list(incomplete.items())[:SHOWN_FILES])
            summary["incomplete"] = len(incomplete)
        contents = {
            "format": 1,
            "vocabulary_size": self.tokenizer.summary["vocabulary_size"],
            "eos": self.tokenizer.summary["eos"] if plan.append_eos else None,
            "sequence_length": profile.train.sequence_length,
            "train": [_entry(*pair, "train", "") for pair in pairs],
            "validation": [_entry(*pair, "validation", "validation_") for pair in pairs],
            "blend": _blend(profile, plan),
            "sources": _sources(profile, plan),
            "span": profile.data.shuffle_tokens,
            "records": bool(plan.records),
        }
        if plan.records:
            summary["template"] = plan.records["template"]  # for the export: the file may change until then
        requires = [*dict.fromkeys(shard.id for shard in tokens)]
        with store.artifacts.publish(self.id(key), summary, requires) as folder:
            (folder / CORPUS).write_text(json.dumps(contents))
            for split in ("train", "validation") if plan.records else ():
                samples = record_rows.write(profile, store, tokens, rows_path(folder, split), split)
                summary["samples" if split == "train" else "validation_samples"] = samples
            (folder / SHARDS).write_text(json.dumps(shard_keys))
            (folder / "report.json").write_text(json.dumps(report, indent=1))
        return store.artifacts.expect(self.id(key))

    def describe(self, summary: Mapping[str, Any]) -> str:
        if "samples" in summary:
            described = record_rows.describe(summary)
        else:
            described = f"{summary['tokens']:,} tokens to train on, {summary['validation_tokens']:,} held out"
        if summary.get("replay"):  # of a round
            source = "generated text" if summary.get("generated") else "earlier data"
            described += f", {format_share(summary['replay'])} of the samples replayed from {source}"
        return described


@dataclass(frozen=True)
class ShardJob:
    """Operation on a plan's shards: tokenizing, or hashing their documents to find duplicates."""

    plan: DatasetPlan
    operation: str  # "tokenize" or "fingerprint", for workers
    kind: str  # artifact kind of its results
    verb: str  # for progress messages
    key: Callable[[int], str]  # cache key of shard k's result
    call: Callable[..., Any]  # does the work for one shard in this process

    @classmethod
    def tokenize(cls, plan: DatasetPlan) -> ShardJob:
        return cls(plan, "tokenize", TOKENS, "tokenizing", plan.key, tokenize)

    @classmethod
    def fingerprint(cls, plan: DatasetPlan) -> ShardJob:
        def key(k: int) -> str:
            return keys.hashes(plan.shards[k].digest)

        verb = "hashing documents of"
        return cls(plan, "fingerprint", duplicates.HASHES, verb, key, duplicates.fingerprint)

    def run(self, context: Context, numbers: Sequence[int]) -> list[Artifact]:
        """The artifacts of these shards, in their order; makes those that are not in the store."""
        wanted = [ArtifactId(self.kind, self.key(k)) for k in numbers]
        limit = HASH_LIMIT // max(1, len(numbers))  # bytes to hash per shard; sizes are checked for all
        store = context.store.artifacts
        artifacts = {artifact.id: artifact for artifact in store.find_many(wanted, limit) if artifact}
        # Files with the same contents have the same key and are processed once.
        missing = {id: k for id, k in zip(wanted, numbers, strict=True) if id not in artifacts}
        if missing:
            self._make(context, list(missing.values()), len(numbers))
            for id, artifact in zip(missing, store.find_many(list(missing), 0), strict=True):
                artifacts[id] = artifact or store.expect(id)
        return [artifacts[id] for id in wanted]

    def _make(self, context: Context, missing: Sequence[int], count: int) -> None:
        cores, store = usable_cores(), context.store

        def fraction(done: int) -> float:
            return (count - len(missing) + done) / count

        def report(k: int, tokens: int, done: int) -> None:
            counted = f": {tokens:,} tokens" if tokens else ""
            context.progress(f"{self.verb} {self.plan.shards[k].name}{counted}", fraction(done))

        if len(missing) == 1:  # starting a process can take longer than the shard
            (k,) = missing
            report(k, 0, 0)
            self.call(self.plan, store, k, lambda tokens: report(k, tokens, 0), cores, context.token)
            report(k, 0, 1)
            return
        cluster = context.profile.cluster
        if cluster.launcher == "slurm" and cluster.shards_partition is not None:
            process_shards(self.plan, store, cluster, self.operation, missing, context.token)
            return
        workers = min(cores, len(missing))
        names = [f"{self.operation} {self.plan.shards[k].name}" for k in missing]
        with WorkerPool(self.plan, store, workers, max(1, cores // workers), context.token) as pool:
            results = context.map(lambda k: pool.run(self.operation, k), missing, names)
            context.progress(f"{self.verb} {len(missing):,} shards", None)
            for done, _ in enumerate(results, 1):
                context.progress(f"{self.verb} {len(missing):,} shards: {done:,} done", fraction(done))


def without_duplicates(context: Context, plan: DatasetPlan) -> DatasetPlan:
    """The plan with the duplicates to drop from each shard; the same one if the data is not deduplicated."""
    if not plan.deduplicate:
        return plan
    comparable = duplicates.comparable(plan)
    hashes = ShardJob.fingerprint(plan).run(context, comparable)
    return duplicates.find(plan, context.store, dict(zip(comparable, hashes, strict=True)))


def read_file(store: Store, dataset: Artifact, file: str = CORPUS) -> Any:
    """Contents of a dataset's corpus.json or shards.json."""
    return json.loads(retried((store.artifacts.path(dataset, with_required=False) / file).read_text))


def _shard_keys(plan: DatasetPlan) -> list[str]:
    return [plan.key(k) for k in range(len(plan.shards))]


def with_steps(profile: Profile, corpus: Artifact, replay: float = 0.0) -> Profile:
    """Resolve `train.epochs` to steps, the last batch filled up. Raises ProfileError if phases do not fit.

    Args:
        replay: share of the samples that are not of the corpus.
    """
    train = profile.train
    if train.epochs is None:
        return profile
    windows = corpus.summary.get("samples", (corpus.summary["tokens"] - 1) // train.sequence_length)
    samples = windows * train.epochs / (1 - Fraction(str(replay)))
    steps = math.ceil(samples / train.global_batch_size)
    resolved = profile.model_copy(update={"train": train.model_copy(update={"steps": steps, "epochs": None})})
    check.check(resolved)
    return resolved


def _location(shard: Shard) -> dict[str, str | bool]:
    """Path of a ready-made pair, without extension."""
    local = local_path(shard.paths[0])
    path = str(local.absolute()) if local else shard.paths[0]
    return {"path": path.removesuffix(".idx"), **({"anonymous": True} if shard.anonymous else {})}


def _entry(shard: Shard, tokens: Artifact, split: str, prefix: str) -> dict[str, str | int]:
    """corpus.json entry for a split of a shard: path (in the store, or of the ready-made pair) and counts."""
    if shard.format == "megatron":
        return {**_location(shard), "digest": shard.digest, **tokens.summary["pair"][split]}
    counts = {name: tokens.summary[f"{prefix}{name}"] for name in ("tokens", "documents")}
    return {"path": f"{TOKENS}/{tokens.key}/{split}", "start": 0, **counts}


def _shard_counts(profile: Profile, plan: DatasetPlan) -> list[int]:
    """Number of shards of each source."""
    counts = Counter(shard.source for shard in plan.shards)
    return [counts[i] for i in range(len(profile.data.sources))]


def _weights_imply_sources(profile: Profile, plan: DatasetPlan) -> bool:
    """Whether the shards' weights, in order, determine which weighted source each shard belongs to."""
    weights = [source.weight for source in profile.data.sources]
    runs = groupby((shard.source for shard in plan.shards), key=lambda source: weights[source])
    # Neighbouring sources of the same weight: only if each has one shard.
    weighted_runs = [list(run) for weight, run in runs if weight is not None]
    return all(len(set(run)) in (1, len(run)) for run in weighted_runs)


def _blend(profile: Profile, plan: DatasetPlan) -> list[dict[str, Any]] | None:
    """Weight and number of shards of each source; None if the sources form one unweighted stream."""
    blend = [
        {"weight": source.weight if count else None, "shards": count}
        for source, count in zip(profile.data.sources, _shard_counts(profile, plan), strict=True)
    ]
    return blend if any(part["weight"] for part in blend) else None


def _sources(profile: Profile, plan: DatasetPlan) -> list[dict[str, Any]]:
    """Name and number of shards of each source, in order."""
    pairs = zip(data_sources.names(profile.data), _shard_counts(profile, plan), strict=True)
    return [{"name": name, "shards": count} for name, count in pairs]


def _report(profile: Profile, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Counts of each source, for report.json."""
    rows = []
    for number, source in enumerate(profile.data.sources):
        own = [(shard, tokens) for shard, tokens in pairs if shard.source == number]
        counts = _sum(own)
        made = counts["tokens"] + counts["validation_tokens"]
        row = {
            "source": source.repository or source.path or source.kind,
            "shards": len(own),
            **counts,
            "bytes_per_token": round(counts["bytes"] / made, 3) if made else None,
            "engines": sorted({engine for _, tokens in own if (engine := tokens.summary.get("engine"))}),
            "missing_by_file": _missing_by_file(own),
        }
        rows.append(row)
    return rows


def _missing_by_file(pairs: Sequence[Pair]) -> dict[str, int]:
    """Number of records without text, or that the objective cannot use, by file, the most first."""
    counts: Counter[str] = Counter()
    for shard, artifact in pairs:
        if missing := artifact.summary.get("missing"):
            counts[shard.name.partition(" part ")[0]] += missing
    return dict(counts.most_common())


def _sum(pairs: Sequence[Pair]) -> dict[str, int]:
    names = [field.name for field in fields(Counts)]
    # An artifact of an earlier version has no counts of records.
    return {name: sum(tokens.summary.get(name, 0) for _, tokens in pairs) for name in names}


def _require_text(
    profile: Profile, plan: DatasetPlan, report: Sequence[Mapping[str, Any]], pairs: Sequence[Pair]
) -> None:
    """Reject sources in which too many records have no text, or cannot be used by the objective."""
    limit = profile.data.maximum_missing
    problem = f"are unusable for objective.kind {profile.objective.kind}" if plan.records else "have no text"
    for number, row in enumerate(report):
        missing = row["missing"]
        records = (row["documents"] + row["validation_documents"]) // profile.rows_per_sample
        count = missing + records + row["short"] + row["duplicates"] + row["too_long"]
        share = missing / max(1, count)
        if share > limit:
            reason = f"{missing:,} of {counted(count, 'record')} in {row['source']} {problem}"
            causes = (tokens.summary.get("unusable") for shard, tokens in pairs if shard.source == number)
            if cause := next(filter(None, causes), None):  # says what to do
                raise ProfileError("data.maximum_missing", limit, f"{reason}; the first: {cause}")
            raise ProfileError("data.maximum_missing", limit, reason, [min(1.0, round(share + 5e-4, 3))])


def _require_room(
    profile: Profile, store: Store, plan: DatasetPlan, pairs: Sequence[Pair], total: int
) -> None:
    """Reject remote data that the cache cannot hold: a shard, or what the shuffle order reads at a time."""
    data = profile.data
    remote = [
        (*_file_sizes(plan, shard, artifact), shard.name)
        for shard, artifact in pairs
        if (local_path(shard.paths[0]) is None if shard.format == "megatron" else store.is_remote)
    ]
    if not remote:
        return
    largest, _, name = max(remote)
    if largest > data.cache_gigabytes * 1e9:
        reason = f"{name} takes {largest / 1e9:,.1f} GB, and a node caches it as one piece"
        raise ProfileError("data.cache_gigabytes", data.cache_gigabytes, reason, [math.ceil(largest / 1e9)])
    size = max(itemsize for _, itemsize, _ in remote) / 1e9
    needed = total * size
    streams = max(1, sum(source.weight is not None for source in data.sources))
    if data.shuffle_tokens:
        needed = min(needed, SPANS * streams * data.shuffle_tokens * size)
    if needed > data.cache_gigabytes:
        reason = f"{needed:,.1f} GB of data are shuffled together and would be fetched repeatedly"
        fitting = int(data.cache_gigabytes / size / SPANS / streams)
        if data.shuffle_tokens:
            raise ProfileError("data.shuffle_tokens", data.shuffle_tokens, reason, [fitting])
        reason += f"; shuffle fewer tokens at a time: data.shuffle_tokens = {fitting}"
        raise ProfileError("data.cache_gigabytes", data.cache_gigabytes, reason, [math.ceil(needed)])


def _file_sizes(plan: DatasetPlan, shard: Shard, tokens: Artifact) -> tuple[int, int]:
    """Bytes of the largest `.bin`/`.idx` pair of a shard, and of a token in it."""
    dtype = RECORD_DTYPE if plan.records else token_dtype(plan.tokenizer.summary["vocabulary_size"])
    summary = tokens.summary
    splits = [(summary[f"{prefix}tokens"], summary[f"{prefix}documents"]) for prefix in ("", "validation_")]
    if shard.format == "megatron":
        count, documents = map(sum, zip(*splits, strict=True))
        # A state begins with the file's size; it is empty at a commit of the hub.
        sizes = [int(state.split()[0]) for state in shard.states if state]
        if len(sizes) == 2:
            return sum(sizes), sizes[1] // max(1, count)
        splits = [(count, documents)]
    return max(count * dtype.itemsize + 20 * documents for count, documents in splits), dtype.itemsize


def _require_shares(profile: Profile) -> None:
    """Reject weights so small that their sources would never be sampled."""
    mixtures = [{f"data.sources.{i}.weight": source.weight for i, source in enumerate(profile.data.sources)}]
    for number, change in enumerate(profile.data.schedule):
        mixtures.append({f"data.schedule.{number}.weights.{i}": w for i, w in enumerate(change.weights)})
    for mixture in mixtures:
        weighted = [(key, weight) for key, weight in mixture.items() if weight]
        counts = quotas([weight for _, weight in weighted]) if weighted else []
        if 0 in counts:
            key, weight = weighted[counts.index(0)]
            least = (sum(other for _, other in weighted) - weight) / (MAX_PATTERN_LENGTH - 1)
            reason = (
                f"is less than one of {MAX_PATTERN_LENGTH:,} samples, so the source would never be sampled"
            )
            raise ProfileError(key, weight, reason, [float(f"{1.01 * least:.2g}")])


def _require_records(profile: Profile, total: dict[str, int]) -> None:
    """Reject data without a record to train on, or to evaluate on."""
    unusable = f"{counted(total['missing'], 'record')} cannot be used, {counted(total['too_long'], 'record')} too long"
    if not total["documents"]:
        raise ProfileError("data.sources", None, f"no record to train on: {unusable}")
    if not total["validation_documents"]:
        fraction = profile.data.validation_fraction
        reason = f"holds out none of the {total['documents']:,} usable records"
        raise ProfileError("data.validation_fraction", fraction, reason)


def _require_windows(
    profile: Profile, plan: DatasetPlan, report: Sequence[Mapping[str, Any]], total: Mapping[str, int]
) -> None:
    """Reject a corpus, or a weighted source, with less than one window to read."""
    if not total["tokens"] and not total["validation_tokens"]:
        raise ProfileError("data.sources", None, "hold no text: every document is empty")
    length, fraction = profile.train.sequence_length, profile.data.validation_fraction
    streams = [("the sources hold", total["tokens"])]
    for i, part in enumerate(_blend(profile, plan) or ()):
        if part["weight"]:
            streams.append((f"data.sources.{i} has a weight and holds", report[i]["tokens"]))
    for holds, count in streams:
        if count <= length:
            reason = f"{holds} {count} tokens to train on, fewer than one window of {length} + 1"
            raise ProfileError("train.sequence_length", length, reason)
    held_out = total["validation_tokens"]
    if (fraction or held_out) and held_out <= length:
        reason = f"holds out {held_out} tokens, fewer than one window of {length} + 1; hold out more"
        raise ProfileError("data.validation_fraction", fraction, reason)
