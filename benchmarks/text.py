"""Text for benchmarks: what a Python installation holds of sources, notes and headers, each paragraph once.

from benchmarks.text import documents
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ENDINGS = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".js", ".html", ".css"}
LONGEST = 1 << 20  # bytes of a file: longer ones are generated tables
DOCUMENT = 4000  # characters


def documents(megabytes: float) -> Iterator[str]:
    """About so much text in documents of about DOCUMENT characters, no paragraph of which stands in it twice.

    Raises:
        ValueError: this installation holds less.
    """
    seen: set[bytes] = set()
    left = int(megabytes * 1e6)
    roots = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    for path in (path for root in roots for path in sorted(root.rglob("*"))):
        if path.suffix not in ENDINGS or not path.is_file() or path.stat().st_size > LONGEST:
            continue
        document, size = [], 0
        for paragraph in path.read_text(errors="ignore").split("\n\n"):
            digest = hashlib.sha256(paragraph.strip().encode()).digest()[:12]
            if digest in seen or len(paragraph) < 40:
                continue
            seen.add(digest)
            document.append(paragraph)
            size += len(paragraph) + 2
            if size >= DOCUMENT:
                yield "\n\n".join(document)
                left -= size
                document, size = [], 0
            if left <= 0:
                return
        if document:
            yield "\n\n".join(document)
            left -= size
    raise ValueError(f"there is {megabytes - left / 1e6:.0f} MB of text here; ask for less")
