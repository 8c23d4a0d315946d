"""One fork server per test worker: imports torch and the trainer, then forks in milliseconds."""

import gc
import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    *("torch.distributed", "modeling.training.train", "modeling.training.evaluate"),
    *("torch._inductor.compile_fx", "modeling.tracing.compile"),  # 3 s of CPU in each process that compiles
    "tests.forkserver",  # last
]
COLLECTION = (50_000, 20, 100)
"""Allocations between garbage collections: with torch's modules alive, Python's defaults cost a tenth to a quarter of the CPU."""


def forkserver() -> ForkServerContext:
    """Context whose processes are forked from the server, which starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def collect_rarely() -> None:
    """Collect garbage rarely in this process, and never among the objects that exist now."""
    gc.freeze()
    gc.set_threshold(*COLLECTION)


collect_rarely()
