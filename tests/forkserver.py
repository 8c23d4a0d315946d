"""One fork server per test worker: imports torch and the trainer, then forks in milliseconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    *("torch.distributed", "modeling.training.train", "modeling.training.evaluate"),
    *("torch._inductor.compile_fx", "modeling.tracing.compile"),  # 3 s of CPU in each process that compiles
]


def forkserver() -> ForkServerContext:
    """Context whose processes are forked from the server, which starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
