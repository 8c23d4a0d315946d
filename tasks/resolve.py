"""Pins every mutable reference of a profile: hub revisions, lists of files and their digests.

Each reference is a question whose answer is stored in the run's lock, `<run>/lock.json`. A run that is started again reads its
answers from there: it needs no network, and a new commit on the hub or a new file in a folder does not affect it. If the profile
has changed, only new questions are asked; `--update` asks all of them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from profiles.check import RUN
from profiles.errors import ProfileError
from profiles.huggingface.hub import resolve_commit
from profiles.schema import Data, Profile, Source, Tokenizer
from tasks import keys
from tasks.sources import corpus, weights
from tasks.sources.digest_cache import DigestCache
from tasks.sources.shard import Shard
from tasks.store.store import Store
from tasks.tokenization.tokenizer_fetch import folder_digest, is_folder

FORMAT = 1
EXPORT = "export"  # the part of a run that `run:NAME` refers to
Question = Mapping[str, Any]
Ask = Callable[[Question, Callable[[], Any]], Any]
Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class RunLock:
    """Answers by the digest of their questions, each with the question and the time when it was asked."""

    answers: Mapping[str, Mapping[str, Any]]

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, "answers": dict(self.answers)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Parse a lock. Raises ValueError, which names the file, if it is corrupted or from another version."""
        try:
            value = json.loads(data)
            if value["format"] != FORMAT:
                raise ValueError(f"format {value['format']} is unknown")
            return cls(value["answers"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{name}: not a run lock: {error}; --update resolves the run's inputs again"
            ) from None


@dataclass(frozen=True)
class Inputs:
    """What a run is made from, each part pinned to its contents."""

    tokenizer: Mapping[str, Any] | None  # contents or commit; None: trained on the text of the sources
    shards: tuple[Shard, ...]  # of all sources, in order
    weights: Mapping[str, Any] | None  # digest and, if they are on the hub, commit; None: from scratch
    lock: RunLock

    @property
    def since(self) -> str:
        """Time of the oldest answer, in UTC; empty without answers."""
        return min((answer["resolved"] for answer in self.lock.answers.values()), default="")


def resolve(
    profile: Profile,
    store: Store,
    token: str | None = None,
    lock: RunLock | None = None,
    progress: Progress = lambda message, fraction: None,
) -> Inputs:
    """Resolve a profile's tokenizer, sources and initial weights.

    Args:
        token: for the hub; None: the environment's.
        lock: answers to reuse; None asks all questions.

    Raises:
        ProfileError: a reference to something that does not exist.
        SourceError: a corrupted source file.
    """
    answers: dict[str, Mapping[str, Any]] = {}
    known = lock.answers if lock else {}
    digests = DigestCache(store.local_cache)

    def ask(question: Question, find_out: Callable[[], Any]) -> Any:
        digest = keys.digest(question)
        if digest not in answers:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            answers[digest] = known.get(digest) or {
                "question": question,
                "resolved": now,
                "answer": find_out(),
            }
        return answers[digest]["answer"]

    progress("resolving the tokenizer", None)
    tokenizer = _tokenizer(profile.tokenizer, token, ask)
    # An objective other than pretraining reads records with all their fields, so no field is the text.
    text = profile.data.text if profile.objective.kind == "pretrain" else ""
    shards = tuple(_shards(profile.data, text, digests, token, ask, progress))
    progress("resolving the initial weights", None)
    initial = _weights(profile, digests, token, ask)
    return Inputs(tokenizer, shards, initial, RunLock(answers))


def locate_runs(profile: Profile, store: Store) -> Profile:
    """Replace `run:NAME` in init.from and tokenizer.source by the store location of that run's export.

    Raises ProfileError for a run without an export.
    """

    def export(key: str, source: str) -> str:
        name = source.removeprefix(RUN)
        try:
            run = store.run_folder(name)
        except ValueError as error:
            raise ProfileError(key, source, str(error)) from error
        if not run.files(EXPORT):
            reason = f"the store {store.uri} has no finished run {name}; train it first: trainshed run {name}"
            raise ProfileError(key, source, reason)
        return run.location(EXPORT)

    init, tokenizer = profile.init, profile.tokenizer
    if init.from_ and init.from_.startswith(RUN):
        init = init.model_copy(update={"from_": export("init.from", init.from_)})
    if tokenizer.source.startswith(RUN):
        tokenizer = tokenizer.model_copy(update={"source": export("tokenizer.source", tokenizer.source)})
    return profile.model_copy(update={"init": init, "tokenizer": tokenizer})


def _tokenizer(settings: Tokenizer, token: str | None, ask: Ask) -> dict[str, Any] | None:
    if settings.source == "train":
        return None
    question = {"tokenizer": settings.source, "revision": settings.revision}
    if is_folder(settings.source):
        return ask(question, lambda: {"contents": folder_digest(settings.source)})

    def find_commit() -> dict[str, Any]:
        commit = resolve_commit(settings.source, settings.revision, token, "tokenizer.source")
        return {"repository": settings.source, "commit": commit}

    return ask(question, find_commit)


def _shards(
    data: Data, text: str, digests: DigestCache, token: str | None, ask: Ask, progress: Progress
) -> Iterator[Shard]:
    for number, source in enumerate(data.sources):
        progress(f"listing source {number + 1} of {len(data.sources)}", number / len(data.sources))
        # Neither the share of samples nor the split changes what a source contains.
        question = {"source": source.model_dump(mode="json", exclude={"weight", "use"}), "text": text}

        def find_shards(number: int = number, source: Source = source) -> list[dict[str, Any]]:
            found = corpus.shards_of_source(source, f"data.sources.{number}", text, digests, token)
            return [asdict(shard) for shard in found]

        for shard in ask(question, find_shards):
            yield replace(Shard.from_json(shard), source=number, use=source.use)


def _weights(profile: Profile, digests: DigestCache, token: str | None, ask: Ask) -> dict[str, Any] | None:
    init = profile.init
    if init.from_ is None:
        return None
    question = {"weights": init.from_, "revision": init.revision}
    return ask(question, lambda: weights.pin(init.from_, init.revision, token, "init.from", digests))
