"""Keep one architecture's code in an NCCL library, so that it compresses to a size that travels.

Device code lies in fat binaries: a header of 16 bytes, then entries, each with its own header and an image. The driver loads the
image of its own architecture only, so that those of others may be zeros.
"""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries
ENTRY = struct.Struct("<HHIQ")  # kind, attributes, bytes of the entry's header, bytes of its image
ARCHITECTURE = 28  # offset in an entry's header, uint32
CUBIN = 2  # kind of compiled code; 1 is PTX


class Image(NamedTuple):
    """Code of one architecture in a fat binary."""

    kind: int
    architecture: int
    start: int
    end: int


def images(library: bytes | mmap.mmap) -> Iterator[Image]:
    """All images of a library, in order."""
    at = library.find(MAGIC)
    while at >= 0:
        _, _, header, size = HEADER.unpack_from(library, at)
        entry, end = at + header, at + header + size
        if header != HEADER.size or end > len(library):
            at = library.find(MAGIC, at + 4)  # the same four bytes by chance
            continue
        while entry < end:
            kind, _, length, image = ENTRY.unpack_from(library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + ARCHITECTURE)
            yield Image(kind, architecture, entry + length, entry + length + image)
            entry += length + image
        at = library.find(MAGIC, end)


def slim(source: Path, target: Path, keep: int) -> int:
    """Copy a library without the code of other architectures; returns the bytes of code kept."""
    shutil.copyfile(source, target)
    kept = 0
    with target.open("r+b") as file, mmap.mmap(file.fileno(), 0) as library:
        for image in [*images(library)]:
            if (image.kind, image.architecture) == (CUBIN, keep):
                kept += image.end - image.start
            else:
                library[image.start : image.end] = bytes(image.end - image.start)
    return kept
