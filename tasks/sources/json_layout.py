"""JSON files that are not JSON Lines: an array of records, or records that span several lines.

Strings contain no line breaks in JSON, so both are cut into records line by line, at the brackets outside strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from tasks.sources.shard import SourceError

Line = tuple[Callable[[], str], bytes]  # function that describes its position, and its contents
BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|([\[{])|[\]}]')


def is_lines(start: bytes) -> bool:
    """Whether a file that starts like this is JSON Lines: one record per line."""
    first, newline, _ = start.lstrip().partition(b"\n")
    first = first.rstrip()
    if first.startswith(b"["):
        return False
    # A record that continues on the next line is cut after a bracket, a colon or a comma; a damaged line may end anywhere.
    return not (newline and first.startswith(b"{") and first[-1:] in b"{[:,")


def records(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines of a file, or, if it is not JSON Lines, its records, located by their first line.

    Raises SourceError if anything but records is in it.
    """
    lines = iter(lines)
    start = []
    for line in lines:
        start.append(line)
        if not line[1].isspace():
            break
    whole = chain(start, lines)
    if not start or is_lines(start[-1][1]):
        return whole
    return _cut(whole, is_array=start[-1][1].lstrip().startswith(b"["))


def _cut(lines: Iterable[Line], is_array: bool) -> Iterator[Line]:
    base = int(is_array)  # depth of brackets at which records are
    depth, count = 0, 0
    record: list[bytes] = []  # what was read of a record
    outside = b""  # what was read since the last one
    locate: Callable[[], str] = str
    begin = locate
    for locate, line in lines:
        position = 0
        for match in BRACKET.finditer(line):
            if match[0].startswith(b'"'):
                continue
            if match[1] and depth == base:
                _require(outside + line[position : match.start()], (b"," if count else b"[") * base, locate)
                position, outside, begin = match.start(), b"", locate
            depth += 1 if match[1] else -1
            if not match[1] and depth == base:
                yield begin, b"".join([*record, line[position : match.end()]])
                record, position, count = [], match.end(), count + 1
        if depth > base:
            record.append(line[position:])
        else:
            outside += line[position:]
    if record:
        raise SourceError(f"{begin()}: invalid JSON: the end of the record is missing")
    _require(outside, (b"]" if count else b"[]") * base, locate)


def _require(outside: bytes, wanted: bytes, locate: Callable[[], str]) -> None:
    """Raise SourceError unless this, apart from spaces, is what must be between two records."""
    if (found := b"".join(outside.split())) != wanted:
        reason = f"{wanted.decode()!r} expected around records, not {found[:40].decode(errors='replace')!r}"
        raise SourceError(f"{locate()}: invalid JSON: {reason}; the records must be JSON objects")
