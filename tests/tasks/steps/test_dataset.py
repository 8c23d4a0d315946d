"""Dataset step: every document tokenized once, what runs again after a change, and rejected sources."""

import gzip
import json
import os
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from modeling.data.corpus import Corpus
from modeling.data.records import open_samples
from profiles import resolve
from profiles.errors import ProfileError
from tasks.sources import corpus as corpora
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tasks.tokenization import tokenize_shard, tokenizer_files
from tests import s3
from tests.profiles.pair import PAIR
from tests.tasks.source_files import documents_of, list_shards

DOCUMENTS = [f"Document {i} " + "says words and more words. " * (i % 7) for i in range(200)] + [
    "",
    "naïve 日本",
]


def write(path, documents=DOCUMENTS, column="text"):
    """Write documents in the format of the file extension."""
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
    common = [
        f"data.sources=[{{kind: files, path: '{path}'}}]",
        "tokenizer.vocabulary_size=300",
        "train.sequence_length=16",
    ]
    return resolve.load(PAIR, [*common, "data.validation_fraction=0.1", *overrides])


def make_tokenizer(wanted, store):
    return TokenizerStep().run(Context(wanted, store))


def make_dataset(tokenizer, wanted, store, messages=None):
    """Run the dataset step; its progress messages are appended to `messages`."""
    shown = [] if messages is None else messages
    return DatasetStep(tokenizer).run(
        Context(wanted, store, progress=lambda message, _: shown.append(message))
    )


def key_of(tokenizer, wanted, store):
    return DatasetStep(tokenizer).key(Context(wanted, store))


