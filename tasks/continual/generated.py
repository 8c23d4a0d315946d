"""Generated replay: text sampled from the promoted model, in place of the data that it was trained on.

The rows of a model are cut into shards, each of which a job on the round's cluster samples and the store keeps. The number of
rows is a power of two, so that a round with a little more new data needs no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modeling.data.indexed import IndexedDatasetBuilder, token_dtype
from modeling.data.replay import HistoryStream
from profiles.files import run_files, state_files
from tasks import keys
from tasks.continual.replay import GENERATED, Entry, History, Part
from tasks.step import Context, Step
from tasks.steps.dataset import read_file
from tasks.steps.jobs import cluster_job, run_job
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import TOKENS

SHARD_ROWS = 4096


@dataclass
class GenerationStep(Step):
    """Samples rows of text from the latest checkpoint of the context's run, as a tokenized shard."""

    model: str  # digest of the weights
    dataset: Artifact  # with the token that begins each text
    first: int
    count: int
    profile_file: Path
    weights: Artifact | None = None  # base weights of LoRA

    kind = TOKENS
    name = "generate"

    def key(self, context: Context) -> str:
        length = context.profile.train.sequence_length
        return keys.generated(self.model, length, self.first, self.count)

    def make(self, context: Context, key: str) -> Artifact:
        """Run the job, and write its rows as documents."""
        output = context.run_folder / run_files.LOGS / f"generated-{key[:16]}.npy"
        job = cluster_job(
            *("sample", context, key, self.dataset, None),
            output=output,
            first=self.first,
            count=self.count,
            profile=self.profile_file,
            weights=self.weights,
        )
        contents = read_file(context.store, self.dataset)
        if not state_files.exists(output):  # left by a job that ended while no flow followed it
            run_job(context.profile, job, output)
        made = publish_rows(context.store, key, np.load(output, allow_pickle=False), contents)
        output.unlink()
        return made

    def describe(self, summary: Mapping[str, Any]) -> str:
        return f"{summary['tokens']:,} tokens sampled"


def publish_rows(store: Store, key: str, rows: np.ndarray, contents: Mapping[str, Any]) -> Artifact:
    """Publish sampled rows of tokens (rows, s) as a tokenized shard of documents.

    Args:
        contents: corpus.json of a dataset of the same tokenizer.
    """
    lengths = document_lengths(rows, contents["eos"])
    summary = {"tokens": rows.size, "documents": len(lengths), "validation_tokens": 0}
    dtype = token_dtype(contents["vocabulary_size"])
    id = ArtifactId(TOKENS, key)
    with (
        store.artifacts.publish(id, summary) as folder,
        IndexedDatasetBuilder(folder / "train", dtype) as builder,
    ):
        builder.add_documents(rows.flatten(), lengths)
    return store.artifacts.expect(id)


def row_count(needed: int, sequence_length: int, most: int | None) -> int:
    """Rows to sample for a number of replayed windows; at most `most` tokens, and at least two rows."""
    rows = 1 << max(1, needed).bit_length()  # a window needs the token after it too
    return max(2, rows if most is None else min(rows, most // sequence_length))


def shards(rows: int) -> list[tuple[int, int]]:
    """First row and number of rows of each shard."""
    return [(first, min(SHARD_ROWS, rows - first)) for first in range(0, rows, SHARD_ROWS)]


def history(model: str, made: list[Artifact], sequence_length: int) -> History:
    """The sampled text as one stream, none of it replayed yet."""
    entries: tuple[Entry, ...] = tuple(
        {"path": f"{TOKENS}/{artifact.key}/train", "start": 0}
        | {name: artifact.summary[name] for name in ("tokens", "documents")}
        for artifact in made
    )
    tokens: int = sum(entry["tokens"] for entry in entries)
    windows = (tokens - 1) // sequence_length
    identity = keys.digest([model, *(artifact.key for artifact in made)])
    seed = int(keys.digest({"replay": identity})[:15], 16)
    stream = HistoryStream(identity, GENERATED, "", None, len(entries), tokens, windows, seed, 0, windows)
    return History((Part(stream, entries),))


def document_lengths(rows: np.ndarray, eos: int | None) -> np.ndarray:
    """Lengths of the documents of rows (rows, s), which end at each EOS token and at the end of a row."""
    ends = np.zeros(rows.shape, bool) if eos is None else rows == eos
    ends[:, -1] = True
    return np.diff(np.flatnonzero(ends.flatten()), prepend=-1).astype(np.int32)
