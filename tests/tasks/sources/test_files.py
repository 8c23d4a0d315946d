"""File sources: all documents in order, content-keyed shards, and errors with file and position."""

import bz2
import errno
import glob
import gzip
import json
import lzma
import os
import random
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet as parquet
import pytest

from profiles import resolve
from profiles.errors import ProfileError
from tasks.sources import file_shards
from tasks.sources.formats import readers
from tasks.sources.listing import list_files
from tasks.sources.shard import SourceError, open_file
from tests import s3
from tests.tasks.source_files import (
    DOCUMENTS,
    arrow,
    arrow_stream,
    files,
    joined,
    lines,
    list_shards,
    profile,
    table,
    texts,
    zstd,
)
from tests.unreliable import Proxy


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(file_shards, "SHARD_BYTES", 4000)


RECORDS = [{"n": {"a": ["[{", i]}, "text": text} for i, text in enumerate(DOCUMENTS)]
WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(lines(DOCUMENTS)),
    "a.json": lambda path: path.write_bytes(lines(DOCUMENTS)),
    "a.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(lines(DOCUMENTS[:90])) + gzip.compress(lines(DOCUMENTS[90:]))
    ),
    "a.jsonl.zst": lambda path: path.write_bytes(zstd(lines(DOCUMENTS[:90])) + zstd(lines(DOCUMENTS[90:]))),
    "a.jsonl.xz": lambda path: path.write_bytes(
        lzma.compress(lines(DOCUMENTS[:1])) + bytes(8) + lzma.compress(lines(DOCUMENTS[1:]))
    ),
    "a.json.bz2": lambda path: path.write_bytes(bz2.compress(lines(DOCUMENTS))),
    "array.json": lambda path: path.write_text(json.dumps(RECORDS, indent=1)),
    "one-line.json": lambda path: path.write_text(json.dumps(RECORDS)),
    "array.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(RECORDS, indent=2).encode())),
    "indented.jsonl": lambda path: path.write_text("\n".join(json.dumps(each, indent=2) for each in RECORDS)),
    "a.csv": lambda path: pyarrow.csv.write_csv(table(), path),
    "a.parquet": lambda path: parquet.write_table(table(), path, row_group_size=20),
    "a.arrow": lambda path: arrow(path, pa.ipc.new_stream),
    "b.arrow": lambda path: arrow(path, pa.ipc.new_file),
}
SPLIT_FORMATS = {"a.jsonl", "a.json", "a.parquet", "a.arrow", "b.arrow"}


@pytest.mark.parametrize("name", WRITERS)
def test_shards_contain_every_document_once_in_order(name, tmp_path, small_shards):
    folder = tmp_path / "a::b"  # not a chain of file systems: it is local
    folder.mkdir()
    WRITERS[name](folder / name)
    wanted = profile(files(folder / name))
    resolve.check(wanted)
    shards = texts(wanted)
    assert joined(shards) == DOCUMENTS
    assert (len(shards) > 3) is (name in SPLIT_FORMATS)


def test_lines_option_reads_each_line_of_text_as_a_document(tmp_path, small_shards):
    (tmp_path / "a.txt").write_text("\n".join(DOCUMENTS))
    shards = texts(profile(files(tmp_path / "a.txt", lines=True)))
    assert joined(shards) == DOCUMENTS
    assert len(shards) > 3
    assert texts(profile(files(tmp_path / "a.txt"))) == [["\n".join(DOCUMENTS)]]


@pytest.mark.s3
def test_lines_on_s3_are_read_in_blocks_about_once(tmp_path, monkeypatch):
    import fsspec
    import s3fs

    monkeypatch.setattr(file_shards, "SHARD_BYTES", 400_000)
    monkeypatch.setattr("tasks.sources.remote.BLOCK", 50_000)
    fetched = []
    original = s3fs.S3File._fetch_range

    def counted(self, start, end):
        fetched.append(end - start)
        return original(self, start, end)

    monkeypatch.setattr(s3fs.S3File, "_fetch_range", counted)
    documents = [f"{i} {text}" for i in range(60) for text in DOCUMENTS]
    content = lines(documents)
    with s3.bucket(monkeypatch) as bucket:
        fsspec.filesystem("s3").pipe_file(f"{bucket}/a.jsonl", content)
        shards = texts(profile(files(f"{bucket}/a.jsonl")))
        assert joined(shards) == documents
        assert len(shards) > 4
        assert len(content) < sum(fetched) < 1.4 * len(content)  # the end of a part is read ahead
        assert len(fetched) < 1.4 * len(content) / 50_000
        found = readers.documents(list_shards(profile(files(f"{bucket}/a.jsonl")).data)[0])
        next(found)
        fsspec.filesystem("s3").pipe_file(f"{bucket}/a.jsonl", content[::-1])
        with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was being read; run again"):
            list(found)


