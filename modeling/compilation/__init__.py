"""Graph compilation in a training process: compilers behind one interface, and the graph cache.

Start with `graph_cache.py` (which regions are compiled, cache misses and hits); `compilers.py` has inductor and Neuron,
`manifest.py` the digests of programs that were compiled ahead of time, `toolchain.py` the test of a machine's C++ compiler.
Compiling ahead of time is `modeling.tracing`. Imports `parallel` and `profiles`.
"""
