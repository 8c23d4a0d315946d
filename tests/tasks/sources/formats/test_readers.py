"""Readers of files by format: every text, once, or an error with file and position."""

import bz2
import gzip
import io
import json
import lzma
import re

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import ProfileError
from tasks.sources import json_layout
from tasks.sources.formats import long_text, readers
from tasks.sources.shard import Shard, SourceError
from tests.tasks.source_files import (
    DOCUMENTS,
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


@pytest.mark.parametrize("text", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.json", "a.csv"])
def test_a_byte_order_mark_is_no_text_and_other_encodings_are_named(text, tmp_path, monkeypatch):
    contents = {
        ".txt": "naïve",
        ".jsonl": '{"text": "naïve"}\n',
        ".json": '[{"text": "naïve"}]',
        ".csv": "text\nnaïve\n",
    }
    content = contents[text.removeprefix("a").removesuffix(".gz")]
    path = tmp_path / text
    for encoding in "utf-8-sig", "utf-16", "utf-32":
        data = content.encode(encoding)
        path.write_bytes(gzip.compress(data) if text.endswith(".gz") else data)
        if encoding == "utf-8-sig":
            assert texts(profile(files(path))) == [["naïve"]]
            assert text != "a.txt" or texts(profile(files(path, lines=True))) == [["naïve"]]
            monkeypatch.setattr(readers, "LONG_FILE", 4)
            assert texts(profile(files(path))) == [["naïve"]]
            monkeypatch.undo()
            continue
        with pytest.raises(SourceError, match=f"{encoding.upper()}, not UTF-8 text; convert it"):
            texts(profile(files(path)))


@settings(max_examples=100)
@given(
    st.lists(
        st.dictionaries(
            st.text('a[{"\\ ', max_size=3),
            st.recursive(st.text('[]{}",\\ é\n', max_size=5) | st.integers(), st.lists, max_leaves=4),
            min_size=1,
            max_size=3,
        )
    ),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.sampled_from(["", "\n", "\r\n"]),
)
def test_json_is_cut_into_its_records_however_it_is_laid_out(records, indent, is_array, end):
    text = (
        json.dumps(records, indent=indent)
        if is_array
        else "\n".join(json.dumps(each, indent=indent) for each in records)
    )
    found = [((lambda: "line"), line) for line in (text + end).encode().splitlines(keepends=True)]
    cut = [json.loads(record) for _, record in json_layout.records(found) if not record.isspace()]
    assert cut == records
    if is_array:  # nothing is lost in silence
        for damaged in (text[:-1], text + "1", text.replace("[", "[1,", 1), text + "{}"):
            found = [((lambda: "line"), line) for line in damaged.encode().splitlines(keepends=True)]
            with pytest.raises(SourceError, match="line: invalid JSON"):
                list(json_layout.records(found))


def test_long_text_files_are_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONG_FILE", 100)
    monkeypatch.setattr("tasks.sources.formats.long_text.READ", 64)
    (tmp_path / "a.txt").write_text("日本語 naïve " * 40)
    assert texts(profile(files(tmp_path / "a.txt"))) == [["日本語 naïve " * 40]]
    (tmp_path / "a.txt").write_bytes(b"good " * 40 + b"\xff")
    with pytest.raises(SourceError, match=r"a\.txt, byte 200: not UTF-8"):
        texts(profile(files(tmp_path / "a.txt")))


@settings(max_examples=200)
@given(
    st.lists(st.text(st.sampled_from('abc "\\/\n\té日👩{}:,'), max_size=60), min_size=1, max_size=6),
    st.booleans(),
    st.integers(1, 40),
)
def test_long_json_strings_decode_in_chunks_to_the_same_text(documents, ensure_ascii, part):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "LONG_FILE", 30)
        patch.setattr(readers, "LONG_STRING", 10)
        patch.setattr("tasks.sources.formats.long_text.READ", part)
        records = ({"a": text, "text": text, "b": [text, 1.5]} for text in documents)
        made = (json.dumps(record, ensure_ascii=ensure_ascii).encode() for record in records)
        lines = ((lambda: "a.jsonl, line 1", line) for line in made)
        patch.setitem(readers.LINES, "jsonl", lambda shard, token: lines)
        shard = Shard("a.jsonl", "jsonl", "digest", ("a.jsonl",), stop=1, column="text")
        found = readers.documents(shard)
        assert [each if isinstance(each, str) else "".join(each.chunks()) for each in found] == documents


@pytest.mark.parametrize("text", ["12,3.5\n", "\n", "日本", "👩", "\\n", '"a" b'])
def test_a_long_json_string_decodes_in_bounded_chunks(text, monkeypatch):
    monkeypatch.setattr("tasks.sources.formats.long_text.READ", 64)
    for ensure_ascii in True, False:
        literal = json.dumps(text * 1000, ensure_ascii=ensure_ascii).encode()[1:-1]
        chunks = list(long_text.of_json(memoryview(literal), lambda: "a.jsonl, line 1").chunks())
        assert "".join(chunks) == text * 1000
        assert max(map(len, chunks)) <= 128


def test_an_invalid_long_json_string_is_an_error_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONG_FILE", 100)
    monkeypatch.setattr(readers, "LONG_STRING", 50)
    good = json.dumps({"text": "words " * 30})
    (tmp_path / "a.jsonl").write_text(good + "\n" + good.replace("words", r"wo\qrds") + "\n")
    with pytest.raises(SourceError, match=r"a\.jsonl, line 2: invalid JSON: Invalid \\escape"):
        texts(profile(files(tmp_path / "a.jsonl")))


def cut_after(content, batches):
    """The first batches of an arrow stream, without its end marker."""
    file = io.BytesIO(content)
    reader = pa.ipc.open_stream(file)
    for _ in range(batches):
        reader.read_next_batch()
    return content[: file.tell()]


# A frame of zstd with a window of 2 GiB and one raw block, as zstd --long=31 declares it.
LONG_WINDOW = (
    bytes.fromhex("28b52ffd 00 a8") + (len(lines(["a"])) << 3 | 1).to_bytes(3, "little") + lines(["a"])
)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines(["good"]) + b"[" * 200_000, r"a\.jsonl, line 2: JSON is nested too deeply"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz, byte 0: corrupted gzip: the file is empty"),
        (
            "a.json",
            b'[\n{"text": "a"},\n"b"]',
            r"a\.json, line 3: invalid JSON: '\]' expected around records",
        ),
        (
            "a.json",
            b'{\n"text": "a"\n}\n{\n',
            r"a\.json, line 4: invalid JSON: the end of the record is missing",
        ),
        ("a.jsonl.xz", lzma.compress(lines(DOCUMENTS))[:-99], r"a\.jsonl\.xz, after line \d+: corrupted xz"),
        ("a.jsonl.bz2", b"no bzip2", r"a\.jsonl\.bz2, after line 0: corrupted bzip2"),
        # bz2.open and lzma.open end in silence where a stream follows that is damaged at its beginning
        (
            "a.jsonl.bz2",
            bz2.compress(lines(DOCUMENTS)) + b"damaged",
            r"a\.jsonl\.bz2, after line \d+: corrupted bzip2",
        ),
        (
            "a.jsonl.xz",
            lzma.compress(lines(DOCUMENTS)) + b"damaged",
            r"a\.jsonl\.xz, after line \d+: corrupted xz",
        ),
        (
            "a.jsonl.zst",
            LONG_WINDOW,
            r"a\.jsonl\.zst: its zstd window is too large; compress it again without --long",
        ),
        ("a.csv", b"text,n\na,1,2\n", r"a\.csv, block 0: corrupted CSV: .*Expected 2 columns, got 3"),
        ("a.csv", b"text,text\na,1\n", r"a\.csv, line 1: two columns have the same name"),
        ("a.csv", b"text\n\xff\n", r"a\.csv, block 0: corrupted CSV: .*invalid UTF8"),
        ("a.csv", b"", r"a\.csv, block 0: corrupted CSV: Empty CSV file"),
        ("a.jsonl.zst", b"", r"a\.jsonl\.zst, byte 0: corrupted zstd: the file is empty"),
        ("a.jsonl.zst", zstd(lines(DOCUMENTS))[:-9], r"a\.jsonl\.zst, after line \d+: corrupted zstd"),
        ("a.jsonl.zst", b"no zstd at all", r"a\.jsonl\.zst, after line 0: corrupted zstd"),
        ("a.arrow", b"", r"a\.arrow, schema: corrupted arrow file"),
        ("a.arrow", b"no arrow at all, but long enough", r"a\.arrow, schema: corrupted arrow file"),
        ("a.arrow", b"ARROW1\0\0" + b"no more" * 9, r"a\.arrow, footer: corrupted arrow file"),
        ("a.arrow", arrow_stream()[:9000], r"a\.arrow, record batch [1-6]: corrupted arrow file"),
        (
            "a.arrow",
            cut_after(arrow_stream(), 3),
            r"a\.arrow, record batch 3: truncated: the end of the stream is missing",
        ),
        ("a.parquet", b"", r"a\.parquet, footer: corrupted parquet"),
        ("a.parquet", b"PAR1" + bytes(99) + b"PAR1", r"a\.parquet, footer: corrupted parquet"),
    ],
)
def test_corrupted_files_are_errors_with_file_and_position(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        texts(profile(files(tmp_path / name)))


def test_a_corrupted_parquet_page_is_an_error_with_its_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    options = {"compression": "zstd", "use_dictionary": False, "row_group_size": 200}
    parquet.write_table(table(), path, **options)
    second = parquet.ParquetFile(path).metadata.row_group(1).column(1)
    content = bytearray(path.read_bytes())
    low = second.data_page_offset + second.total_compressed_size // 2
    content[low : low + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"a\.parquet, row group 1, from record 0 on: corrupted parquet"):
        texts(profile(files(path)))


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_invalid_utf8_in_a_table_is_an_error_with_its_record(ending, tmp_path):
    values = [b"good", b"as good", b"bad \xff"]
    found = pa.table({"text": pa.array(values, pa.binary()).view(pa.string())})
    if ending == "parquet":
        parquet.write_table(found, tmp_path / "a.parquet", row_group_size=2)
        position = "row group 1, record 0, byte 4"
    else:
        with pa.ipc.new_stream(str(tmp_path / "a.arrow"), found.schema) as writer:
            writer.write_table(found)
        position = "record batch 0, record 2, byte 4"
    with pytest.raises(SourceError, match=rf"a\.{ending}, {position}: not UTF-8"):
        texts(profile(files(tmp_path / f"a.{ending}")))


def write_column(path, column, name="text"):
    found = pa.table({"n": pa.array(range(len(column))), name: column})
    if path.suffix == ".parquet":
        parquet.write_table(found, path, row_group_size=100)
    else:
        with pa.ipc.new_stream(str(path), found.schema) as writer:
            writer.write_table(found)


TEXT_TYPES = {
    **{
        str(kind): lambda column, kind=kind: column.cast(kind)
        for kind in (pa.large_string(), pa.string_view())
    },
    **{str(kind): lambda column, kind=kind: column.cast(kind) for kind in (pa.binary(), pa.large_binary())},
    "binary_view": lambda column: column.cast(pa.binary()).cast(pa.binary_view()),
    "dictionary": lambda column: column.dictionary_encode(),
    "dictionary of binary": lambda column: column.cast(pa.binary()).dictionary_encode(),
    "run-end encoded": pyarrow.compute.run_end_encode,
    "json": lambda column: pa.ExtensionArray.from_storage(pa.json_(), column),
}
UNREADABLE = {
    "int64": pa.array([1, 2]),
    "bool": pa.array([True, False]),
    "list<element: string>": pa.array([["a"], ["b", "c"]], pa.list_(pa.field("element", pa.string()))),
    "struct<a: string>": pa.array([{"a": "x"}, {"a": "y"}]),
    "dictionary<values=int64, indices=int32, ordered=0>": pa.array([1, 1]).dictionary_encode(),
}


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_every_column_is_read_as_text_or_rejected_by_name_and_type(ending, tmp_path):
    values = [*DOCUMENTS, None, ""]
    for number, (kind, convert) in enumerate(TEXT_TYPES.items()):
        if ending == "parquet" and kind == "run-end encoded":  # parquet has no such type
            continue
        path = tmp_path / f"{number}.{ending}"
        write_column(path, convert(pa.array(values)))
        assert joined(texts(profile(files(path)))) == values, kind
        if ending == "parquet" and "view" in kind:  # pyarrow does not write nested ones
            continue
        write_column(path, pa.StructArray.from_arrays([convert(pa.array(values))], ["b"]), "a")
        assert joined(texts(profile(files(path, text="a.b")))) == values, kind
    ids = pa.array([[3, 1], [2]], pa.list_(pa.int32()))
    write_column(tmp_path / f"ids.{ending}", ids)
    assert [
        found.values.tolist() for found in joined(texts(profile(files(tmp_path / f"ids.{ending}"))))
    ] == ids.to_pylist()
    for kind, column in UNREADABLE.items():
        path = tmp_path / f"unreadable.{ending}"
        write_column(path, column)
        message = (
            rf"data\.text = text: {re.escape(str(path))}: the column's type {re.escape(kind)} is not read"
        )
        if ending == "parquet" and "dictionary" in kind:
            message = "type int64"
        with pytest.raises(ProfileError, match=message):
            texts(profile(files(path)))


def test_long_texts_of_a_table_are_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.sources.formats.columnar.LONG_VALUE", 1 << 18)
    documents = [f"{i} naïve " + "word " * 200_000 for i in range(30)] + ["short"]
    options = {"use_dictionary": False, "write_batch_size": 1, "data_page_size": 1}
    parquet.write_table(pa.table({"text": documents}), tmp_path / "a.parquet", **options)
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        (shard,) = list_shards(profile(files(tmp_path / "a.parquet")).data)
        found = readers.documents(shard)
        assert all("".join(next(found).chunks()) == document for document in documents[:30])
        assert list(found) == ["short"]
        assert pool.max_memory() < 10_000_000  # of 30 MB
    finally:
        pa.set_memory_pool(before)


def test_a_record_with_a_lone_surrogate_counts_as_without_text(tmp_path, monkeypatch):
    good, bad = r'{"text": "a pair \ud83d\ude00", "n": "\ud800"}', r'{"text": "half a pair \ud83d"}'
    (tmp_path / "a.jsonl").write_text("\n".join([good, bad, good]))
    assert texts(profile(files(tmp_path / "a.jsonl"))) == [["a pair 😀", None, "a pair 😀"]]
    monkeypatch.setattr(readers, "LONG_FILE", 10)
    monkeypatch.setattr(readers, "LONG_STRING", 10)
    assert texts(profile(files(tmp_path / "a.jsonl"))) == [["a pair 😀", None, "a pair 😀"]]
