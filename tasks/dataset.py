"""Dataset step: text to tokens in Megatron's indexed format, a shard at a time, and the corpus that joins the shards.

A shard is an artifact of its own ("tokens"), so that a new file in a growing source tokenizes only itself; the "dataset"
artifact holds corpus.json alone, which counts and points to them. Documents are ended by EOS and none is dropped. A document
is held out for validation by its own hash, so which are never changes when data is added.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from modeling.indexed import IndexedDatasetBuilder, token_dtype
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks import corpora, keys
from tasks import tokenizer as tokenizers
from tasks.artifacts import Artifact, Store
from tasks.corpora import Document, Shard

KIND = "dataset"
TOKENS = "tokens"
BATCH_BYTES = 1 << 20  # of text: enough to keep all cores busy, little enough to keep memory flat
Progress = Callable[[str, float], None]


@dataclass
class Counts:
    """What a shard came to; `missing` are records without text, `bytes` those of all texts in UTF-8."""

    documents: int = 0
    tokens: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    bytes: int = 0
    missing: int = 0


def key(profile: Profile, tokenizer: Artifact) -> str:
    """Cache key of the corpus: of its shards in their order, and of the windows that it is read in."""
    shards = corpora.shards(profile.data)
    return keys.dataset(
        [shard_key(profile, tokenizer, shard) for shard in shards], profile.train.sequence_length
    )


def shard_key(profile: Profile, tokenizer: Artifact, shard: Shard) -> str:
    """Cache key of one tokenized shard."""
    data = profile.data
    return keys.tokens(tokenizer.key, shard.digest(), data.validation_fraction, data.append_eos)


def run(profile: Profile, store: Store, tokenizer: Artifact, progress: Progress | None = None) -> Artifact:
    """Tokenize every shard of the profile's sources that is not in the store yet, and publish the corpus of them.

    Args:
        progress: called with what is being done and the share of the shards that are done, 0 to 1.

    Raises:
        ProfileError: sources without text, or a split that is shorter than one window.
        SourceError: a damaged source file.
    """
    report = progress or (lambda message, fraction: None)
    shards = corpora.shards(profile.data)
    tokens = []
    for i, shard in enumerate(shards):
        done = i / len(shards)
        tokens.append(tokenize(profile, store, tokenizer, shard, lambda text, done=done: report(text, done)))
    return assemble(profile, store, tokenizer, tokens)


def tokenize(
    profile: Profile, store: Store, tokenizer: Artifact, shard: Shard, report: Callable[[str], None]
) -> Artifact:
    """One shard as an artifact with train and validation `.bin`/`.idx`, made by whoever takes its lock first."""
    identity = shard_key(profile, tokenizer, shard)
    with store.lock(TOKENS, identity):
        found = store.find(TOKENS, identity)
        if found:
            return found
        summary: dict[str, int] = {}
        with store.publish(TOKENS, identity, summary) as folder:
            summary.update(vars(_write(profile, store, tokenizer, shard, folder, report)))
    return store.expect(TOKENS, identity)


def assemble(profile: Profile, store: Store, tokenizer: Artifact, tokens: Sequence[Artifact]) -> Artifact:
    """Publish the corpus of these shards. Its summary: Counts of them all, shards and bytes_per_token."""
    total = Counts(*(sum(counts) for counts in zip(*(_counts(shard) for shard in tokens), strict=True)))
    _require_windows(profile, total)
    all_tokens = total.tokens + total.validation_tokens
    summary = {**vars(total), "shards": len(tokens), "bytes_per_token": round(total.bytes / all_tokens, 3)}
    corpus = {
        "format": 1,
        "vocabulary_size": tokenizer.summary["vocabulary_size"],
        "eos": tokenizer.summary["eos"] if profile.data.append_eos else None,
        "sequence_length": profile.train.sequence_length,
        "train": [_entry(shard, "train", "") for shard in tokens],
        "validation": [_entry(shard, "validation", "validation_") for shard in tokens],
    }
    identity = keys.dataset([shard.key for shard in tokens], profile.train.sequence_length)
    requires = [{"kind": TOKENS, "key": shard.key} for shard in tokens]
    with store.lock(KIND, identity):
        found = store.find(KIND, identity)
        if found:
            return found
        with store.publish(KIND, identity, summary, requires) as folder:
            (folder / "corpus.json").write_text(json.dumps(corpus, indent=1))
    return store.expect(KIND, identity)


def _write(
    profile: Profile,
    store: Store,
    tokenizer: Artifact,
    shard: Shard,
    folder: Path,
    report: Callable[[str], None],
) -> Counts:
    """Write one shard's `.bin`/`.idx` pairs into `folder`."""
    encoder = tokenizers.load(store.path(tokenizer))
    end = [tokenizer.summary["eos"]] if profile.data.append_eos else []
    dtype = token_dtype(tokenizer.summary["vocabulary_size"])
    counts = Counts()
    train = IndexedDatasetBuilder(folder / "train", dtype)
    validation = IndexedDatasetBuilder(folder / "validation", dtype)
    with train, validation:
        for texts in _batches(shard.documents(), counts):
            report(f"tokenizing {shard.name}: {train.tokens + validation.tokens:,} tokens")
            # One call tokenizes on all cores.
            for text, encoding in zip(
                texts, encoder.encode_batch_fast(texts, add_special_tokens=False), strict=True
            ):
                held_out = corpora.held_out(text, profile.data.validation_fraction)
                (validation if held_out else train).add_document(encoding.ids + end)
    counts.documents, counts.tokens = len(train.lengths), train.tokens
    counts.validation_documents, counts.validation_tokens = len(validation.lengths), validation.tokens
    return counts


def _batches(documents: Iterable[Document], counts: Counts) -> Iterator[list[str]]:
    """Texts of BATCH_BYTES together, or one that is longer; what has no text is counted and left out."""
    batch, size = [], 0
    for text in documents:
        if text is None:
            counts.missing += 1
            continue
        length = len(text.encode())
        counts.bytes += length
        if batch and size + length > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += length
    if batch:
        yield batch


def _counts(shard: Artifact) -> tuple[int, ...]:
    return tuple(shard.summary[field.name] for field in fields(Counts))


def _entry(shard: Artifact, split: str, prefix: str) -> dict[str, str | int]:
    counts = {name: shard.summary[f"{prefix}{name}"] for name in ("tokens", "documents")}
    return {"path": f"{TOKENS}/{shard.key}/{split}", **counts}


def _require_windows(profile: Profile, total: Counts) -> None:
    """Refuse a corpus that training or evaluation could read nothing from."""
    length, fraction = profile.train.sequence_length, profile.data.validation_fraction
    if total.tokens <= length:
        reason = f"the sources hold {total.tokens} tokens to train on, fewer than one window of {length} + 1"
        raise ProfileError("train.sequence_length", length, reason)
    if fraction and total.validation_tokens <= length:
        reason = f"holds out {total.validation_tokens} tokens, fewer than one window of {length} + 1; hold out more, or 0"
        raise ProfileError("data.validation_fraction", fraction, reason)
