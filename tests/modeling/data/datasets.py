"""Dataset artifacts of a few tokens, and reading indexed files sequence by sequence."""

import json

import numpy as np

from modeling.data.indexed import Index, IndexedDatasetBuilder, map_tokens, read_header

VOCABULARY = 50_000


def write_dataset(store, tokens, cuts=(), document=7, **fields):
    """A dataset artifact whose shards are `tokens` cut at `cuts`, in documents of `document` tokens.

    `fields` are added to its corpus.json. Returns the artifact's folder.
    """
    shards = []
    for i, part in enumerate(np.split(np.asarray(tokens), cuts)):
        prefix = store / "artifacts" / "tokens" / f"key{i}" / "train"
        prefix.parent.mkdir(parents=True)
        with IndexedDatasetBuilder(prefix, np.dtype(np.uint16)) as builder:
            for at in range(0, len(part), document):
                builder.add_document(part[at : at + document])
        shards.append(
            {"path": f"tokens/key{i}/train", "tokens": len(part), "documents": len(builder.lengths)}
        )
    folder = store / "artifacts" / "dataset" / "key"
    folder.mkdir(parents=True)
    corpus = {
        "format": 1,
        "vocabulary_size": VOCABULARY,
        "eos": 0,
        "train": shards,
        "validation": [],
        **fields,
    }
    (folder / "corpus.json").write_text(json.dumps(corpus))
    return folder


def open_indexed(prefix):
    """The checked index of a `.bin`/`.idx` pair, and its tokens."""
    tokens = map_tokens(prefix, read_header(prefix).dtype)
    return Index(prefix, tokens.nbytes), tokens


def read_sequences(prefix):
    """The sequences of a `.bin`/`.idx` pair, as arrays."""
    index, tokens = open_indexed(prefix)
    starts = index.pointers // index.dtype.itemsize
    return [tokens[start : start + length] for start, length in zip(starts, index.lengths, strict=True)]
