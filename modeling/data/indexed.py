"""Megatron's indexed dataset format, version 1: tokens in `<prefix>.bin`, offsets in `<prefix>.idx`.

    .bin   token ids of all sequences, concatenated
    .idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences S u64 | document indices D u64
           | lengths int32[S], in tokens | pointers int64[S], byte offsets in .bin | document indices int64[D]
    (little endian; document d is the sequences [indices[d], indices[d+1]), so D is the number of documents + 1)

Writing takes four bytes of memory per document; reading takes none, since everything is memory-mapped. Format: Megatron-LM,
megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from profiles.files import state_files

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point
DTYPES = {code: np.dtype(name) for code, name in _TYPES.items()}
CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK = 1 << 20  # index entries validated at a time
MAX_LENGTH = 2**31 - 1  # tokens in a sequence, whose length is an int32


class IndexedError(ValueError):
    """A `.bin`/`.idx` pair that violates its format; the message names the file and the byte offset."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        super().__init__(f"{path}, byte {offset}: {reason}")


class Header(NamedTuple):
    """The first 34 bytes of an `.idx`, decoded."""

    dtype: np.dtype
    sequences: int
    document_indices: int


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Megatron's token dtype for a vocabulary: uint16 below 65500 tokens, else int32."""
    return DTYPES[8] if vocabulary_size < 65500 else DTYPES[4]


def data_path(prefix: str | Path) -> Path:
    """`<prefix>.bin`, the token ids."""
    return Path(f"{prefix}.bin")


def index_path(prefix: str | Path) -> Path:
    """`<prefix>.idx`, the offsets of the sequences."""
    return Path(f"{prefix}.idx")


def read_header(prefix: str | Path) -> Header:
    """The validated header of `<prefix>.idx`, in constant time.

    Raises:
        IndexedError: not this format, or the file's size contradicts the header.
        FileNotFoundError: no such file.
    """
    path = index_path(prefix)
    start = state_files.retried(lambda: state_files.read_once(path, HEADER.size))
    size = state_files.retried(path.stat).st_size
    if start[: len(MAGIC)] != MAGIC:
        raise IndexedError(path, 0, f"is not an index of Megatron's format: starts with {start[:9]!r}")
    if len(start) < HEADER.size:
        raise IndexedError(path, size, f"truncated within the header of {HEADER.size} bytes")
    _, version, code, sequences, document_indices = HEADER.unpack(start)
    if version != 1:
        raise IndexedError(path, 9, f"version {version}; only version 1 is supported")
    if code not in DTYPES:
        raise IndexedError(path, 17, f"dtype code {code}; token dtypes are {sorted(DTYPES)}")
    expected = HEADER.size + 12 * sequences + 8 * document_indices
    if size != expected:
        problem = "truncated" if size < expected else "too long"
        reason = f"{sequences} sequences and {document_indices} document indices take {expected} bytes"
        raise IndexedError(path, min(size, expected), f"{problem}: {reason}, the file has {size}")
    return Header(DTYPES[code], sequences, document_indices)


def map_tokens(prefix: str | Path, dtype: np.dtype) -> np.ndarray:
    """`<prefix>.bin` memory-mapped as a flat token array. Raises IndexedError if it ends within a token."""
    path = data_path(prefix)
    size = state_files.retried(path.stat).st_size
    if size % dtype.itemsize:
        raise IndexedError(path, size, f"truncated within a token of {dtype.itemsize} bytes")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)  # an empty file cannot be mapped


class IndexArrays(NamedTuple):
    """The arrays of an `.idx`, memory-mapped and not validated."""

    lengths: np.ndarray  # (sequences) int32, tokens in each
    pointers: np.ndarray  # (sequences) int64, byte offset of each in `.bin`
    document_indices: np.ndarray  # (documents + 1) int64, the sequence that each document starts with
    mapping: mmap.mmap  # of the file


def map_index(prefix: str | Path, header: Header) -> IndexArrays:
    """Memory-map the arrays of `<prefix>.idx`."""
    with index_path(prefix).open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    offset, arrays = HEADER.size, []
    counts = header.sequences, header.sequences, header.document_indices
    for dtype, count in zip(("<i4", "<i8", "<i8"), counts, strict=True):
        arrays.append(np.frombuffer(mapping, dtype, count, offset) if count else np.empty(0, dtype))
        offset += arrays[-1].nbytes
    lengths, pointers, document_indices = arrays
    return IndexArrays(lengths, pointers, document_indices, mapping)


