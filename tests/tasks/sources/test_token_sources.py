"""Tokenized sources: Megatron pairs, and datasets written by save_to_disk."""

import struct
import subprocess
import sys

import numpy as np
import pytest

from modeling.data.corpus import Corpus
from modeling.data.indexed import Index, IndexedError
from modeling.data.shard_cache import ShardCache
from profiles.errors import ProfileError
from tasks.sources import megatron
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tests import s3
from tests.tasks.source_files import DOCUMENTS, files, joined, profile, write_pair


def test_a_saved_data_set_of_tokens_is_used_unchanged(tmp_path, store):
    import datasets  # imports slowly

    (tmp_path / "text.txt").write_text(" ".join(DOCUMENTS))
    rows = [list(range(i, i + 20)) for i in range(60)]
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "saved", num_shards=3)
    source = {"kind": "tokens", "path": str(tmp_path / "saved"), "text": "input_ids"}
    wanted = profile(files(tmp_path / "text.txt", use="validation"), source, validation_fraction=0)
    tokenizer = TokenizerStep().run(Context(profile(files(tmp_path / "text.txt")), store))
    corpus_artifact = DatasetStep(tokenizer).run(Context(wanted, store))
    corpus = Corpus.open(store.artifacts.path(corpus_artifact), "train")
    assert corpus.read(0, corpus.tokens).tolist() == joined(rows)
    assert corpus_artifact.summary["documents"] == 60
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]})}).save_to_disk(tmp_path / "dict")
    several = {**source, "path": str(tmp_path / "dict")}
    with pytest.raises(ProfileError, match=r"several splits.*nearest valid: .*dict/train"):
        DatasetStep(tokenizer).run(Context(profile(several), store))
    large = datasets.Dataset.from_dict({"input_ids": [[1, 2], [1, 2], [3, 300]]})
    large.save_to_disk(tmp_path / "large")
    with pytest.raises(SourceError, match=r"arrow, record batch 0, record 2, token 1: token 300 is not in"):
        DatasetStep(tokenizer).run(
            Context(profile({**source, "path": str(tmp_path / "large")}, deduplicate=True), store)
        )
    again = datasets.Dataset.from_dict({"input_ids": [[1, 2], [1, 2], [1, 2], [5, None, 6]]})
    again.save_to_disk(tmp_path / "again")
    with pytest.raises(SourceError, match=r"arrow, record batch 0, record 3, token 1: null"):
        DatasetStep(tokenizer).run(
            Context(profile({**source, "path": str(tmp_path / "again")}, deduplicate=True), store)
        )
    (tmp_path / "again/state.json").write_text('{"_data_files": [')
    with pytest.raises(SourceError, match=r"again/state\.json: not written by save_to_disk: Expecting"):
        DatasetStep(tokenizer).run(Context(profile({**source, "path": str(tmp_path / "again")}), store))
    (tmp_path / "again/state.json").write_text('{"_data_files": [{"filename": "../text.txt"}]}')
    with pytest.raises(SourceError, match=r"'\.\./text\.txt' is not the name of a file below"):
        DatasetStep(tokenizer).run(Context(profile({**source, "path": str(tmp_path / "again")}), store))


def pair_profile(path, **more):
    return profile({"kind": "megatron", "path": str(path)}, **{"validation_fraction": 0.1, **more})


@pytest.fixture
def tokenizer(tmp_path, store):
    (tmp_path / "text.txt").write_text(" ".join(DOCUMENTS))
    return TokenizerStep().run(Context(profile(files(tmp_path / "text.txt")), store))


def test_a_megatron_pair_is_read_in_place(tmp_path, store, tokenizer):
    documents = [list(range(i, i + 30)) for i in range(100)]
    write_pair(tmp_path / "my_text_document", documents)
    corpus_artifact = DatasetStep(tokenizer).run(Context(pair_profile(tmp_path / "my_text_document"), store))
    for split, own in ("train", documents[:90]), ("validation", documents[90:]):
        corpus = Corpus.open(store.artifacts.path(corpus_artifact), split)
        assert corpus.read(0, corpus.tokens).tolist() == joined(own)
        assert set(corpus.document_starts(0, 60).tolist()) == {0, 30}
    assert not list((tmp_path / "store/artifacts/tokens").glob("*/*.bin"))
    step, context = DatasetStep(tokenizer), Context(pair_profile(tmp_path / "my_text_document"), store)
    assert step.find(context, step.key(context)) == corpus_artifact
    write_pair(tmp_path / "my_text_document", documents[::-1])
    with pytest.raises(SourceError, match="has changed since the run's inputs"):
        step.find(context, step.key(context))


def test_a_moved_megatron_pair_is_read_at_its_new_path(tmp_path, store, tokenizer):
    (tmp_path / "old").mkdir()
    write_pair(tmp_path / "old/pair", [list(range(i, i + 30)) for i in range(100)])
    before = DatasetStep(tokenizer).run(Context(pair_profile(tmp_path / "old/pair"), store))
    assert DatasetStep(tokenizer).key(Context(pair_profile(tmp_path / "old/pair"), store)) == before.key
    assert (
        DatasetStep(tokenizer).find(Context(pair_profile(tmp_path / "old/pair"), store), before.key) == before
    )
    (tmp_path / "old").rename(tmp_path / "new")
    wanted = pair_profile(tmp_path / "new/pair")
    assert DatasetStep(tokenizer).key(Context(wanted, store)) == before.key  # so a run resumes
    assert DatasetStep(tokenizer).find(Context(wanted, store), before.key) is None
    after = DatasetStep(tokenizer).run(Context(wanted, store))
    for split, first in ("train", 0), ("validation", 90):
        assert Corpus.open(store.artifacts.path(after), split).read(0, 2).tolist() == [first, first + 1]


