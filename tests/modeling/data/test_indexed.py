"""Megatron indexed format: written and read as specified; corrupted files are never read as valid."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeling.data.indexed import IndexedDatasetBuilder, IndexedError, token_dtype
from tests.modeling.data.datasets import open_indexed, read_sequences

DOCUMENTS = [[1, 2, 3], [], [65499, 0], [7] * 5]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedDatasetBuilder(prefix, np.dtype(dtype)) as builder:
        for document in documents:
            builder.add_document(document)


def pack_by_hand(prefix, documents, code=8, letter="H"):
    """A pair packed field by field from the format's specification, two sequences per document."""
    sequences = [half for d in documents for half in (d[: len(d) // 2], d[len(d) // 2 :])]
    size = struct.calcsize(f"<{letter}")
    pointers = [size * sum(map(len, sequences[:i])) for i in range(len(sequences))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(s)) for s in sequences)
    index += b"".join(struct.pack("<q", p) for p in pointers)
    index += b"".join(struct.pack("<q", 2 * d) for d in range(len(documents) + 1))
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    data = b"".join(struct.pack(f"<{len(s)}{letter}", *s) for s in sequences)
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
    return sequences


def test_written_bytes_match_the_specification(tmp_path):
    write(tmp_path / "a", [[1, 2], [3]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)


@pytest.mark.parametrize(("code", "letter"), [(8, "H"), (4, "i"), (5, "q"), (1, "B")])
def test_foreign_pair_is_read(tmp_path, code, letter):
    sequences = pack_by_hand(tmp_path / "a", [[1, 2, 3, 4], [5, 6, 7]], code, letter)
    assert [s.tolist() for s in read_sequences(tmp_path / "a")] == sequences
    index, _ = open_indexed(tmp_path / "a")
    assert index.documents == 2
    assert index.document_indices.tolist() == [0, 2, 4]


@pytest.mark.parametrize("documents", [DOCUMENTS, [], [[]]])
def test_written_documents_are_read_back(tmp_path, documents):
    write(tmp_path / "a", documents)
    assert [s.tolist() for s in read_sequences(tmp_path / "a")] == documents
    index, tokens = open_indexed(tmp_path / "a")
    assert index.documents == len(documents)
    assert tokens.tolist() == [token for document in documents for token in document]
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.idx"}


def test_token_dtype_matches_megatron():
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_failed_write_leaves_no_files(tmp_path):
    with pytest.raises(ValueError, match="token id 65536 in document 1 does not fit uint16"):
        write(tmp_path / "a", [[1], [65536]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "corrupt", "message"),
    [
        ("idx", lambda b: b"PAR1" + b[4:], r"a\.idx, byte 0: is not an index"),
        ("idx", lambda b: b"", r"a\.idx, byte 0: is not an index"),
        ("idx", lambda b: b[:20], r"a\.idx, byte 20: truncated within the header"),
        ("idx", lambda b: b[:-8], r"a\.idx, byte \d+: truncated"),
        ("idx", lambda b: b + b"\0", r"a\.idx, byte \d+: too long"),
        ("idx", lambda b: b[:9] + b"\2" + b[10:], r"a\.idx, byte 9: version 2"),
        ("idx", lambda b: b[:17] + b"\6" + b[18:], r"a\.idx, byte 17: dtype code 6"),
        ("idx", lambda b: b[:34] + struct.pack("<i", -1) + b[38:], r"byte 34: entry 0 is -1"),
        ("idx", lambda b: b[:50] + struct.pack("<q", 2**62) + b[58:], r"byte 50: .*reaches outside .*a\.bin"),
        ("idx", lambda b: b[:50] + struct.pack("<q", 1) + b[58:], r"byte 50: .*not a multiple of 2"),
        ("idx", lambda b: b[:-8] + struct.pack("<q", 3), r"byte 114: .*number of sequences, 4"),
        ("bin", lambda b: b[:-2], r"reaches outside .*a\.bin, which has 18 bytes"),
        ("bin", lambda b: b[:-1], r"a\.bin, byte 19: truncated within a token"),
    ],
)
def test_corruption_is_reported_with_file_and_offset(tmp_path, name, corrupt, message):
    write(tmp_path / "a")
    path = tmp_path / f"a.{name}"
    path.write_bytes(corrupt(path.read_bytes()))
    with pytest.raises(IndexedError, match=message):
        open_indexed(tmp_path / "a")


@given(data=st.data())
def test_corrupted_pair_never_reads_outside_the_data(data, tmp_path_factory):
    """Any bytes changed, removed or added in either file: rejected, or every sequence is within the data."""
    folder = tmp_path_factory.mktemp("fuzz")
    write(folder / "a")
    path = folder / data.draw(st.sampled_from(["a.idx", "a.bin"]))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.binary(max_size=8))
        cut = len(patch) if data.draw(st.booleans()) else data.draw(st.integers(0, 8))  # half keep the size
        content[at : at + cut] = patch
        if not content:
            break
    path.write_bytes(content)
    try:
        index, _ = open_indexed(folder / "a")
    except IndexedError:
        return
    size = (folder / "a.bin").stat().st_size
    for i, sequence in enumerate(read_sequences(folder / "a")):
        assert len(sequence) == index.lengths[i]
        assert 0 <= index.pointers[i] <= size - sequence.nbytes
