"""Block checksums of a checkpoint's files, so that a rank verifies exactly the bytes that it reads.

The checksum of a block is the sum of its 64-bit words modulo 2^64, weighted by an odd number that differs between pages: a
flipped bit changes it, as does a zeroed, misplaced or swapped page. It runs at memory speed; a cryptographic hash would take
several times as long as the load. `<file>.checksums` holds the checksums of a file's blocks, 8 bytes for each 16 KiB; the marker
holds their SHA-256, which thus covers the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from parallel.torch_internals import FileSystem

BLOCK = 1 << 14  # bytes
SUFFIX = ".checksums"
_PAGE = 512  # words
_WEIGHTS = (2 * np.arange(BLOCK // 8 // _PAGE, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)


def block_checksums(data: Any) -> np.ndarray:
    """Checksums (uint64) of the blocks of a buffer; the last block is padded with zeros."""
    content = np.frombuffer(data, np.uint8)
    whole = len(content) // BLOCK * BLOCK
    found = [_checksums(content[:whole])]
    if whole < len(content):
        padded = np.zeros(BLOCK, np.uint8)
        padded[: len(content) - whole] = content[whole:]
        found.append(_checksums(padded))
    return np.concatenate(found)


def _checksums(blocks: np.ndarray) -> np.ndarray:
    pages = blocks.view(np.uint64).reshape(-1, len(_WEIGHTS), _PAGE).sum(2)  # (blocks, pages)
    return (pages * _WEIGHTS).sum(1)


FileDescription = dict[str, int | str]
"""The marker's entry for a file: its size in bytes, and the SHA-256 of its block checksums."""


def describe(size: int, table: bytes) -> FileDescription:
    """A file's description, from its size and its block checksums."""
    return {"size": size, "checksums_sha256": hashlib.sha256(table).hexdigest()}


class RunningChecksums:
    """Block checksums of a stream of bytes; `size` counts them."""

    def __init__(self) -> None:
        self.size = 0
        self._found: list[np.ndarray] = []
        self._rest = bytearray()  # of an unfinished block

    def update(self, data: Any) -> None:
        content = memoryview(data).cast("B")
        self.size += len(content)
        if self._rest:
            missing = BLOCK - len(self._rest)
            self._rest += content[:missing]
            content = content[missing:]
            if len(self._rest) < BLOCK:
                return
            self._found.append(block_checksums(self._rest))
            self._rest = bytearray()
        whole = len(content) // BLOCK * BLOCK
        if whole:
            self._found.append(block_checksums(content[:whole]))
        self._rest += content[whole:]

    def table(self) -> bytes:
        """The checksums of all blocks, in the format of a checksum file."""
        return np.concatenate([*self._found, block_checksums(self._rest)]).astype("<u8").tobytes()


def checksum_table(data: bytes) -> bytes:
    """The block checksums of a file with this content, in the format of a checksum file."""
    return block_checksums(data).astype("<u8").tobytes()


class ChecksumStream:
    """A binary file being written, with the checksums of its contents so far."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.checksums = RunningChecksums()

    def write(self, data: Any) -> int:
        self.checksums.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        # After a failure torch's wrapper flushes again when it is deleted, and Python 3.13 prints what that raises.
        if not self._stream.closed:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ChecksumFileSystem(FileSystem):
    """DCP's file system, with the checksums of every file written through it, by path."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, RunningChecksums] = {}

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = ChecksumStream(stream)
            yield summed
        self.written[str(path)] = summed.checksums


class BlockTable:
    """Expected checksums of one file's blocks, and which of them were verified.

    Args:
        size: of the file in bytes.
        table: contents of its checksum file.
    """

    def __init__(self, size: int, table: bytes) -> None:
        self.size = size
        self._expected = np.frombuffer(table, "<u8")
        self._verified = np.zeros(len(self._expected), bool)

    @staticmethod
    def blocks(start: int, end: int) -> range:
        """The blocks that contain bytes [start, end)."""
        return range(start // BLOCK, -(-end // BLOCK))

    def corrupted(self, first: int, data: Any) -> int | None:
        """Index of the first corrupted block among these contents, from block `first` on; None if intact."""
        found = block_checksums(data)
        expected = self._expected[first : first + len(found)]
        if len(expected) < len(found):
            return first + len(expected)
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            return first + int(wrong[0])
        self._verified[first : first + len(found)] = True
        return None

    def unverified(self, blocks: range) -> range:
        """The span of the blocks that were not verified yet."""
        missing = np.flatnonzero(~self._verified[blocks.start : blocks.stop])
        if not len(missing):
            return range(0)
        return range(blocks.start + int(missing[0]), blocks.start + int(missing[-1]) + 1)
