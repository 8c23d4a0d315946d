"""Probes the CPU's instruction sets for inductor, once for all processes that are forked later."""

from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from modeling.compilation.toolchain import cpp_compiler

if cpp_compiler():
    valid_vec_isa_list()
