"""Inputs of a run: resolves each mutable reference of a profile, such as a hub revision or file list.

The results are pinned in the run's lockfile, `<run>/lock.json`. A run that is started again reads the pins: it needs no network,
and a new commit on the hub or a new file in a folder does not affect it. If the profile has changed, only new references are
resolved; `--update` resolves all of them again. Exports of other runs are always resolved again, so that a run never continues
from an export that has since been replaced.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any, Self

from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.files.state_files import CorruptedState
from profiles.huggingface.hub import resolve_commit
from profiles.local_paths import RUN
from profiles.resolve import names as profile_names
from profiles.schema import Data, Profile, Source, Tokenizer
from tasks import keys
from tasks.sources import corpus, weights
from tasks.sources.digest_cache import DigestCache
from tasks.sources.shard import Shard, SourceChanged
from tasks.store import run_artifacts
from tasks.store.manifest import Corrupted
from tasks.store.store import Store
from tasks.tokenization.tokenizer_fetch import folder_digest, is_folder

FORMAT = 1
EXPORT = "export"  # the part of a run that `run:NAME` refers to, and the kind of its artifact
NEAREST = 3  # finished runs to name in an error
Reference = Mapping[str, Any]
# Returns what a reference is pinned to; if it is not, resolves it with the function.
Pin = Callable[[Reference, Callable[[], Any]], Any]
Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Lockfile:
    """Pinned references by their digest: each with its result, `answer`, and the time of resolution."""

    pins: Mapping[str, Mapping[str, Any]]

    def without_exports(self) -> Self:
        """Without the pins of runs' exports, which change if such a run is trained further or again."""
        return type(self)({key: pin for key, pin in self.pins.items() if not _is_export(pin["question"])})

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, "answers": dict(self.pins)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Parse a lockfile. Raises CorruptedState with its name if it is corrupted or of another version."""
        try:
            value = json.loads(data)
            if value["format"] != FORMAT:
                raise ValueError(f"format {value['format']} is unknown")
            for digest, pin in value["answers"].items():
                if keys.digest(pin["question"]) != digest or not isinstance(pin["resolved"], str):
                    raise ValueError(f"entry {digest} is corrupted")
                if "source" in pin["question"]:
                    [Shard(**shard) for shard in pin["answer"]]
            return cls(value["answers"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorruptedState(
                f"{name}: not a lockfile: {error}; --update resolves the run's inputs again"
            ) from None


@dataclass(frozen=True)
class Inputs:
    """What a run is made from, each part pinned to its contents."""

    # Contents or commit; None: trained on the text of the sources. Rounds have neither this nor the weights.
    tokenizer: Mapping[str, Any] | None
    shards: tuple[Shard, ...]  # of all sources, in order
    # digest; commit, if on the hub; name and identity of the run, if one of the store exported them. None: from scratch
    weights: Mapping[str, Any] | None
    lockfile: Lockfile

    @property
    def since(self) -> str:
        """Time of the oldest pin of a source, in UTC; empty if nothing had to be resolved."""
        pins = self.lockfile.pins.values()
        return min((pin["resolved"] for pin in pins if "source" in pin["question"]), default="")


def resolve(
    profile: Profile,
    store: Store,
    token: str | None = None,
    lockfile: Lockfile | None = None,
    progress: Progress = lambda message, fraction: None,
    *,
    data_only: bool = False,
) -> Inputs:
    """Resolve a profile's tokenizer, sources and initial weights.

    Args:
        token: for the hub; None: the environment's.
        lockfile: pins to reuse; None resolves all references.
        data_only: resolve the sources only. A round has the tokenizer and the weights of its series.

    Raises:
        ProfileError: a reference to something that does not exist.
        SourceError: a corrupted source file.
    """
    pins: dict[str, Mapping[str, Any]] = {}
    known = lockfile.pins if lockfile else {}
    digests = DigestCache(store.local_cache)

    def pin(reference: Reference, find_out: Callable[[], Any]) -> Any:
        digest = keys.digest(reference)
        if digest not in pins:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            pins[digest] = known.get(digest) or {"question": reference, "resolved": now, "answer": find_out()}
        return pins[digest]["answer"]

    tokenizer = initial = None
    if not data_only:
        progress("resolving the tokenizer", None)
        tokenizer = _tokenizer(profile.tokenizer, token, pin)
    # Records are read with all their fields, so no field is the text.
    text = "" if profile.objective.traits.reads_records else profile.data.text
    shards = tuple(_shards(profile.data, text, digests, token, pin, progress))
    if not data_only:
        progress("resolving the initial weights", None)
        initial = _weights(profile, store, digests, token, pin)
    return Inputs(tokenizer, shards, initial, Lockfile(pins))


def locate_export(store: Store, key: str, source: str, *, required: bool = True) -> str:
    """Store location of the export of `run:NAME`, which another machine may have made.

    Args:
        required: whether it has to exist, and is downloaded.

    Raises ProfileError, for the profile key `key`, for a run without an export, or whose latest one is not in the store.
    """
    name = source.removeprefix(RUN)
    try:
        run = store.run_folder(name)
    except ValueError as error:
        raise ProfileError(key, source, str(error)) from error
    if not required:
        return run.location(EXPORT)
    if not run.files(EXPORT):
        reason = f"the store {store.uri} has no run {name} with an export"
        if name in profile_names():
            option = "" if store.uri == "./store" else f" --store {shlex.quote(store.uri)}"
            reason += f"; train it first: trainshed run {name}{option}"
        raise ProfileError(key, source, reason, [RUN + nearest for nearest in _exported(store, name)])
    if identity := run.stored_identity:
        run.prepare(identity)  # downloads it if another machine has trained it
        run.restore(EXPORT)
        try:
            run_artifacts.refresh(store, EXPORT, name, DigestCache(store.local_cache).sha256)
        except (Corrupted, FileNotFoundError) as error:
            reason = (
                f"the latest export of {name} has not been uploaded completely ({error}); try again later, or start {name} "
                "again where it was exported, which uploads it"
            )
            raise ProfileError(key, source, reason) from error
    return run.location(EXPORT)


def locate_runs(profile: Profile, store: Store, *, required: bool = True) -> Profile:
    """Replace `run:NAME` in init.from and tokenizer.source by the store location of that run's export.

    Args:
        required: whether the export has to exist; one that another machine has made since is downloaded. A round does not read
            it: it has the weights and the tokenizer of its series.

    Raises ProfileError for a run without an export, or whose latest one is not in the store.
    """
    init, tokenizer = profile.init, profile.tokenizer
    if init.from_ and init.from_.startswith(RUN):
        init = init.model_copy(
            update={"from_": locate_export(store, "init.from", init.from_, required=required)}
        )
    if tokenizer.source.startswith(RUN):
        tokenizer = tokenizer.model_copy(
            update={"source": locate_export(store, "tokenizer.source", tokenizer.source, required=required)}
        )
    return profile.model_copy(update={"init": init, "tokenizer": tokenizer})


def _is_export(reference: Reference) -> bool:
    """Whether a reference is to the export of a run, which exists."""
    source = reference.get("weights") or reference.get("tokenizer") or ""
    return Path(source).match(f"runs/*/{EXPORT}") and (
        "://" in source or state_files.exists(Path(source).expanduser())
    )


def _exported(store: Store, name: str) -> list[str]:
    """Names of the runs of a store with an export that are most similar to a name."""
    names = [entry for entry in store.backend.entries("runs") if not entry.startswith(".")]
    names.sort(key=lambda other: SequenceMatcher(None, name, other).ratio(), reverse=True)
    exported = (other for other in names if store.backend.files(f"runs/{other}/{EXPORT}"))
    return list(islice(exported, NEAREST))


def _tokenizer(settings: Tokenizer, token: str | None, pin: Pin) -> dict[str, Any] | None:
    if settings.source == "train":
        return None
    reference = {"tokenizer": settings.source, "revision": settings.revision}

    def find() -> dict[str, Any]:
        if is_folder(settings.source):
            return {"contents": folder_digest(settings.source)}
        commit = resolve_commit(settings.source, settings.revision, token, "tokenizer.source")
        return {"repository": settings.source, "commit": commit}

    found: dict[str, Any] = pin(reference, find)
    return found


def _shards(
    data: Data, text: str, digests: DigestCache, token: str | None, pin: Pin, progress: Progress
) -> Iterator[Shard]:
    for number, source in enumerate(data.sources):
        progress(f"listing source {number + 1} of {len(data.sources)}", number / len(data.sources))
        # Neither the share of samples nor the split changes what a source contains.
        reference = {"source": source.model_dump(mode="json", exclude={"weight", "use"}), "text": text}

        def find_shards(number: int = number, source: Source = source) -> list[dict[str, Any]]:
            found = corpus.shards_of_source(source, f"data.sources.{number}", text, digests, token)
            return [asdict(shard) for shard in found]

        for shard in pin(reference, find_shards):
            yield replace(Shard(**shard), source=number, use=source.use)


def _weights(
    profile: Profile, store: Store, digests: DigestCache, token: str | None, pin: Pin
) -> dict[str, Any] | None:
    source, revision = profile.init.from_, profile.init.revision
    if source is None:
        return None

    def find() -> dict[str, Any]:
        run = _exporter(store, source)
        found = weights.pin(source, revision, token, "init.from", digests)
        if run != _exporter(store, source):
            raise SourceChanged(source)
        return {**found, "run": run} if run else found

    found: dict[str, Any] = pin({"weights": source, "revision": revision}, find)
    return found


def _exporter(store: Store, source: str) -> dict[str, str] | None:
    """Name and identity of the run of a store whose export a path is; None for other sources."""
    path = Path(source).expanduser().absolute()
    folder, runs = path.parent, store.work_dir / "runs"
    if "://" in source or path.name != EXPORT or folder.parent.resolve() != runs.resolve():
        return None
    try:
        run = store.run_folder(folder.name)
    except ValueError:  # not the name of a run
        return None
    identity = run.identity
    return {"name": folder.name, "identity": identity} if identity else None
