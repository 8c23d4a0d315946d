"""Graph compilation in a training process: the compilers behind one interface, and the cache of compiled graphs.

Start with `graph_cache.py` (which regions are compiled, cache misses and hits); `compilers.py` has inductor and
Neuron. Compiling ahead of time is `modeling.tracing`. Imports `parallel` and `profiles` only.
"""