class Index:
    """A memory-mapped `.idx`, fully validated when opened: no sequence can reach outside the data.

    Args:
        prefix: path of the pair without suffix; only its `.idx` is read.
        size: bytes of the pair's `.bin`.

    Attributes:
        dtype: dtype of the tokens.
        lengths: (sequences) tokens in each.
        pointers: (sequences) byte offset of each in `.bin`.
        document_indices: (documents + 1) the sequence that each document starts with.

    Raises:
        IndexedError: the file is truncated, corrupted or of another format.
        FileNotFoundError: no such file.
    """

    def __init__(self, prefix: str | Path, size: int) -> None:
        header = read_header(prefix)
        self.dtype, sequences, document_indices = header
        path = index_path(prefix)
        if not document_indices:
            raise IndexedError(path, 26, "no document indices; even an empty index has one, 0")
        self.lengths, self.pointers, self.document_indices, self._mapping = map_index(prefix, header)

        def reject(invalid: np.ndarray, base: int, first: int, values: np.ndarray, reason: str) -> None:
            if invalid.any():
                i = int(invalid.argmax())
                offset = base + (first + i) * values.itemsize
                raise IndexedError(path, offset, f"entry {first + i} is {values[i]}: {reason}")

        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        outside = f"the sequence reaches outside {data_path(prefix)}, which has {size} bytes"
        for chunk in self.chunks(sequences):
            lengths, pointers = self.lengths[chunk], self.pointers[chunk]
            reject(lengths < 0, lengths_at, chunk.start, lengths, "a sequence's length cannot be negative")
            past = (pointers < 0) | (pointers > size - lengths.astype(np.int64) * self.dtype.itemsize)
            reject(past, pointers_at, chunk.start, pointers, outside)
            misaligned = pointers % self.dtype.itemsize != 0
            reason = f"not a multiple of {self.dtype.itemsize} bytes"
            reject(misaligned, pointers_at, chunk.start, pointers, reason)
        reason = f"document indices must rise from 0 to the number of sequences, {sequences}"
        before = 0
        for chunk in self.chunks(document_indices):
            indices = self.document_indices[chunk]
            invalid = np.diff(indices, prepend=before) < 0
            if chunk.start == 0:
                invalid[0] = indices[0] != 0
            if chunk.stop == document_indices:
                invalid[-1] |= indices[-1] != sequences
            reject(invalid, documents_at, chunk.start, indices, reason)
            before = indices[-1]

    def chunks(self, count: int) -> Iterator[slice]:
        """[0, count) in consecutive slices; each slice's pages are released from memory after use."""
        for start in range(0, count, CHUNK):
            yield slice(start, min(start + CHUNK, count))
            self._mapping.madvise(mmap.MADV_DONTNEED)

    @property
    def documents(self) -> int:
        return len(self.document_indices) - 1


class IndexedDatasetBuilder:
    """Context manager that writes a `.bin`/`.idx` pair incrementally, one sequence per document.

    Both files appear when the block ends without an exception, neither if it raises.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.lengths = array("i")
        self.tokens = 0
        self._partial = Path(f"{data_path(prefix)}.partial")
        self._data = open(self._partial, "wb")  # noqa: SIM115  closed by finish or discard

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document of token ids. Raises ValueError if one does not fit the dtype."""
        ids = np.asarray(tokens)
        self.add_documents(ids, np.array([ids.size]))

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of these lengths (documents) whose ids are concatenated."""
        self.extend(ids)
        self.lengths.extend(lengths.tolist())

    def extend(self, ids: np.ndarray) -> None:
        """Append ids to a document, which `end_document` completes."""
        limits = np.iinfo(self.dtype)
        if ids.size and (ids.min() < limits.min or ids.max() > limits.max):
            invalid = int(ids.min() if ids.min() < limits.min else ids.max())
            raise ValueError(f"token id {invalid} in document {len(self.lengths)} does not fit {self.dtype}")
        self._data.write(ids.astype(self.dtype, copy=False).tobytes())
        self.tokens += ids.size

    def end_document(self, length: int) -> None:
        """Complete the document of the last `length` ids."""
        self.lengths.append(length)

    def finish(self) -> None:
        """Write the index and move both files into place, the index last."""
        _sync_and_close(self._data)
        lengths = np.frombuffer(self.lengths, np.int32) if self.lengths else np.empty(0, np.int32)
        count = len(lengths)
        partial = Path(f"{index_path(self.prefix)}.partial")
        with open(partial, "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], count, count + 1))
            file.write(lengths.astype("<i4").tobytes())
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            file.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())
            _sync_and_close(file)
        self._partial.replace(data_path(self.prefix))
        partial.replace(index_path(self.prefix))

    def discard(self) -> None:
        """Delete partial files."""
        self._data.close()
        for path in self._partial, Path(f"{index_path(self.prefix)}.partial"):
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
