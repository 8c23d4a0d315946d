"""Helpers for tests of sources: documents, files that contain them, profiles that name the files."""

import io
import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa

from modeling.data.indexed import IndexedDatasetBuilder
from profiles import resolve
from tasks.sources import corpus
from tasks.sources.digest_cache import DigestCache
from tasks.sources.formats import readers
from tasks.sources.formats.long_text import LongText
from tests.modeling.data.datasets import read_sequences

DOCUMENTS = [f"Document {i} says " + "words and more words. " * (i % 9) for i in range(300)] + ["naïve 日本"]


def profile(*sources, **data):
    """A profile with these sources, each a mapping."""
    overrides = [f"data.{name}={json.dumps(value)}" for name, value in data.items()]
    return resolve.load(
        "tiny",
        [
            f"data.sources={json.dumps(sources)}",
            "tokenizer.vocabulary_size=300",
            "train.sequence_length=16",
            *overrides,
        ],
    )


def files(path, **more):
    return {"kind": "files", "path": str(path), **more}


def lines(documents, column="text"):
    return "".join(json.dumps({"n": 1, column: text}) + "\n" for text in documents).encode()


def zstd(data):
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


def joined(lists):
    return list(chain.from_iterable(lists))


def table(documents=DOCUMENTS):
    return pa.table({"n": [1] * len(documents), "text": documents})


def arrow(path, form):
    with form(str(path), table().schema) as writer:
        writer.write_table(table(), max_chunksize=40)


def arrow_stream(rows=40):
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table().schema) as writer:
        writer.write_table(table(), max_chunksize=rows)
    return out.getvalue()


def list_shards(data, digests=None, token=None):
    """All shards of the sources of a profile's data; without cached digests every file is read."""
    found = []
    for i, source in enumerate(data.sources):
        listed = corpus.shards_of_source(
            source, f"data.sources.{i}", data.text, digests or DigestCache(), token
        )
        found += [replace(shard, source=i, use=source.use) for shard in listed]
    return found


def texts(wanted, token=None):
    """Texts of all shards of a profile, one list per shard."""
    found = []
    for shard in list_shards(wanted.data, token=token):
        documents = readers.documents(shard, token)
        found.append(
            [
                "".join(document.chunks()) if isinstance(document, LongText) else document
                for document in documents
            ]
        )
    return found


def documents_of(artifact, store, split="train"):
    """Token ids of a dataset, document by document."""
    corpus = json.loads((store.artifacts.path(artifact) / "corpus.json").read_text())
    artifacts = store.artifacts.path(artifact).parent.parent
    shards = (read_sequences(artifacts / shard["path"]) for shard in corpus[split])
    return [document.tolist() for shard in shards for document in shard]


def write_pair(prefix, documents):
    with IndexedDatasetBuilder(prefix, np.dtype(np.uint16)) as builder:
        for document in documents:
            builder.add_document(document)