def make(wanted, store):
    return make_dataset(make_tokenizer(wanted, store), wanted, store)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_every_document_is_tokenized_once_in_order_with_eos(store, tmp_path, ending):
    wanted = profile(write(tmp_path / f"source/a.{ending}"))
    tokenizer = make_tokenizer(wanted, store)
    artifact = make_dataset(tokenizer, wanted, store)
    encoder, eos = tokenizer_files.load(store.artifacts.path(tokenizer)), tokenizer.summary["eos"]
    for split, held_out in ("train", False), ("validation", True):
        texts = [text for text in DOCUMENTS if corpora.is_held_out(text, 0.1) is held_out]
        assert documents_of(artifact, store, split) == [[*encoder.encode(text).ids, eos] for text in texts]
    summary = artifact.summary
    assert summary["documents"] + summary["validation_documents"] == len(DOCUMENTS)
    assert summary["missing"] == 0
    assert summary["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)
    assert 5 < summary["validation_documents"] < 40


def test_corpus_reads_the_tokens_of_all_shards(store, tmp_path):
    write(tmp_path / "source/a.jsonl", DOCUMENTS[:90])
    write(tmp_path / "source/b.jsonl", DOCUMENTS[90:])
    artifact = make(profile(tmp_path / "source/*.jsonl"), store)
    for split in "train", "validation":
        corpus = Corpus.open(store.artifacts.path(artifact), split)
        flat = np.concatenate(documents_of(artifact, store, split))
        assert np.array_equal(corpus.read(0, corpus.tokens), flat)
    assert artifact.summary["shards"] == 2


def test_each_plain_text_file_is_one_document(store, tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(DOCUMENTS[i])
    artifact = make(profile(tmp_path / "*.txt"), store)
    assert artifact.summary["documents"] + artifact.summary["validation_documents"] == 40


def test_append_eos_false_adds_no_token(store, tmp_path):
    wanted = profile(write(tmp_path / "a.jsonl"), "data.append_eos=false")
    tokenizer = make_tokenizer(wanted, store)
    documents = documents_of(make_dataset(tokenizer, wanted, store), store, "train")
    assert not any(tokenizer.summary["eos"] in document for document in documents)
    assert [] in documents


def test_new_file_tokenizes_only_itself_and_keeps_the_split(store, tmp_path):
    write(tmp_path / "source/a.jsonl", DOCUMENTS[:100])
    wanted = profile(tmp_path / "source/*.jsonl")
    tokenizer = make_tokenizer(wanted, store)
    first = make_dataset(tokenizer, wanted, store)
    write(tmp_path / "source/b.jsonl", DOCUMENTS[100:])
    messages = []
    second = make_dataset(tokenizer, wanted, store, messages)
    assert first.key != second.key
    assert any("b.jsonl" in message for message in messages)
    assert not any("a.jsonl" in message for message in messages)
    before, after = (documents_of(artifact, store, "validation") for artifact in (first, second))
    assert after[: len(before)] == before


def test_only_a_corrupted_shard_is_tokenized_again(store, tmp_path):
    write(tmp_path / "source/a.jsonl", DOCUMENTS[:100])
    write(tmp_path / "source/b.jsonl", DOCUMENTS[100:])
    wanted = profile(tmp_path / "source/*.jsonl")
    tokenizer = make_tokenizer(wanted, store)
    artifact = make_dataset(tokenizer, wanted, store)
    before = documents_of(artifact, store, "train")
    shard = json.loads((store.artifacts.path(artifact) / "corpus.json").read_text())["train"][0]["path"]
    path = tmp_path / f"store/artifacts/{shard}.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert store.artifacts.find(DatasetStep.id(artifact.key)) is None
    messages = []
    again = make_dataset(tokenizer, wanted, store, messages)
    assert again == artifact
    assert documents_of(again, store, "train") == before
    assert all("a.jsonl" in message for message in messages)
    assert messages


def test_other_sequence_length_reuses_the_tokens(store, tmp_path):
    write(tmp_path / "a.jsonl")
    short, long = profile(tmp_path / "a.jsonl"), profile(tmp_path / "a.jsonl", "train.sequence_length=32")
    tokenizer = make_tokenizer(short, store)
    assert key_of(tokenizer, short, store) != key_of(tokenizer, long, store)
    make_dataset(tokenizer, short, store)
    messages = []
    make_dataset(tokenizer, long, store, messages)
    assert not any("a.jsonl" in message for message in messages)


def test_key_depends_on_contents_not_names(store, tmp_path):
    path = write(tmp_path / "a.jsonl")
    wanted = profile(path)
    tokenizer = make_tokenizer(wanted, store)
    before = key_of(tokenizer, wanted, store)
    renamed = profile(path.rename(tmp_path / "b.jsonl"))
    assert key_of(tokenizer, renamed, store) == before
    write(tmp_path / "b.jsonl", DOCUMENTS[:-1])
    assert key_of(tokenizer, renamed, store) != before


def test_a_file_moved_between_sources_of_equal_weight_makes_another_dataset(store, tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", [*DOCUMENTS, name])

    def keys_of(*patterns):
        """Keys with equal weights of these sources, and with different ones."""
        for second in (1, 2):
            sources = [
                {"kind": "files", "path": f"{tmp_path}/{pattern}.jsonl", "weight": weight}
                for pattern, weight in zip(patterns, (1, second), strict=True)
            ]
            yield key_of(tokenizer, profile(tmp_path, f"data.sources={json.dumps(sources)}"), store)

    tokenizer = make_tokenizer(profile(tmp_path / "a.jsonl"), store)
    assert len({*keys_of("[ab]", "c"), *keys_of("a", "[bc]")}) == 4


def test_records_without_text_are_counted(store, tmp_path):
    path = write(tmp_path / "a.jsonl")
    with path.open("a") as file:
        file.write('{"n": 1}\n\n{"text": null}\n{"text": 7}\n')
    artifact = make(profile(path), store)
    assert artifact.summary["missing"] == 3
    assert (artifact.summary["incomplete_files"], artifact.summary["incomplete"]) == ({str(path): 3}, 1)
    (row,) = json.loads((store.artifacts.path(artifact) / "report.json").read_text())
    assert row["missing_by_file"] == {str(path): 3}
    assert artifact.summary["documents"] + artifact.summary["validation_documents"] == len(DOCUMENTS)


def test_batch_size_does_not_change_the_tokens(store, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [*DOCUMENTS, DOCUMENTS[6] * 400])
    wanted = profile(path)
    tokenizer = make_tokenizer(wanted, store)
    expected = documents_of(make_dataset(tokenizer, wanted, store), store, "train")
    monkeypatch.setattr(tokenize_shard, "BATCH_CHARACTERS", 500)
    other = Store(str(tmp_path / "other"))
    assert documents_of(make(wanted, other), other, "train") == expected


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_missing_text_column_is_rejected_with_the_existing_ones(store, tmp_path, ending):
    write(tmp_path / f"a.{ending}", column="content")
    with pytest.raises(ProfileError, match=r"data\.text = text: .*no such column; nearest valid: .*content"):
        make(profile(tmp_path / f"a.{ending}"), store)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl, line 2: invalid JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a\.jsonl, line 2: not a JSON object"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: invalid JSON"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n', mtime=0)[:-4],
            r"a\.jsonl\.gz, after line 1: corrupted gzip",
        ),
        ("a.jsonl.gz", b'{"text": "a"}\n', r"a\.jsonl\.gz, after line 0: corrupted gzip"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet, footer: corrupted parquet"),
        ("a.txt", b"good \xff", r"a\.txt, byte 5: not UTF-8"),
    ],
)
def test_corrupted_source_is_rejected_by_position_and_publishes_nothing(
    store, tmp_path, name, content, message
):
    good = profile(write(tmp_path / "good.jsonl"))
    tokenizer = make_tokenizer(good, store)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        make_dataset(tokenizer, profile(tmp_path / name), store)
    assert not list((store.artifacts.path(tokenizer).parent.parent / "tokens").glob("*/train.bin"))


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_a_file_replaced_after_planning_is_an_error_and_publishes_nothing(store, tmp_path, ending):
    path = write(tmp_path / f"a.{ending}")
    wanted, times = profile(path), path.stat()
    tokenizer = make_tokenizer(wanted, store)
    step, context = DatasetStep(tokenizer), Context(wanted, store)
    key = step.key(context)
    path.rename(tmp_path / "good")
    write(path, DOCUMENTS[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(
        SourceError, match=rf"^/.*/a\.{ending}: has changed since .*; restore it, or .*--update"
    ):
        step.run(context, key)
    path.write_bytes((tmp_path / "good").read_bytes())  # restored from a backup
    other = Store(str(tmp_path / "other"))
    assert documents_of(step.run(context, key), store, "train") == documents_of(
        make(wanted, other), other, "train"
    )


def test_source_without_files_is_rejected(store, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProfileError, match=r"data\.sources\.0\.path = .*: no file matches"):
        list_shards(profile(tmp_path / "empty/*.jsonl").data)


def test_unknown_format_is_rejected_with_the_known_ones(tmp_path):
    (tmp_path / "a.docx").write_bytes(b"")
    with pytest.raises(ProfileError, match=r"a\.docx has an unknown format.*\.jsonl.*\.parquet"):
        list_shards(profile(tmp_path / "a.docx").data)


def test_split_shorter_than_one_window_is_rejected(store, tmp_path):
    path = write(tmp_path / "a.jsonl", [""])
    with pytest.raises(ProfileError, match=r"data\.sources: hold no text"):
        make(profile(path), store)
    write(path, ["few words"])
    with pytest.raises(ProfileError, match=r"train\.sequence_length = 16: the sources hold \d+ tokens"):
        make(profile(path, "data.validation_fraction=0"), store)
    write(path)
    with pytest.raises(ProfileError, match=r"data\.validation_fraction = 1e-09: holds out 0 tokens"):
        make(profile(path, "data.validation_fraction=0.000000001"), store)


def test_weighted_source_that_would_not_be_sampled_is_rejected(store, tmp_path):
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", ["few words"])

    def blended(other_weight):
        sources = [
            {"kind": "files", "path": str(tmp_path / name), "weight": weight}
            for name, weight in (("a.jsonl", 3), ("b.jsonl", other_weight))
        ]
        return profile(tmp_path / "a.jsonl", f"data.sources={json.dumps(sources)}")

    tokenizer = make_tokenizer(blended(1), store)
    with pytest.raises(
        ProfileError, match=r"sequence_length = 16: data\.sources\.1 has a weight and holds \d+ tok"
    ):
        make_dataset(tokenizer, blended(1), store)
    with pytest.raises(
        ProfileError, match=r"data\.sources\.1\.weight = 1e-07: .*never be sampled; .*: 2\.9e-06"
    ):
        key_of(tokenizer, blended(1e-7), store)
    write(tmp_path / "b.jsonl", DOCUMENTS[:100])
    assert make_dataset(tokenizer, blended(2.9e-6), store).summary["shards"] == 2


@pytest.mark.s3
def test_shuffling_more_remote_data_than_the_cache_holds_is_rejected(tmp_path, monkeypatch):
    """A cache of ten kilobytes and a larger corpus, in a remote store."""
    for i in range(6):
        write(tmp_path / f"{i}.jsonl", DOCUMENTS[50 * i % 200 : 50 * i % 200 + 50])
    texts, large = tmp_path / "*.jsonl", write(tmp_path / "large.json", DOCUMENTS * 3)
    cache = r"data\.cache_gigabytes = 1e-05: 0\.0 GB of data are shuffled together.*shuffle_tokens = 1666"
    shuffle = r"data\.shuffle_tokens = 4000: 0\.0 GB of data are shuffled together.*nearest valid: 1666"
    whole = r"data\.cache_gigabytes = 1e-05: /.*large\.json takes 0\.0 GB, and a node caches it as one piece"
    with s3.bucket(monkeypatch) as bucket:
        remote = Store(f"{bucket}/store", tmp_path / "work")
        tokenizer = make_tokenizer(profile(texts), remote)
        for path, tokens, message in (
            (texts, "null", cache),
            (texts, "4000", shuffle),
            (texts, "1666", None),
            (large, "1666", whole),
        ):
            wanted = profile(path, "data.cache_gigabytes=1e-5", f"data.shuffle_tokens={tokens}")
            with pytest.raises(ProfileError, match=message) if message else nullcontext():
                make_dataset(tokenizer, wanted, remote)


@pytest.mark.s3
def test_source_on_s3_gives_the_same_documents(store, tmp_path, monkeypatch):
    import fsspec

    local = write(tmp_path / "a.jsonl.gz")
    with s3.bucket(monkeypatch) as bucket:
        with fsspec.open(f"{bucket}/texts/a.jsonl.gz", "wb") as file:
            file.write(local.read_bytes())
        there, here = profile(f"{bucket}/texts/*.gz"), profile(local)
        tokenizer = make_tokenizer(there, store)
        documents = documents_of(make_dataset(tokenizer, there, store), store, "train")
        other = Store(str(tmp_path / "other"))
        step, context = DatasetStep(make_tokenizer(there, other)), Context(there, other)
        key = step.key(context)
        fsspec.filesystem("s3").pipe_file(f"{bucket}/texts/a.jsonl.gz", gzip.compress(b"{}\n"))
        with pytest.raises(SourceError, match=r"^s3://.*a\.jsonl\.gz: has changed since the run's inputs"):
            step.run(context, key)
    assert documents == documents_of(make_dataset(tokenizer, here, store), store, "train")
    assert len(documents) > 150


def test_records_are_packed_and_counted_whatever_their_format(store, tmp_path):
    records = [{"prompt": f"{i}? ", "completion": f"it is {i}"} for i in range(40)]
    records += [
        {"prompt": "why? ", "completion": "because " * 50},
        {"prompt": "an answer is missing", "completion": None},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    schema = pa.schema([("prompt", pa.string()), ("completion", pa.binary())])
    parquet.write_table(pa.Table.from_pylist(records, schema), tmp_path / "a.parquet", row_group_size=7)
    tokenizer = make_tokenizer(profile(write(tmp_path / "texts/a.jsonl")), store)
    rows = []
    for ending in ("jsonl", "parquet"):
        overrides = ("objective.kind=sft", "train.sequence_length=64", "data.validation_fraction=0.2")
        wanted = profile(tmp_path / f"a.{ending}", *overrides)
        step = DatasetStep(tokenizer)
        artifact = step.run(Context(wanted, store))
        summary = artifact.summary
        assert (summary["truncated"], summary["missing"], summary["too_long"]) == (1, 1, 0)
        assert summary["documents"] + summary["validation_documents"] == 41
        assert "1 record truncated, 1 record unusable" in step.describe(summary)
        samples = open_samples(wanted, store.artifacts.path(artifact), "train")
        assert samples.windows == summary["samples"] < summary["documents"]
        rows.append(sorted(samples.batch(0, samples.windows).tolist()))
    assert rows[0] == rows[1]


def test_unusable_pairs_are_compared_with_pairs_not_with_their_answers(store, tmp_path):
    records = [{"prompt": f"{i}? ", "chosen": "yes", "rejected": "no"} for i in range(40)]
    records += [{"prompt": "why? ", "chosen": None, "rejected": "no"}] * 6
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = make_tokenizer(profile(write(tmp_path / "texts/a.jsonl")), store)
    wanted = profile(tmp_path / "a.jsonl", "objective.kind=orpo")
    with pytest.raises(ProfileError, match=r"data\.maximum_missing = 0\.1: 6 of 46 records"):
        make_dataset(tokenizer, wanted, store)
