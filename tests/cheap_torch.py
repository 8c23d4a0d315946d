"""Makes garbage collection, Dynamo and AOTAutograd cheaper in the process that imports this module.

It also lets tests that compile without our cache of graphs find torch's libraries.
"""

import gc

from modeling.compilation.compilers import link_libraries
from modeling.start import without_garbage_collection

with without_garbage_collection():
    import torch._dynamo.guards
    import torch._dynamo.utils
    import torch._functorch._aot_autograd.graph_compile
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker

link_libraries()

# With all of torch's modules alive, Python's default of a collection every 700 allocations costs tests a tenth of their CPU time.
gc.freeze()
gc.set_threshold(50_000, 20, 100)

# Dynamo times the guards of each frame after it has emptied the CPU's caches, for a log line: a tenth of the time of a trace.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# For a log line, too, it serializes all settings of the compiler after each frame.
torch._dynamo.utils.record_compilation_metrics = lambda *_: None

# AOTAutograd prints the graphs of each region, for a log line that tests do not show: 1.5% of a compilation.
_aot = torch._functorch._aot_autograd.graph_compile
_aot._log_joint_graph = lambda *_: None
_aot._log_fw_bw_graphs = lambda *_: (None, None)

# It makes twelve tensors for a region, for random numbers of graphs, which are off: 3%.
PhiloxStateTracker.reset = classmethod(lambda cls: None)