def test_appending_to_a_file_changes_only_its_last_shard(tmp_path, small_shards):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(DOCUMENTS))
    before = [shard.digest for shard in list_shards(profile(files(path)).data)]
    with path.open("ab") as file:
        file.write(lines(DOCUMENTS[:50]))
    after = [shard.digest for shard in list_shards(profile(files(path)).data)]
    assert after[: len(before) - 1] == before[:-1]
    assert len(after) > len(before)


def test_text_files_are_grouped_and_a_new_file_changes_only_its_group(tmp_path):
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / f"{i:03}.txt").write_text(f"{i} {text}")
    before = {shard.digest for shard in list_shards(profile(files(tmp_path)).data)}
    assert 2 < len(before) < 40
    (tmp_path / "100a.txt").write_text("a new document")
    after = {shard.digest for shard in list_shards(profile(files(tmp_path)).data)}
    assert len(after - before) <= 2
    assert joined(texts(profile(files(tmp_path)))).count("a new document") == 1


@pytest.mark.s3
def test_a_folder_includes_nested_data_but_no_hidden_files(tmp_path, monkeypatch):
    made = {"a.jsonl": DOCUMENTS[:9], "b/c/d.jsonl": DOCUMENTS[9:20], "e[1].jsonl": DOCUMENTS[20:]}
    for name, documents in made.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(lines(documents))
    for name in (
        "README.md",
        ".gitattributes",
        "_SUCCESS",
        ".cache/x.jsonl",
        "b/_temporary/y.jsonl",
        ".up.jsonl",
    ):
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_text("# no training text")
    assert joined(texts(profile(files(tmp_path / "data")))) == DOCUMENTS
    with_brackets = profile(files(tmp_path / "data/e[1].jsonl"))
    resolve.check(with_brackets)
    assert joined(texts(with_brackets)) == DOCUMENTS[20:]
    assert texts(profile(files(tmp_path / "data/*.md"))) == [["# no training text"]]  # if matched explicitly
    patterns = (
        "**",
        "**/*.jsonl",
        "*.jsonl",
        "?up.jsonl",
        "[.]*.jsonl",
        ".*.jsonl",
        "*/*.jsonl",
        ".c*/*",
        "**/.*/*",
    )
    shell = {pattern: {*glob.glob(str(tmp_path / "data" / pattern), recursive=True)} for pattern in patterns}
    shell = {pattern: {path for path in found if os.path.isfile(path)} for pattern, found in shell.items()}
    with s3.bucket(monkeypatch) as bucket:
        s3.fill(tmp_path / "data", f"{bucket}/data")
        for pattern, wanted in shell.items():
            for folder in str(tmp_path), bucket:
                (source,) = profile(files(f"{folder}/data/{pattern}")).data.sources
                found = list_files(source, "path") if wanted else []
                assert {path.replace(bucket, str(tmp_path)) for path in found} == wanted, (folder, pattern)
        assert joined(texts(profile(files(f"{bucket}/data")))) == DOCUMENTS
        assert joined(texts(profile(files(f"{bucket}/data/e[1].jsonl")))) == DOCUMENTS[20:]
        # Other processes add and replace files, and this one lists again.
        digests = {shard.digest for shard in list_shards(profile(files(f"{bucket}/data")).data)}
        (tmp_path / "data/a.jsonl").write_bytes(lines(DOCUMENTS[:8]))
        (tmp_path / "data/f.jsonl").write_bytes(lines(["new"]))
        s3.fill(tmp_path / "data", f"{bucket}/data")
        shards = list_shards(profile(files(f"{bucket}/data")).data)
        assert len({shard.digest for shard in shards} - digests) == 2
        assert joined(texts(profile(files(f"{bucket}/data")))) == [*DOCUMENTS[:8], *DOCUMENTS[9:], "new"]
    (tmp_path / "data/LICENSE").write_text("no known ending")
    with pytest.raises(ProfileError, match="LICENSE has an unknown format"):
        texts(profile(files(tmp_path / "data")))


def test_a_file_that_changes_while_it_is_read_is_an_error_after_the_last_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(DOCUMENTS))
    (shard,) = list_shards(profile(files(path)).data)
    found = readers.documents(shard)
    assert next(found) == DOCUMENTS[0]
    with path.open("ab") as file:
        file.write(b"half a rec")
    with pytest.raises(SourceError, match=r"^/.*a\.jsonl: changed while it was being read; run again"):
        list(found)


def test_a_read_that_ends_before_the_file_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(DOCUMENTS))
    (shard,) = list_shards(profile(files(path)).data)
    size = path.stat().st_size
    monkeypatch.setattr(os, "fstat", lambda file: SimpleNamespace(st_size=2 * size))
    for read in (lambda file: file.read(), list):
        with open_file(shard, str(path)) as file, pytest.raises(OSError, match=f"only {size} of"):
            read(file)
    with pytest.raises(OSError, match=f"ends at byte {size}, before {2 * size}"):
        file_shards.range_digest(path, 0, 2 * size)


