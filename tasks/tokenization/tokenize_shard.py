"""One shard of a plan to tokens, wherever the store can be reached.

    python -m tasks.tokenization --plan FILE --store URI --shard K

A plan says everything that its shards' tokens depend on; what comes out is an artifact of its own, under a key of its own. With
`--serve` the program takes orders ("tokenize 7", "fingerprint 7") from standard input, a line each, and answers in lines of JSON,
until its input ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modeling.data.indexed import IndexedDatasetBuilder, token_dtype
from profiles.errors import ProfileError
from tasks.sources import corpus, duplicates, long_text, megatron, readers
from tasks.sources.columnar import TokenIds
from tasks.sources.long_text import LongText, TextSplitter
from tasks.sources.shard import Shard, SourceError
from tasks.store.artifacts import Artifact
from tasks.store.store import Store
from tasks.tokenization import engines
from tasks.tokenization.dataset_plan import TOKENS, DatasetPlan

BATCH = 1 << 20  # characters: enough to keep an engine busy, little enough to keep memory flat
TELL_SECONDS = 1.0
Report = Callable[[int], None]
log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What a shard came to: `bytes` of the text of kept documents in UTF-8, and the records that were dropped, by reason."""

    documents: int = 0
    tokens: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    bytes: int = 0
    missing: int = 0
    short: int = 0
    duplicates: int = 0


def tokenize(
    plan: DatasetPlan,
    store: Store,
    k: int,
    report: Report | None = None,
    threads: int = 1,
    token: str | None = None,
) -> Artifact:
    """Shard k as an artifact with train and validation `.bin`/`.idx`, made by whoever takes its lock first.

    A pair that is ready-made is checked, and only where its splits lie is noted.

    Args:
        report: called now and then with the tokens made so far.
        threads: that the engine may use.
        token: for the hub.

    Raises:
        SourceError, IndexedError: a damaged source. ProfileError: one without the text field.
    """
    identity, shard = plan.key(k), plan.shards[k]
    with store.artifacts.lock(TOKENS, identity):
        found = store.artifacts.find(TOKENS, identity)
        if found:
            return found
        summary: dict[str, Any] = {}
        with store.artifacts.publish(TOKENS, identity, summary) as folder:
            report = _seldom(report or (lambda tokens: None))
            if shard.format == "megatron":
                size, held_out = plan.tokenizer.summary["vocabulary_size"], plan.validation_fraction
                splits = megatron.check(shard, size, held_out, report)
                summary.update(_pair_counts(splits), pair=splits)
                (folder / "pair.json").write_text(json.dumps(splits))
            else:
                writer = _Writer(plan, store, shard, threads, token)
                summary.update(vars(writer.write(k, folder, report)))
                summary["engine"] = writer.engine and writer.engine.name  # None where there was no text
    made = store.artifacts.expect(TOKENS, identity)
    store.artifacts.evict(made)  # training has it staged when its turn comes
    return made


def _pair_counts(splits: dict[str, dict[str, int]]) -> dict[str, int]:
    train, held_out = splits["train"], splits["validation"]
    return vars(Counts(train["documents"], train["tokens"], held_out["documents"], held_out["tokens"]))


class _Writer:
    """Writes one shard's pairs."""

    def __init__(
        self, plan: DatasetPlan, store: Store, shard: Shard, threads: int, token: str | None
    ) -> None:
        self.plan, self.shard, self.store = plan, shard, store
        self.threads, self.token = threads, token
        self.tokenizer = engines.load(store.artifacts.path(plan.tokenizer))
        facts = plan.tokenizer.summary
        self.vocabulary_size = facts["vocabulary_size"]
        self.begin = [facts["bos"]] if plan.prepend_bos else []
        self.end = [facts["eos"]] if plan.append_eos else []
        self.engine: engines.Engine | None = None

    def write(self, k: int, folder: Path, report: Report) -> Counts:
        dropped = duplicates.dropped_documents(self.plan, self.store, k)
        try:
            return self._write(folder, report, dropped)
        except engines.Disagreement as error:
            log.info("%s: %s; it is tokenized again with tokenizers", self.shard.name, error)
            self.engine = engines.General(self.tokenizer)
            return self._write(folder, report, dropped)

    def _write(self, folder: Path, report: Report, dropped: set[int]) -> Counts:
        dtype = token_dtype(self.vocabulary_size)
        self.counts = Counts()
        self.train = IndexedDatasetBuilder(folder / "train", dtype)
        self.validation = IndexedDatasetBuilder(folder / "validation", dtype)
        with self.train, self.validation:
            for batch in self._batches(dropped):
                if isinstance(batch, LongText):
                    self._add_long(batch)
                elif isinstance(batch, TokenIds):
                    self._add_ids(batch)
                else:
                    self._add(batch)
                report(self.train.tokens + self.validation.tokens)
        self.counts.documents, self.counts.tokens = len(self.train.lengths), self.train.tokens
        self.counts.validation_documents = len(self.validation.lengths)
        self.counts.validation_tokens = self.validation.tokens
        return self.counts

    def _batches(self, dropped: set[int]) -> Iterator[list[str] | LongText | TokenIds]:
        """Texts of about BATCH characters together; what is longer, or has tokens already, by itself."""
        batch: list[str] = []
        size = 0
        for number, document in enumerate(readers.documents(self.shard, self.token)):
            if document is None:
                self.counts.missing += 1
            elif number in dropped:
                self.counts.duplicates += 1
            elif isinstance(document, str) and len(document) < self.plan.minimum_length:
                self.counts.short += 1
            elif isinstance(document, str) and len(document) <= BATCH:
                if size + len(document) > BATCH:
                    yield batch
                    batch, size = [], 0
                batch.append(document)
                size += len(document)
            else:
                if batch:  # documents stay in their order
                    yield batch
                    batch, size = [], 0
                yield long_text.of_text(document) if isinstance(document, str) else document
        if batch:
            yield batch

    def _encode(self, texts: Sequence[str]) -> engines.Encoded:
        if self.engine is None:
            self.engine = engines.choose(self.tokenizer, _sample(texts), self.threads)
        return self.engine.encode(texts)

    def _add(self, texts: list[str]) -> None:
        held_out = np.empty(len(texts), bool)
        for i, text in enumerate(texts):
            data = text.encode()
            self.counts.bytes += len(data)
            held_out[i] = self._held_out(hashlib.sha256(data).digest())
        ids, lengths = _wrapped(*self._encode(texts), self.begin, self.end)
        where = np.repeat(held_out, lengths)
        self.train.add_documents(ids[~where], lengths[~held_out])
        self.validation.add_documents(ids[where], lengths[held_out])

    def _add_long(self, text: LongText) -> None:
        digest = hashlib.sha256()
        for chunk in text.chunks():
            data = chunk.encode()
            digest.update(data)
            self.counts.bytes += len(data)
        builder = self.validation if self._held_out(digest.digest()) else self.train
        before = builder.tokens
        builder.extend(np.array(self.begin, np.int64))
        for piece in TextSplitter(self.tokenizer).split(text):
            builder.extend(self._encode([piece])[0])
        builder.extend(np.array(self.end, np.int64))
        builder.end_document(builder.tokens - before)

    def _add_ids(self, document: TokenIds) -> None:
        """A document that has its tokens already: as it is, with neither BOS nor EOS added."""
        ids = document.values
        wrong = (ids < 0) | (ids >= self.vocabulary_size)
        if wrong.any():
            reason = f"token {ids[wrong.argmax()]} is not in the vocabulary of {self.vocabulary_size}"
            raise SourceError(f"{document.locate()}, token {wrong.argmax()}: {reason}")
        digest = hashlib.sha256(ids.astype("<i8").tobytes()).digest()
        (self.validation if self._held_out(digest) else self.train).add_document(ids)

    def _held_out(self, digest: bytes) -> bool:
        if self.shard.use != "split":
            return self.shard.use == "validation"
        return corpus.is_digest_held_out(digest, self.plan.validation_fraction)


