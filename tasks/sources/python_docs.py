"""English text about Python that comes with Trainshed, the same on every machine: 1.2 MB.

Each of 498 documents has paragraphs of one topic of Python's language reference, or of the docstrings of one module of its
standard library in source order, a paragraph per line; no paragraph appears twice. `text/python-docs.license.txt` has the origin
and the license.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tasks.sources.shard import SourceError

FILE = Path(__file__).parent / "text/python-docs.jsonl.gz"
# The file's sha256, so that nobody trains on another text without noticing.
DIGEST = "fe6bd7dc370a31b39f2c5bb9a8c0c62d9577248e74398a4146727611c18d4503"
# Names of classes and functions, empty for a module or a topic, and what is said of them.
Texts = list[tuple[str, str]]


def documents() -> Iterator[str]:
    """Topics by name, then modules by path. Raises SourceError for a corrupted file."""
    for _, texts in _read(FILE):
        yield "\n".join(text for _, text in texts)


def records() -> Iterator[dict[str, str]]:
    """Fine-tuning records: what a module, class or function does, answered by its first paragraph.

    The rejected answer ends after half of its words.
    """
    before = None
    for module, texts in _read(FILE):
        for name, text in texts:
            answer = text.partition("\n")[0]
            if not 20 <= len(answer) <= 400 or answer == before:
                continue
            words = answer.split()
            half = " ".join(words[: max(1, len(words) // 2)])
            prompt = f"What does {'.'.join(filter(None, (module, name)))} do?\n"
            yield {"prompt": prompt, "completion": answer, "chosen": answer, "rejected": half}
            before = answer


@cache
def _read(file: Path) -> list[tuple[str, Texts]]:
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != DIGEST:
            raise SourceError(f"{file}: differs from the text of this version; install Trainshed again")
        return [json.loads(line) for line in gzip.decompress(data).splitlines()]
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{file}: cannot be read: {error}; install Trainshed again") from error
