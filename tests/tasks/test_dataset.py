"""From text to a corpus: every document, once, in the tokens of its tokenizer; damaged sources are refused by name."""

import gzip
import json
from contextlib import nullcontext
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from modeling.data.corpus import Corpus
from profiles import resolve
from profiles.errors import ProfileError
from tasks.dataset import DatasetStep
from tasks.sources import corpus as corpora
from tasks.sources import python_docs
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.store.store import Store
from tasks.tokenization import tokenize_shard, tokenizer_files
from tasks.tokenizer import TokenizerStep
from tests import s3
from tests.modeling.data.datasets import read_sequences

DOCUMENTS = [f"Document {i} " + "says words and more words. " * (i % 7) for i in range(200)] + [
    "",
    "naïve 日本",
]


def write(path, documents=DOCUMENTS, column="text"):
    """Documents in the format of the path's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({column: text, "n": 1}) + "\n" for text in documents).encode()
    if path.name.endswith(".parquet"):
        parquet.write_table(pa.table({"n": [1] * len(documents), column: documents}), path, row_group_size=50)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    else:
        path.write_bytes(lines)
    return path


def profile(path, *overrides):
    """A profile that trains its tokenizer and model on files."""
    own = [
        f"data.sources=[{{kind: files, path: '{path}'}}]",
        "tokenizer.vocabulary_size=300",
        "train.sequence_length=16",
    ]
    return resolve.load("tiny", [*own, "data.validation_fraction=0.1", *overrides])


def make(profile, store, **more):
    context = Context(profile, store, **more)
    return DatasetStep(TokenizerStep().run(context)).run(context)


def documents_of(artifact, store, split):
    """Token lists of a corpus, document by document."""
    corpus = json.loads((store.artifacts.path(artifact) / "corpus.json").read_text())
    artifacts = store.artifacts.path(artifact).parent.parent
    return [
        document.tolist() for shard in corpus[split] for document in read_sequences(artifacts / shard["path"])
    ]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_every_document_is_there_once_in_order_and_ended(store, tmp_path, ending):
    wanted = profile(write(tmp_path / f"source/a.{ending}"))
    tokens = TokenizerStep().run(Context(wanted, store))
    artifact = DatasetStep(tokens).run(Context(wanted, store))
    encoder, eos = tokenizer_files.load(store.artifacts.path(tokens)), tokens.summary["eos"]
    for split, held_out in ("train", False), ("validation", True):
        texts = [text for text in DOCUMENTS if corpora.is_held_out(text, 0.1) is held_out]
        assert documents_of(artifact, store, split) == [[*encoder.encode(text).ids, eos] for text in texts]
    summary = artifact.summary
    assert summary["documents"] + summary["validation_documents"] == len(DOCUMENTS)
    assert summary["missing"] == 0
    assert summary["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)
    assert 5 < summary["validation_documents"] < 40


def test_the_corpus_reads_what_was_written(store, tmp_path):
    write(tmp_path / "source/a.jsonl", DOCUMENTS[:90])
    write(tmp_path / "source/b.jsonl", DOCUMENTS[90:])
    artifact = make(profile(tmp_path / "source/*.jsonl"), store)
    for split in "train", "validation":
        corpus = Corpus.open(store.artifacts.path(artifact), split)
        flat = np.concatenate(documents_of(artifact, store, split))
        assert np.array_equal(corpus.read(0, corpus.tokens), flat)
    assert artifact.summary["shards"] == 2


def test_plain_text_is_a_document_a_file(store, tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(DOCUMENTS[i])
    artifact = make(profile(tmp_path / "*.txt"), store)
    assert artifact.summary["documents"] + artifact.summary["validation_documents"] == 40


def test_without_eos_documents_are_joined_as_they_are(store, tmp_path):
    wanted = profile(write(tmp_path / "a.jsonl"), "data.append_eos=false")
    tokens = TokenizerStep().run(Context(wanted, store))
    documents = documents_of(DatasetStep(tokens).run(Context(wanted, store)), store, "train")
    assert not any(tokens.summary["eos"] in document for document in documents)
    assert [] in documents


def test_a_new_file_tokenizes_only_itself_and_moves_no_document_to_another_split(store, tmp_path):
    write(tmp_path / "source/a.jsonl", DOCUMENTS[:100])
    wanted = profile(tmp_path / "source/*.jsonl")
    tokens = TokenizerStep().run(Context(wanted, store))
    first = DatasetStep(tokens).run(Context(wanted, store))
    write(tmp_path / "source/b.jsonl", DOCUMENTS[100:])
    messages = []
    second = DatasetStep(tokens).run(
        Context(wanted, store, progress=lambda message, _: messages.append(message))
    )
    assert first.key != second.key
    assert any("b.jsonl" in message for message in messages)
    assert not any("a.jsonl" in message for message in messages)
    before, after = (documents_of(artifact, store, "validation") for artifact in (first, second))
    assert after[: len(before)] == before


def test_a_damaged_shard_is_made_again_and_only_that(store, tmp_path):
    write(tmp_path / "source/a.jsonl", DOCUMENTS[:100])
    write(tmp_path / "source/b.jsonl", DOCUMENTS[100:])
    wanted = profile(tmp_path / "source/*.jsonl")
    tokens = TokenizerStep().run(Context(wanted, store))
    artifact = DatasetStep(tokens).run(Context(wanted, store))
    before = documents_of(artifact, store, "train")
    shard = json.loads((store.artifacts.path(artifact) / "corpus.json").read_text())["train"][0]["path"]
    path = tmp_path / f"store/artifacts/{shard}.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert store.artifacts.find(DatasetStep.kind, artifact.key) is None
    messages = []
    again = DatasetStep(tokens).run(
        Context(wanted, store, progress=lambda message, _: messages.append(message))
    )
    assert again == artifact
    assert documents_of(again, store, "train") == before
    assert all("a.jsonl" in message for message in messages)
    assert messages


def test_sequence_length_makes_another_corpus_of_the_same_tokens(store, tmp_path):
    write(tmp_path / "a.jsonl")
    short, long = profile(tmp_path / "a.jsonl"), profile(tmp_path / "a.jsonl", "train.sequence_length=32")
    tokens = TokenizerStep().run(Context(short, store))
    assert DatasetStep(tokens).key(Context(short, store)) != DatasetStep(tokens).key(Context(long, store))
    DatasetStep(tokens).run(Context(short, store))
    messages = []
    DatasetStep(tokens).run(Context(long, store, progress=lambda message, _: messages.append(message)))
    assert not any("a.jsonl" in message for message in messages)


def test_keys_are_of_contents_not_of_names(store, tmp_path):
    path = write(tmp_path / "a.jsonl")
    wanted = profile(path)
    tokens = TokenizerStep().run(Context(wanted, store))
    before = DatasetStep(tokens).key(Context(wanted, store))
    renamed = profile(path.rename(tmp_path / "b.jsonl"))
    assert DatasetStep(tokens).key(Context(renamed, store)) == before
    write(tmp_path / "b.jsonl", DOCUMENTS[:-1])
    assert DatasetStep(tokens).key(Context(renamed, store)) != before


def test_records_without_text_are_counted(store, tmp_path):
    path = write(tmp_path / "a.jsonl")
    with path.open("a") as file:
        file.write('{"n": 1}\n\n{"text": null}\n{"text": 7}\n')
    artifact = make(profile(path), store)
    assert artifact.summary["missing"] == 3
    assert artifact.summary["documents"] + artifact.summary["validation_documents"] == len(DOCUMENTS)


def test_a_long_document_and_many_batches_change_nothing(store, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [*DOCUMENTS, DOCUMENTS[6] * 400])
    wanted = profile(path)
    tokens = TokenizerStep().run(Context(wanted, store))
    whole = documents_of(DatasetStep(tokens).run(Context(wanted, store)), store, "train")
    monkeypatch.setattr(tokenize_shard, "BATCH_CHARACTERS", 500)
    other = Store(str(tmp_path / "other"))
    assert documents_of(make(wanted, other), other, "train") == whole


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_missing_text_column_is_refused_with_those_there_are(store, tmp_path, ending):
    write(tmp_path / f"a.{ending}", column="content")
    with pytest.raises(ProfileError, match=r"data\.text = text: .*no such column; nearest valid: .*content"):
        make(profile(tmp_path / f"a.{ending}"), store)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl, line 2: invalid JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a\.jsonl, line 2: not a JSON object"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: invalid JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-4], r"a\.jsonl\.gz, after line 1: corrupted gzip"),
        ("a.jsonl.gz", b'{"text": "a"}\n', r"a\.jsonl\.gz, after line 0: corrupted gzip"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet, footer: corrupted parquet"),
        ("a.txt", b"good \xff", r"a\.txt, byte 5: not UTF-8"),
    ],
)
def test_damaged_source_is_refused_by_file_and_place_and_leaves_nothing(
    store, tmp_path, name, content, message
):
    good = profile(write(tmp_path / "good.jsonl"))
    tokens = TokenizerStep().run(Context(good, store))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        DatasetStep(tokens).run(Context(profile(tmp_path / name), store))
    assert not list((store.artifacts.path(tokens).parent.parent / "tokens").glob("*/train.bin"))


def test_source_that_lists_nothing_is_refused(store, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProfileError, match=r"data\.sources\.0\.path = .*: no file matches"):
        corpora.shards(profile(tmp_path / "empty/*.jsonl").data)


def test_file_of_no_known_format_is_refused_with_those_known(tmp_path):
    (tmp_path / "a.docx").write_bytes(b"")
    with pytest.raises(ProfileError, match=r"a\.docx has an unknown format.*\.jsonl.*\.parquet"):
        corpora.shards(profile(tmp_path / "a.docx").data)


def test_corpus_too_short_for_a_window_is_refused(store, tmp_path):
    path = write(tmp_path / "a.jsonl", ["few words"])
    with pytest.raises(ProfileError, match=r"train\.sequence_length = 16: the sources hold \d+ tokens"):
        make(profile(path, "data.validation_fraction=0"), store)
    write(path)
    with pytest.raises(ProfileError, match=r"data\.validation_fraction = 1e-09: holds out 0 tokens"):
        make(profile(path, "data.validation_fraction=0.000000001"), store)


def test_a_weighted_source_that_would_not_be_read_is_refused_before_training(store, tmp_path):
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", ["few words"])

    def blended(weight):
        sources = [
            {"kind": "files", "path": str(tmp_path / name), "weight": own}
            for name, own in (("a.jsonl", 3), ("b.jsonl", weight))
        ]
        return profile(tmp_path / "a.jsonl", f"data.sources={json.dumps(sources)}")

    tokens = TokenizerStep().run(Context(blended(1), store))
    with pytest.raises(
        ProfileError, match=r"sequence_length = 16: data\.sources\.1 has a weight and holds \d+ tok"
    ):
        DatasetStep(tokens).run(Context(blended(1), store))
    with pytest.raises(
        ProfileError, match=r"data\.sources\.1\.weight = 1e-07: .*never be read; .*: 2\.9e-06"
    ):
        DatasetStep(tokens).key(Context(blended(1e-7), store))
    write(tmp_path / "b.jsonl", DOCUMENTS[:100])
    assert DatasetStep(tokens).run(Context(blended(2.9e-6), store)).summary["shards"] == 2


@pytest.mark.parametrize(
    ("shuffle", "message"),
    [
        (
            "null",
            r"data\.cache_gigabytes = 1e-05: 0\.0 GB of data are shuffled together.*shuffle_tokens = 1666",
        ),
        ("4000", r"data\.shuffle_tokens = 4000: 0\.0 GB of data are shuffled together.*nearest valid: 1666"),
        ("1666", None),
    ],
)
def test_data_that_would_be_fetched_again_and_again_is_refused(tmp_path, monkeypatch, shuffle, message):
    """Ten kilobytes for a node, of a corpus of more, in a store that is elsewhere."""
    texts = write(tmp_path / "a.jsonl", DOCUMENTS * 3)
    with s3.bucket(monkeypatch) as bucket:
        there = Store(f"{bucket}/store", tmp_path / "work")
        wanted = profile(texts, "data.cache_gigabytes=1e-5", f"data.shuffle_tokens={shuffle}")
        tokens = TokenizerStep().run(Context(wanted, there))
        with pytest.raises(ProfileError, match=message) if message else nullcontext():
            DatasetStep(tokens).run(Context(wanted, there))


def test_python_docs_are_much_english_text_in_a_fixed_order_without_repetition():
    documents = list(python_docs.documents())
    assert documents[:150] == list(islice(python_docs.documents(), 150))
    assert len(set(documents)) == len(documents) > 500
    assert sum(map(len, documents)) > 1.8e6
    assert "\n".join(documents).count(" the ") > 10_000
    assert python_docs.digest() == python_docs.digest()


def test_files_on_s3(store, tmp_path, monkeypatch):
    import fsspec

    local = write(tmp_path / "a.jsonl.gz")
    with s3.bucket(monkeypatch) as bucket:
        with fsspec.open(f"{bucket}/texts/a.jsonl.gz", "wb") as file:
            file.write(local.read_bytes())
        there, here = profile(f"{bucket}/texts/*.gz"), profile(local)
        tokens = TokenizerStep().run(Context(there, store))
        documents = documents_of(DatasetStep(tokens).run(Context(there, store)), store, "train")
    assert documents == documents_of(DatasetStep(tokens).run(Context(here, store)), store, "train")
    assert len(documents) > 150
