"""Import a module without garbage collection, run its `main`: `python -m modeling.start MODULE ...`

Imported objects live as long as the process, and scanning them for garbage takes a fifth of torch's start-up time.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Iterator
from importlib import import_module

from profiles.files import exit_codes


def replace_unencodable() -> None:
    """Write ? for characters that the standard streams' encoding lacks, as with PYTHONIOENCODING=latin-1."""
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block, and exempt objects alive at its end from later ones."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    replace_unencodable()
    # As torchrun sets it for several ranks, but before they inherit torch. Job modules set the number of torch's threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with without_garbage_collection():
        module = import_module(sys.argv[0])
    exit_codes.leave(exit_codes.code_of(module.main))
