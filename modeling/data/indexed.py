"""Megatron's indexed format, version 1: token sequences in `<prefix>.bin`, where each lies in `<prefix>.idx`.

    .bin   token ids of all sequences, one after another
    .idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences S u64 | document indices D u64
           | lengths int32[S], tokens | pointers int64[S], bytes into .bin | document indices int64[D]
    (little endian; document d is the sequences [indices[d], indices[d+1]), so D is the documents + 1)

Writing holds four bytes a document in memory, reading none: everything is mapped. Format: Megatron-LM,
megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}  # 6 and 7 are floats, which no token is
CODES = {dtype: code for code, dtype in DTYPES.items()}
TOGETHER = 1 << 20  # entries of an index that are checked together


class IndexedError(ValueError):
    """A `.bin`/`.idx` pair that is not what its format says; the message names the file and the byte offset."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        super().__init__(f"{path}, byte {offset}: {reason}")


class Header(NamedTuple):
    """What the first 34 bytes of an `.idx` say."""

    dtype: np.dtype
    sequences: int
    document_indices: int


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The dtype that Megatron stores tokens of this vocabulary in: uint16 below 65500 of them, else int32."""
    return DTYPES[8] if vocabulary_size < 65500 else DTYPES[4]


def data_path(prefix: str | Path) -> Path:
    """`<prefix>.bin`, the tokens."""
    return Path(f"{prefix}.bin")


def index_path(prefix: str | Path) -> Path:
    """`<prefix>.idx`, where each sequence lies."""
    return Path(f"{prefix}.idx")


def read_header(prefix: str | Path) -> Header:
    """The checked header of `<prefix>.idx`, in constant time.

    Raises:
        IndexedError: not this format, or a size other than the header's counts make.
        FileNotFoundError: no such file.
    """
    path = index_path(prefix)
    with open(path, "rb") as file:
        start = file.read(HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if start[: len(MAGIC)] != MAGIC:
        raise IndexedError(path, 0, f"is not an index of Megatron's format: begins with {start[:9]!r}")
    if len(start) < HEADER.size:
        raise IndexedError(path, size, f"truncated within the header of {HEADER.size} bytes")
    _, version, code, sequences, document_indices = HEADER.unpack(start)
    if version != 1:
        raise IndexedError(path, 9, f"version {version}; only version 1 is known")
    if code not in DTYPES:
        raise IndexedError(path, 17, f"dtype code {code}; token dtypes are {sorted(DTYPES)}")
    expected = HEADER.size + 12 * sequences + 8 * document_indices
    if size != expected:
        fault = "truncated" if size < expected else "too long"
        reason = f"{sequences} sequences and {document_indices} document indices take {expected} bytes"
        raise IndexedError(path, min(size, expected), f"{fault}: {reason}, the file has {size}")
    return Header(DTYPES[code], sequences, document_indices)


def map_tokens(prefix: str | Path, dtype: np.dtype) -> np.ndarray:
    """`<prefix>.bin` mapped as one flat array of tokens.

    Raises:
        IndexedError: the file does not hold whole tokens.
    """
    path = data_path(prefix)
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise IndexedError(path, size, f"truncated within a token of {dtype.itemsize} bytes")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)  # an empty file cannot be mapped


class Arrays(NamedTuple):
    """An `.idx`, mapped and unchecked.

    Attributes:
        lengths: (sequences) int32, tokens in each.
        pointers: (sequences) int64, bytes into `.bin` where each starts.
        document_indices: (documents + 1) int64, the sequence that each document starts with.
        pages: of all of them.
    """

    lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray
    pages: mmap.mmap


def map_index(prefix: str | Path, header: Header) -> Arrays:
    """The arrays of `<prefix>.idx`."""
    with index_path(prefix).open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    at, arrays = HEADER.size, []
    counts = header.sequences, header.sequences, header.document_indices
    for dtype, count in zip(("<i4", "<i8", "<i8"), counts, strict=True):
        arrays.append(np.frombuffer(pages, dtype, count, at) if count else np.empty(0, dtype))
        at += arrays[-1].nbytes
    return Arrays(*arrays, pages)


class Index:
    """A mapped `.idx`, checked as a whole when opened: no sequence can reach outside the data.

    Args:
        prefix: of the pair; only its `.idx` is read.
        size: bytes of the pair's `.bin`.

    Attributes:
        dtype: of the tokens.
        lengths: (sequences), tokens in each.
        pointers: (sequences), bytes into `.bin` where each starts.
        document_indices: (documents + 1), the sequence that each document starts with.

    Raises:
        IndexedError: truncated, foreign or damaged.
        FileNotFoundError: no such file.
    """

    def __init__(self, prefix: str | Path, size: int) -> None:
        header = read_header(prefix)
        self.dtype, sequences, document_indices = header
        path = index_path(prefix)
        if not document_indices:
            raise IndexedError(path, 26, "no document indices; even an empty index holds the number 0")
        self.lengths, self.pointers, self.document_indices, self._pages = map_index(prefix, header)

        def refuse(wrong: np.ndarray, start: int, first: int, values: np.ndarray, reason: str) -> None:
            if wrong.any():
                i = int(wrong.argmax())
                at = start + (first + i) * values.itemsize
                raise IndexedError(path, at, f"entry {first + i} is {values[i]}: {reason}")

        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        outside = f"the sequence reaches outside {data_path(prefix)}, which has {size} bytes"
        for part in self.parts(sequences):
            lengths, pointers = self.lengths[part], self.pointers[part]
            refuse(lengths < 0, lengths_at, part.start, lengths, "a sequence's length cannot be negative")
            past = (pointers < 0) | (pointers > size - lengths.astype(np.int64) * self.dtype.itemsize)
            refuse(past, pointers_at, part.start, pointers, outside)
            misaligned = pointers % self.dtype.itemsize != 0
            reason = f"not a multiple of {self.dtype.itemsize} bytes"
            refuse(misaligned, pointers_at, part.start, pointers, reason)
        reason = f"document indices rise from 0 to the number of sequences, {sequences}"
        before = 0
        for part in self.parts(document_indices):
            indices = self.document_indices[part]
            wrong = np.diff(indices, prepend=before) < 0
            if part.start == 0:
                wrong[0] = indices[0] != 0
            if part.stop == document_indices:
                wrong[-1] |= indices[-1] != sequences
            refuse(wrong, documents_at, part.start, indices, reason)
            before = indices[-1]

    def parts(self, count: int) -> Iterator[slice]:
        """[0, count) as slices to look at one after another; what was looked at does not stay in memory."""
        for start in range(0, count, TOGETHER):
            yield slice(start, min(start + TOGETHER, count))
            self._pages.madvise(mmap.MADV_DONTNEED)

    @property
    def documents(self) -> int:
        return len(self.document_indices) - 1


class IndexedDataset(Index, Sequence[np.ndarray]):
    """A mapped `.bin`/`.idx` pair, checked as a whole when opened.

    Attributes:
        tokens: (size of the data), all tokens, flat.

    Raises:
        IndexedError: a truncated, foreign or damaged pair.
        FileNotFoundError: one of the two is missing.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.tokens = map_tokens(prefix, read_header(prefix).dtype)
        super().__init__(prefix, self.tokens.nbytes)

    def __len__(self) -> int:
        """Sequences."""
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:  # type: ignore[override]
        """Tokens (length) of sequence i, a view of the mapped file."""
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[i])]


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair as a stream, a sequence a document; a context manager.

    Both files appear under their names when the block ends without an exception, and neither where it does not.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.lengths = array("i")
        self.tokens = 0
        self._partial = Path(f"{data_path(prefix)}.partial")
        self._data = open(self._partial, "wb")  # noqa: SIM115  discard closes it

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document of token ids.

        Raises:
            ValueError: an id that the dtype cannot hold.
        """
        ids = np.asarray(tokens)
        self.add_documents(ids, np.array([ids.size]))

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents whose ids follow each other; lengths (documents)."""
        self.extend(ids)
        self.lengths.extend(lengths.tolist())

    def extend(self, ids: np.ndarray) -> None:
        """Append ids of a document that `end_document` will end."""
        limits = np.iinfo(self.dtype)
        if ids.size and (ids.min() < limits.min or ids.max() > limits.max):
            wrong = int(ids.min() if ids.min() < limits.min else ids.max())
            raise ValueError(f"token id {wrong} in document {len(self.lengths)} does not fit {self.dtype}")
        self._data.write(ids.astype(self.dtype, copy=False).tobytes())
        self.tokens += ids.size

    def end_document(self, length: int) -> None:
        """End the document of the `length` ids that were appended last."""
        self.lengths.append(length)

    def finish(self) -> None:
        """Write the index and give both files their names, the index last."""
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
        """Leave no partial file behind."""
        self._data.close()
        for path in self._partial, Path(f"{index_path(self.prefix)}.partial"):
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