def test_a_corrupted_pair_is_an_error_with_file_and_offset(tmp_path, store, tokenizer):
    write_pair(tmp_path / "a", [[1, 2], [3, 299], [300, 5]])
    with pytest.raises(IndexedError, match=r"a\.bin, byte 8: token 300 is not in the vocabulary of 300"):
        DatasetStep(tokenizer).run(Context(pair_profile(tmp_path / "a"), store))
    write_pair(tmp_path / "b", [[1, 2], [3]])
    with (tmp_path / "b.bin").open("ab") as file:
        file.write(bytes(2))
    with pytest.raises(IndexedError, match=r"b\.bin, byte 6: has 8 bytes, but its index describes 6"):
        DatasetStep(tokenizer).run(Context(pair_profile(tmp_path / "b"), store))
    write_pair(tmp_path / "b", [[1, 2], [3], [4, 5]])
    index = bytearray((tmp_path / "b.idx").read_bytes())
    index[34 + 3 * 4 + 2 * 8] = 2  # where the last sequence starts: at byte 2, not 6
    (tmp_path / "b.idx").write_bytes(index)
    with pytest.raises(IndexedError, match=r"b\.idx, byte 62: sequence 2 does not follow the one before it"):
        DatasetStep(tokenizer).run(Context(pair_profile(tmp_path / "b"), store))
    shard = DatasetStep(tokenizer).plan(Context(pair_profile(tmp_path / "b"), store)).shards[0]
    write_pair(tmp_path / "b", [[1, 2], [3], [4, 5]])
    with pytest.raises(SourceError, match=r"b\.idx: has changed since the run's inputs"):
        megatron.check(shard, 300, 0.5, lambda tokens: None)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(ProfileError, match=r"there is no .*b\.bin"):
        DatasetStep(tokenizer).run(Context(pair_profile(tmp_path / "b"), store))


def test_a_pair_of_many_documents_is_checked_in_bounded_memory(tmp_path):
    """Four million one-token documents: 80 MB of index, valid, then corrupted in one of the last entries."""
    count = 4_000_000
    with (tmp_path / "a.idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        np.ones(count, "<i4").tofile(file)
        np.arange(0, 2 * count, 2, dtype="<i8").tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * count)
    program = """
import resource, sys
from tasks.steps import dataset
from tasks.sources import megatron
from tasks.sources.shard import Shard
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
splits = megatron.check(Shard("a", "megatron", "", (sys.argv[1],)), 300, 0.25, lambda tokens: None)
print(splits["train"]["tokens"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "a.idx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tokens, kilobytes = map(int, done.stdout.split())
    assert tokens == 3_000_000
    assert kilobytes < 80_000  # less than the index alone
    with (tmp_path / "a.idx").open("r+b") as file:
        file.seek(-16, 2)
        file.write(struct.pack("<q", 7))
    with pytest.raises(
        IndexedError, match=rf"byte {34 + 12 * count + 8 * (count - 1)}: entry {count - 1} is 7: "
    ):
        Index(tmp_path / "a", 2 * count)


def first_token(dataset, store, cache):
    return Corpus.open(store.artifacts.path(dataset), "train", cache).read(0, 1).item()


@pytest.mark.s3
def test_pairs_on_s3_are_checked(tmp_path, store, tokenizer, monkeypatch):
    import fsspec

    write_pair(tmp_path / "a", [[1, 2], [3, 299, 7]])
    write_pair(tmp_path / "b", [[1, 2], [3, 301]])
    with s3.bucket(monkeypatch) as bucket:
        there = fsspec.filesystem("s3")
        for name in "a.bin", "a.idx", "b.bin", "b.idx":
            there.put_file(str(tmp_path / name), f"{bucket}/pairs/{name}")
        wanted = pair_profile(f"{bucket}/pairs/a", validation_fraction=0)
        shard = DatasetStep(tokenizer).plan(Context(wanted, store)).shards[0]
        splits = megatron.check(shard, 300, 0.5, lambda tokens: None)
        assert splits["train"] == {"start": 0, "tokens": 2, "documents": 1}
        assert splits["validation"] == {"start": 2, "tokens": 3, "documents": 1}
        shard = DatasetStep(tokenizer).plan(Context(pair_profile(f"{bucket}/pairs/b"), store)).shards[0]
        with pytest.raises(IndexedError, match=r"s3:/.*b\.bin, byte 6: token 301"):
            megatron.check(shard, 300, 0.5, lambda tokens: None)
        cache = ShardCache(tmp_path / "cache", 10_000)
        for first in 1, 8:  # replaced under the same name
            write_pair(tmp_path / "c", [[first, *range(60)]])
            for name in "c.bin", "c.idx":
                there.put_file(str(tmp_path / name), f"{bucket}/pairs/{name}")
            wanted = pair_profile(f"{bucket}/pairs/c", validation_fraction=0)
            small = pair_profile(f"{bucket}/pairs/c", validation_fraction=0, cache_gigabytes=1.5e-7)
            with pytest.raises(ProfileError, match=r"s3://.*/pairs/c takes 0\.0 GB, and a node caches it"):
                DatasetStep(tokenizer).run(Context(small, store))  # 122 bytes of tokens, 62 of the index
            dataset = DatasetStep(tokenizer).run(Context(wanted, store))
            assert first_token(dataset, store, cache) == first
        there.put_file(str(tmp_path / "a.bin"), f"{bucket}/pairs/b.bin")
        with pytest.raises(SourceError, match=r"s3:/.*b\.bin: has changed since the run's inputs"):
            megatron.check(shard, 300, 0.5, lambda tokens: None)
