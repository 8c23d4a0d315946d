"""Text for benchmarks: sources, docs and headers of the Python installation, no paragraph repeated."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

EXTENSIONS = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".js", ".html", ".css"}
MAX_FILE_BYTES = 1 << 20  # longer files are generated tables
DOCUMENT = 4000  # characters
MIN_PARAGRAPH = 40  # characters


def documents(megabytes: float) -> Iterator[str]:
    """Yield about `megabytes` MB of text in documents of about DOCUMENT characters; no paragraph repeats.

    Raises:
        ValueError: the installation has less text.
    """
    seen: set[bytes] = set()
    left = int(megabytes * 1e6)
    roots = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    for path in (path for root in roots for path in sorted(root.rglob("*"))):
        if path.suffix not in EXTENSIONS or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            continue
        document, size = [], 0
        for paragraph in path.read_text(errors="ignore").split("\n\n"):
            digest = hashlib.sha256(paragraph.strip().encode()).digest()[:12]
            if digest in seen or len(paragraph) < MIN_PARAGRAPH:
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
    raise ValueError(f"only {megabytes - left / 1e6:.0f} MB of text on this machine; lower --megabytes")