def test_only_regular_files_with_readable_names_are_read(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(DOCUMENTS[:9]))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/b.jsonl").write_bytes(lines(DOCUMENTS[9:]))
    (folder / "b.jsonl").symlink_to(tmp_path / "elsewhere/b.jsonl")
    for path in folder, folder / "*.jsonl":
        assert joined(texts(profile(files(path)))) == DOCUMENTS
    pipe, link, name = folder / "c.jsonl", folder / "d.jsonl", os.fsencode(folder) + b"/e\xff.jsonl"
    for make, path, message in (
        (os.mkfifo, pipe, r"c\.jsonl: is not a regular file"),
        (lambda path: path.symlink_to("nowhere"), link, r"d\.jsonl: is a link to a file that does not exist"),
        (lambda path: path.symlink_to("../elsewhere"), link, r"d\.jsonl: is a link to a folder; add that"),
        (lambda path: open(path, "w").close(), name, r"e\\xff\.jsonl: has a name that is not UTF-8"),
    ):
        make(path)
        for source in (folder,) if "a folder" in message else (folder, folder / "*.jsonl"):
            with pytest.raises(ProfileError, match=message):
                list_shards(profile(files(source)).data)
        os.unlink(path)
    os.mkfifo(pipe)
    with pytest.raises(ProfileError, match=r"c\.jsonl: is not a regular file"):
        list_shards(profile(files(pipe)).data)


def test_an_unreadable_folder_is_an_error_and_never_less_data(tmp_path, monkeypatch, waits):
    (tmp_path / "a/b").mkdir(parents=True)
    for name in "a/x.jsonl", "a/b/y.jsonl":
        (tmp_path / name).write_bytes(lines(DOCUMENTS))
    scandir, stale = os.scandir, str(tmp_path / "a/b")

    def failing(path):
        if str(path) == stale:
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", failing)
    for pattern in "a", "a/**", "**/*.jsonl", "*/*/*.jsonl":
        with pytest.raises(OSError, match=r"a/b: cannot be read: .*Stale file handle"):
            list_shards(profile(files(tmp_path / pattern)).data)
    assert sum(waits) > 100
    assert joined(texts(profile(files(tmp_path / "*/*.jsonl")))) == DOCUMENTS


@pytest.mark.s3
def test_failed_requests_to_s3_are_retried_and_never_treated_as_absence(monkeypatch, waits):
    import fsspec
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with s3.bucket(monkeypatch) as bucket, Proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        fsspec.filesystem("s3").pipe_file(f"{bucket}/texts/a.jsonl", lines(DOCUMENTS))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        draw = random.Random(0)
        for path in "texts/a.jsonl", "texts", "texts/*.jsonl", "**/a.jsonl":
            s3fs.S3FileSystem.clear_instance_cache()
            proxy.fault = lambda method, path: draw.choice([None, None, None, "busy", "lost", "half"])
            assert joined(texts(profile(files(f"{bucket}/{path}")))) == DOCUMENTS
            s3fs.S3FileSystem.clear_instance_cache()
            proxy.fault = lambda method, path: "busy"
            with pytest.raises(ConnectionError, match=r"s3://bucket.*: cannot be read: "):
                list_shards(profile(files(f"{bucket}/{path}")).data)
        assert proxy.faults > 50
        s3fs.S3FileSystem.clear_instance_cache()
        proxy.fault = lambda method, path: None
        (shard,) = list_shards(profile(files(f"{bucket}/texts/a.jsonl")).data)
        proxy.fault = lambda method, path: "busy" if method == "GET" else None
        with pytest.raises(ConnectionError, match=r"a\.jsonl: cannot be read: "):
            list(readers.documents(shard))


def test_digests_are_cached_until_a_file_changes(tmp_path, store, monkeypatch):
    from tasks.sources.digest_cache import DigestCache

    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(DOCUMENTS))
    os.utime(path, (1e9, 1e9))
    wanted = profile(files(path)).data
    before = [shard.digest for shard in list_shards(wanted, DigestCache(store.local_cache))]
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", None)  # reading would fail
        assert [shard.digest for shard in list_shards(wanted, DigestCache(store.local_cache))] == before
    path.write_bytes(lines(DOCUMENTS[1:]))
    assert [shard.digest for shard in list_shards(wanted, DigestCache(store.local_cache))] != before


@pytest.mark.s3
def test_a_remote_arrow_file_is_one_shard(monkeypatch, small_shards):
    import fsspec

    with s3.bucket(monkeypatch) as bucket:
        fsspec.filesystem("s3").pipe_file(f"{bucket}/a.arrow", arrow_stream())
        assert texts(profile(files(f"{bucket}/a.arrow"))) == [DOCUMENTS]
