"""Quarantine: what is provably corrupted is moved to `<store>/quarantine/<kind>-<key>-<n>/`, with the reason; never deleted.

A process that has mapped the files keeps them. The caller holds the lock of the artifact.
"""

from __future__ import annotations

import errno
import logging
from itertools import count

from tasks.store.backends import Backend

log = logging.getLogger(__name__)

FOLDER = "quarantine"
REASON = "reason.txt"  # beside the files


def move_to_quarantine(backend: Backend, name: str, kind: str, key: str, reason: object) -> None:
    """Move a folder of a store to the first free `quarantine/<kind>-<key>-<n>/`, with a warning that gives the reason."""
    taken = {file.partition("/")[0] for file in backend.files(FOLDER)}
    for number in count(1):
        label = f"{kind}-{key}-{number}"
        if label in taken:
            continue
        try:
            backend.move(name, f"{FOLDER}/{label}")
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # otherwise taken by another process since
                raise
            continue
        backend.write(f"{FOLDER}/{label}/{REASON}", f"{reason}\n".encode())
        where = backend.location(f"{FOLDER}/{label}")
        log.warning("%s %s: %s; moved to %s", kind, key, reason, where)
        return
