"""One fork server per test worker: imports torch and the trainer, then forks in milliseconds.

Importing this module also makes garbage collection, Dynamo and AOTAutograd cheaper in the process that does.
"""

import gc
import multiprocessing
from multiprocessing.context import ForkServerContext

from modeling.start import without_garbage_collection

with without_garbage_collection():
    import torch._dynamo.guards
    import torch._dynamo.utils
    import torch._functorch._aot_autograd.graph_compile
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker

PRELOADED = [
    "tests.forkserver",  # first, so that the rest is imported with few collections
    *("torch.distributed", "modeling.training.train", "modeling.training.evaluate"),
    *("tests.forked_jobs", "torch.utils.tensorboard", "numpy.ma"),  # of each job
    "s3fs",  # of those that read or write S3
    *("torch._inductor.compile_fx", "modeling.tracing.compile"),  # 3 s of CPU in each process that compiles
    "tests.instruction_sets",  # 1 s
    *("torch.distributed.pipelining", "tests.parity.harness"),  # of most ranks of tests/pool.py
    "tests.frozen",  # last
]


# Once: the server starts with the first process that anything forks.
multiprocessing.set_forkserver_preload(PRELOADED)


def forkserver() -> ForkServerContext:
    """Context whose processes are forked from the server."""
    return multiprocessing.get_context("forkserver")


# With all of torch's modules alive, Python's default of a collection every 700 allocations costs tests a tenth of their CPU time.
gc.freeze()
gc.set_threshold(50_000, 20, 100)

# Dynamo times the guards of each frame after it has emptied the CPU's caches, for a log line: a tenth of the time of a trace.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# For a log line, too, it serializes all settings of the compiler after each frame.
torch._dynamo.utils.record_compilation_metrics = lambda *_: None

# AOTAutograd prints the graphs of each region, for a log line that nobody reads: 1.5% of a compilation.
_aot = torch._functorch._aot_autograd.graph_compile
_aot._log_joint_graph = lambda *_: None
_aot._log_fw_bw_graphs = lambda *_: (None, None)

# It makes twelve tensors for a region, for random numbers of graphs, which are off: 3%.
PhiloxStateTracker.reset = classmethod(lambda cls: None)