def _wrapped(ids: np.ndarray, lengths: np.ndarray, begin: list[int], end: list[int]) -> engines.Encoded:
    """The documents with ids before and after each."""
    if not begin and not end:
        return ids, lengths
    more = len(begin) + len(end)
    longer = lengths + more
    out = np.empty(len(ids) + more * len(lengths), ids.dtype)
    stops = np.cumsum(longer)
    own = np.arange(len(ids)) + np.repeat(np.arange(len(lengths)) * more + len(begin), lengths)
    out[own] = ids
    for i, token in enumerate(begin):
        out[stops - longer + i] = token
    for i, token in enumerate(reversed(end), 1):
        out[stops - i] = token
    return out, longer


def _sample(texts: Sequence[str]) -> list[str]:
    """The first texts, of engines.SAMPLE characters at most."""
    sample, room = [], engines.SAMPLE
    for text in texts:
        sample.append(text[:room])
        room -= len(text)
        if room <= 0:
            break
    return sample


def _seldom(report: Report) -> Report:
    told = time.monotonic()

    def tell(tokens: int) -> None:
        nonlocal told
        if time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            report(tokens)

    return tell


ORDERS = {"tokenize": tokenize, "fingerprint": duplicates.fingerprint}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tasks.tokenization.tokenize_shard")
    parser.add_argument("--plan", type=Path, required=True, help="file of a plan")
    parser.add_argument("--store", required=True, help="folder or s3:// prefix")
    parser.add_argument("--work-dir", default="store", help="local folder, where the store is on S3")
    parser.add_argument("--threads", type=int, default=1, help="that tokenizing may use")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shard", type=int, help="number of the shard, from 0")
    what.add_argument("--serve", action="store_true", help="take orders from standard input")
    parser.add_argument("--order", choices=ORDERS, default="tokenize", help="what is done with the shard")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # All that rayon, in which both engines are written, can be told by.
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if options.threads > 1 else "false"
    plan = DatasetPlan.from_json(json.loads(options.plan.read_text()))
    store = Store(options.store, options.work_dir)
    if options.serve:
        logging.getLogger().addHandler(_Said())
        for line in sys.stdin:
            order, _, number = line.partition(" ")
            _answer(_obeyed(order, plan, store, int(number), options.threads))
        return 0
    try:
        do = ORDERS[options.order]
        artifact = do(plan, store, options.shard, lambda n: log.info("%d tokens", n), options.threads)
    except ValueError as error:
        print(f"trainshed: {error}", file=sys.stderr)
        return 2
    print(json.dumps(artifact.to_json()))
    return 0


def _obeyed(order: str, plan: DatasetPlan, store: Store, k: int, threads: int) -> dict[str, Any]:
    def tell(tokens: int) -> None:
        _answer({"tokens": tokens})

    try:
        return {"done": ORDERS[order](plan, store, k, tell, threads).to_json()}
    except ProfileError as error:
        return {"refused": [error.key, error.value, error.reason, list(error.choices)]}
    except ValueError as error:
        return {"damaged": str(error)}
    except Exception as error:
        log.exception("shard %d", k)
        return {"failed": f"{type(error).__name__}: {error}"}


class _Said(logging.Handler):
    """What our own modules log, as answers: standard error is read only where a worker dies."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in ("tasks", "modeling", "__main__") and not record.exc_info:
            _answer({"log": [record.levelno, record.getMessage()]})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
