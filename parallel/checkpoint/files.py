"""Read a checkpoint's files in full, in ranges or memory-mapped, verified by the marker's checksums.

A failed read is retried, then raised. A file counts as missing or truncated only if a listing shows it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from parallel.checkpoint import locations
from parallel.checkpoint.checksums import BLOCK, SUFFIX, BlockTable, FileDescription, checksum_table, describe

T = TypeVar("T")


class CheckpointFiles:
    """Files of a checkpoint; every method raises CorruptCheckpoint for a missing or corrupted file.

    Args:
        described: the marker's `files`; empty if the checkpoint was written without checksums.

    Attributes:
        root: path in the filesystem.
        local: whether files can be mapped.
    """

    def __init__(self, checkpoint: locations.Location, described: Mapping[str, FileDescription]) -> None:
        self._checkpoint, self._described = checkpoint, described
        self._files, self.root = locations.filesystem(checkpoint)
        self.local = locations.is_local(self._files)
        self._mapped: dict[str, torch.UntypedStorage] = {}  # by file
        self._tables: dict[str, BlockTable] = {}  # by file

    def open(self, file: str) -> None:
        """Map a local file and read its block checksums, if any; reads do so for files not opened yet."""
        if self.local:
            self.map(file)
        if described := self._described.get(file):
            table = self.read_whole(file + SUFFIX)
            if describe(int(described["size"]), table) != described:
                reason = f"corrupted: its checksum differs from {locations.MARKER}'s"
                raise locations.CorruptCheckpoint(f"{self.root}/{file}{SUFFIX}: {reason}")
            self._tables[file] = BlockTable(int(described["size"]), table)

    def map(self, file: str) -> torch.UntypedStorage:
        """A local file in memory."""
        if file not in self._mapped:
            path = Path(f"{self.root}/{file}")
            locations.require_file(self._files, str(path))

            def map_file() -> torch.UntypedStorage:
                with path.open("rb") as opened:  # its errors name the cause, torch's do not
                    size = os.fstat(opened.fileno()).st_size
                storage: Any = torch.UntypedStorage.from_file(str(path), False, size)
                return storage

            mapped = self._read(file, 0, map_file)
            expected = self._described.get(file, {}).get("size", mapped.nbytes())
            if mapped.nbytes() != expected:
                reason = f"{mapped.nbytes():,} bytes instead of {expected:,}"
                raise locations.CorruptCheckpoint(f"{path}: corrupted: {reason}")
            self._mapped[file] = mapped
        return self._mapped[file]

    def fetch(self, file: str, start: int, end: int) -> bytes | memoryview:
        """Bytes [start, end) of a file, verified if it has checksums."""
        if self.local:
            self.verify_mapped(file, start, end)
            return _bytes(self.map(file)[start:end])
        path, table = f"{self.root}/{file}", self._table(file)
        if table is None:
            return self._read(file, end, lambda: self._files.cat_file(path, start=start, end=end))
        blocks = table.blocks(start, end)
        first, last = blocks.start * BLOCK, min(blocks.stop * BLOCK, table.size)
        data = self._read(file, last, lambda: self._files.cat_file(path, start=first, end=last))
        self._verify(file, table, blocks.start, data)
        return memoryview(data)[start - first : end - first]

    def verify_mapped(self, file: str, start: int, end: int) -> None:
        """Verify a mapped file's blocks that contain bytes [start, end), once each, if it has checksums."""
        storage, table = self.map(file), self._table(file)
        if table and (blocks := table.unverified(table.blocks(start, end))):
            data = storage[blocks.start * BLOCK : min(blocks.stop * BLOCK, table.size)]
            self._verify(file, table, blocks.start, _bytes(data))

    def _table(self, file: str) -> BlockTable | None:
        """A file's block checksums; None if it was written without them."""
        if file in self._described and file not in self._tables:
            self.open(file)
        return self._tables.get(file)

    def _verify(self, file: str, table: BlockTable, first: int, data: bytes | memoryview) -> None:
        wrong = table.corrupted(first, data)
        if wrong is not None:
            reason = f"the {BLOCK >> 10} KiB from byte {wrong * BLOCK:,} differ from their checksum"
            raise locations.CorruptCheckpoint(f"{self.root}/{file}: corrupted: {reason}")

    def read_whole(self, file: str) -> bytes:
        """Contents of a small file, verified if it has a checksum."""
        path = f"{self.root}/{file}"
        locations.require_file(self._files, path)
        data = self._read(file, 0, lambda: locations.read_completely(self._files, path))
        described = self._described.get(file)
        if described and describe(len(data), checksum_table(data)) != described:
            raise locations.CorruptCheckpoint(
                f"{self.root}/{file}: corrupted: its checksum differs from {locations.MARKER}'s"
            )
        return data

    @contextmanager
    def stream(self, file: str, end: int) -> Iterator[io.RawIOBase]:
        """The first `end` bytes of a file as a seekable stream, which torch's C++ code may read.

        What reading raises is raised at the end of the block.
        """
        opened = _BlockFile(lambda first, last: self.fetch(file, first, last), end)
        try:
            yield opened
        finally:
            if opened.error:
                raise opened.error

    def _read(self, file: str, end: int, read: Callable[[], T]) -> T:
        """Retry `read`; raises CorruptCheckpoint if a listing shows the file missing or shorter than `end`."""
        path = f"{self.root}/{file}"

        def read_or_explain() -> T:
            try:
                return read()
            except Exception as error:  # of any storage
                listed = self._listed_size(file, error)
                if listed is None:
                    raise locations.CorruptCheckpoint(f"{path}: missing") from error
                if listed < end:
                    reason = f"{listed:,} bytes instead of at least {end:,}"
                    raise locations.CorruptCheckpoint(f"{path}: truncated: {reason}") from error
                raise OSError(f"{path}: {error!r}") from error

        return locations.retry_reads(path, read_or_explain)

    def _listed_size(self, file: str, error: Exception) -> int | None:
        """Listed size of a file in bytes, None if missing; raises `error` as an OSError if listing fails."""
        try:
            return locations.sizes(self._checkpoint).get(file)
        except locations.ABSENT:
            return None
        except Exception:
            raise OSError(f"{self.root}/{file}: {error!r}") from error


class _BlockFile(io.RawIOBase):
    """A seekable file over `fetch(start, end)` of entire blocks, which it caches.

    torch's reader may call Python again with the error set that a method has raised, which Python 3.13 notices as a SystemError.
    So the file ends where it cannot be read, and keeps the error.

    Args:
        size: where the file ends.

    Attributes:
        error: why it cannot be read; None if it can.
    """

    def __init__(self, fetch: Callable[[int, int], bytes | memoryview], size: int) -> None:
        self._fetch, self._size, self._position = fetch, size, 0
        self._blocks: dict[int, bytes | memoryview] = {}
        self.error: Exception | None = None

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        )
        return self._position

    def readinto(self, buffer: Any) -> int:
        filled = 0
        while filled < len(buffer) and self._position < self._size and self.error is None:
            block, skipped = divmod(self._position, BLOCK)
            if block not in self._blocks:
                try:
                    self._blocks[block] = self._fetch(block * BLOCK, min((block + 1) * BLOCK, self._size))
                except Exception as error:
                    self.error = error
                    break
            data = self._blocks[block][skipped : skipped + len(buffer) - filled]
            if not data:
                break
            buffer[filled : filled + len(data)] = data
            filled += len(data)
            self._position += len(data)
        return filled


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """A storage's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
