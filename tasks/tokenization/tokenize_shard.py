"""Tokenizes one shard of a dataset plan into indexed token files, wherever the store can be reached."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modeling.data.indexed import MAX_LENGTH, IndexedDatasetBuilder, token_dtype
from modeling.data.records import RECORD_DTYPE
from profiles.errors import counted
from tasks.sources import corpus, duplicates, megatron
from tasks.sources.formats import long_text, readers, records
from tasks.sources.formats.columnar import TokenIds
from tasks.sources.formats.long_text import LongText, TextSplitter
from tasks.sources.shard import SourceError
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store
from tasks.tokenization import engines
from tasks.tokenization.chat_templates import TemplateFailed
from tasks.tokenization.conversations import UnusableRecord
from tasks.tokenization.dataset_plan import TOKENS, DatasetPlan
from tasks.tokenization.examples import Examples, RecordOptions

BATCH_CHARACTERS = 1 << 20  # keeps an engine busy at constant memory
REPORT_SECONDS = 1.0
SPLITS = ("train", "validation")
Report = Callable[[int], None]
log = logging.getLogger(__name__)


@dataclass
class Counts:
    """Contents of a tokenized shard, and the records that were dropped, by reason."""

    documents: int = 0
    tokens: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    bytes: int = 0  # UTF-8 bytes of the text of all documents that were not dropped
    missing: int = 0  # records without text, or without what the objective trains on
    short: int = 0  # documents with fewer than `minimum_length` characters
    duplicates: int = 0
    truncated: int = 0  # records that were cut to the sequence length
    too_long: int = 0  # records that were dropped because they, or their prompts, are longer
    endless: int = 0  # records in which the loss leaves out the token that ends an answer

    def set_splits(self, train: IndexedDatasetBuilder, validation: IndexedDatasetBuilder) -> None:
        """Set the counts of documents and tokens from the files that were written."""
        self.documents, self.tokens = len(train.lengths), train.tokens
        self.validation_documents, self.validation_tokens = len(validation.lengths), validation.tokens


def tokenize(
    plan: DatasetPlan,
    store: Store,
    k: int,
    report: Report = lambda tokens: None,
    threads: int = 1,
    token: str | None = None,
) -> Artifact:
    """Tokenize shard k, unless it is in the store, into train and validation `.bin`/`.idx` pairs.

    Holds the artifact's lock, so concurrent callers tokenize a shard once. A Megatron pair is used in place: it is checked,
    and pair.json records the positions of its splits.

    Args:
        report: called about once a second with the number of tokens so far.

    Raises:
        SourceError, IndexedError: the source is corrupted.
        ProfileError: the source lacks the text column.
    """
    id, shard = ArtifactId(TOKENS, plan.key(k)), plan.shards[k]
    with store.artifacts.lock(id):
        if found := store.artifacts.find(id):
            return found
        summary: dict[str, Any] = {}
        with store.artifacts.publish(id, summary) as folder:
            report = _throttled(report)
            if shard.format == "megatron":
                size, fraction = plan.tokenizer.summary["vocabulary_size"], plan.validation_fraction
                splits = megatron.check(shard, size, fraction, report)
                numbers = (splits[split][name] for split in SPLITS for name in ("documents", "tokens"))
                summary.update(vars(Counts(*numbers)), pair=splits)
                (folder / "pair.json").write_text(json.dumps(splits))
            elif plan.records:
                counts, unusable, unused = _tokenize_records(plan, store, k, folder, report, token)
                summary.update(vars(counts), unusable=unusable, unused=unused)
            else:
                tokenizer = _ShardTokenizer(plan, store, k, threads, token)
                summary.update(vars(tokenizer.write(folder, report)))
                summary["engine"] = tokenizer.engine and tokenizer.engine.name  # None without text
    artifact = store.artifacts.expect(id)
    store.artifacts.evict(artifact)  # training downloads it when it needs it
    return artifact


def _tokenize_records(
    plan: DatasetPlan, store: Store, k: int, folder: Path, report: Report, token: str | None
) -> tuple[Counts, str, dict[str, int]]:
    """Write records, one document per sequence.

    Returns the counts, the first unusable record's defect, and how many records have each field that is not used.
    """
    shard, summary, counts = plan.shards[k], plan.tokenizer.summary, Counts()
    bos, eos = (
        [summary[name]] if given else []
        for name, given in (("bos", plan.prepend_bos), ("eos", plan.append_eos))
    )
    assert plan.records is not None
    examples = Examples(store.artifacts.path(plan.tokenizer), RecordOptions(**plan.records), bos, eos)
    train, validation = (IndexedDatasetBuilder(folder / split, RECORD_DTYPE) for split in SPLITS)
    reason = ""
    with train, validation:
        for record, locate in records.records(shard, token):
            try:
                example = examples.of(record)
            except (UnusableRecord, TemplateFailed) as error:
                counts.missing += 1
                if not reason:
                    reason, first = str(error), locate()
                continue
            counts.truncated += example.truncated and bool(example.sequences)
            counts.too_long += not example.sequences
            counts.bytes += example.bytes
            held_out = shard.use == "validation"
            if shard.use == "split":
                text = json.dumps(record, sort_keys=True, default=str)
                held_out = corpus.is_held_out(text, plan.validation_fraction)
            for sequence in example.sequences:
                (validation if held_out else train).add_document(sequence)
            report(train.tokens + validation.tokens)
    if k == 0 and (unknown := examples.unknown_markers()):
        message = "the tokenizer has no token for the chat template's %s; each is split into several"
        log.warning(message, ", ".join(unknown))
    if k == 0 and examples.unused:
        names = ", ".join(
            f"{name} ({counted(count, 'record')})" for name, count in examples.unused.most_common()
        )
        log.warning("%s: fields that are not used: %s", shard.name, names)
    if examples.endless:
        counts.endless = examples.endless
        log.warning(
            "%s: in %s, the loss leaves out the token that ends an answer: the model does not learn to stop; let the "
            "chat template end each answer with a special token, inside its {%% generation %%} marks if it has any",
            shard.name,
            counted(counts.endless, "record"),
        )
    if counts.missing:
        unusable = f"{counted(counts.missing, 'record')} cannot be used; the first, {first}: {reason}"
        log.warning("%s: %s", shard.name, unusable)
    counts.set_splits(train, validation)
    return counts, reason, dict(examples.unused)


class _ShardTokenizer:
    """Writes the train and validation pairs of one shard."""

    def __init__(self, plan: DatasetPlan, store: Store, k: int, threads: int, token: str | None) -> None:
        self.plan, self.shard, self.threads, self.token = plan, plan.shards[k], threads, token
        self.dropped = duplicates.dropped_documents(plan, store, k)
        self.tokenizer = engines.load_tokenizer(store.artifacts.path(plan.tokenizer))
        summary = plan.tokenizer.summary
        self.vocabulary_size = summary["vocabulary_size"]
        self.bos = [summary["bos"]] if plan.prepend_bos else []
        self.eos = [summary["eos"]] if plan.append_eos else []
        self.engine: engines.Engine | None = None

    def write(self, folder: Path, report: Report) -> Counts:
        try:
            return self._write(folder, report)
        except engines.EngineMismatch as error:
            log.info("%s: %s; tokenizing it again with tokenizers", self.shard.name, error)
            self.engine = engines.HuggingFaceEngine(self.tokenizer)
            return self._write(folder, report)

    def _write(self, folder: Path, report: Report) -> Counts:
        dtype = token_dtype(self.vocabulary_size)
        self.counts = Counts()
        self.train = IndexedDatasetBuilder(folder / "train", dtype)
        self.validation = IndexedDatasetBuilder(folder / "validation", dtype)
        with self.train, self.validation:
            for batch in self._batches():
                if isinstance(batch, LongText):
                    self._add_long_text(batch)
                elif isinstance(batch, TokenIds):
                    self._add_ids(batch)
                else:
                    self._add_texts(batch)
                report(self.train.tokens + self.validation.tokens)
        self.counts.set_splits(self.train, self.validation)
        return self.counts

    def _batches(self) -> Iterator[list[str] | LongText | TokenIds]:
        """Batches of up to BATCH_CHARACTERS in document order; long texts and tokenized documents one by one."""
        batch: list[str] = []
        size = 0
        dropped = iter(self.dropped)
        next_dropped = next(dropped, None)
        for number, document in enumerate(readers.documents(self.shard, self.token)):
            if document is None:
                self.counts.missing += 1
            elif number == next_dropped:
                self.counts.duplicates += 1
                next_dropped = next(dropped, None)
            elif isinstance(document, str) and len(document) < self.plan.minimum_length:
                self.counts.short += 1
            elif isinstance(document, str) and len(document) <= BATCH_CHARACTERS:
                if size + len(document) > BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
                batch.append(document)
                size += len(document)
            else:
                if batch:
                    yield batch
                    batch, size = [], 0
                yield long_text.of_text(document) if isinstance(document, str) else document
        if batch:
            yield batch

    def _encode(self, texts: Sequence[str]) -> engines.Encoded:
        if self.engine is None:
            self.engine = engines.choose_engine(self.tokenizer, _sample(texts), self.threads)
        return self.engine.encode(texts)

    def _add_texts(self, texts: list[str]) -> None:
        held_out = np.empty(len(texts), bool)
        for i, text in enumerate(texts):
            data = text.encode()
            self.counts.bytes += len(data)
            held_out[i] = self._is_held_out(hashlib.sha256(data).digest())
        ids, lengths = _add_bos_and_eos(*self._encode(texts), self.bos, self.eos)
        in_validation = np.repeat(held_out, lengths)
        self.train.add_documents(ids[~in_validation], lengths[~held_out])
        self.validation.add_documents(ids[in_validation], lengths[held_out])

    def _add_long_text(self, text: LongText) -> None:
        digest = hashlib.sha256()
        for chunk in text.chunks():
            data = chunk.encode()
            digest.update(data)
            self.counts.bytes += len(data)
        builder = self.validation if self._is_held_out(digest.digest()) else self.train
        before = builder.tokens
        builder.extend(np.array(self.bos, np.int64))
        for segment in TextSplitter(self.tokenizer).split(text):
            builder.extend(self._encode([segment])[0])
            if builder.tokens - before > MAX_LENGTH - len(self.eos):
                reason = f"a document has more than {MAX_LENGTH:,} tokens; split it, or read its lines as documents (lines: true)"
                raise SourceError(f"{self.shard.name}: {reason}")
        builder.extend(np.array(self.eos, np.int64))
        builder.end_document(builder.tokens - before)

    def _add_ids(self, document: TokenIds) -> None:
        """Add a document that the source holds as token ids, without adding BOS or EOS."""
        ids = document.values
        invalid = (ids < 0) | (ids >= self.vocabulary_size)
        if invalid.any():
            reason = f"token {ids[invalid.argmax()]} is not in the vocabulary of {self.vocabulary_size}"
            raise SourceError(f"{document.locate()}, token {invalid.argmax()}: {reason}")
        digest = hashlib.sha256(ids.astype("<i8").tobytes()).digest()
        (self.validation if self._is_held_out(digest) else self.train).add_document(ids)

    def _is_held_out(self, digest: bytes) -> bool:
        if self.shard.use != "split":
            return self.shard.use == "validation"
        return corpus.is_digest_held_out(digest, self.plan.validation_fraction)


def _add_bos_and_eos(ids: np.ndarray, lengths: np.ndarray, bos: list[int], eos: list[int]) -> engines.Encoded:
    """Insert BOS before and EOS after each document."""
    if not bos and not eos:
        return ids, lengths
    added = len(bos) + len(eos)
    new_lengths = lengths + added
    result = np.empty(len(ids) + added * len(lengths), ids.dtype)
    ends = np.cumsum(new_lengths)
    positions = np.arange(len(ids)) + np.repeat(np.arange(len(lengths)) * added + len(bos), lengths)
    result[positions] = ids
    for i, token in enumerate(bos):
        result[ends - new_lengths + i] = token
    for i, token in enumerate(reversed(eos), 1):
        result[ends - i] = token
    return result, new_lengths


def _sample(texts: Sequence[str]) -> list[str]:
    """The first texts, cut to engines.SAMPLE_CHARACTERS in total."""
    sample, room = [], engines.SAMPLE_CHARACTERS
    for text in texts:
        sample.append(text[:room])
        room -= len(text)
        if room <= 0:
            break
    return sample


def _throttled(report: Report) -> Report:
    """Call `report` at most every REPORT_SECONDS."""
    last = time.monotonic()

    def throttled(tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            report(tokens)

    return throttled
