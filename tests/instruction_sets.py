"""Probes the CPU's instruction sets for inductor: before processes that compile are forked, as each would probe them."""

from torch._inductor.cpu_vec_isa import valid_vec_isa_list

valid_vec_isa_list()
