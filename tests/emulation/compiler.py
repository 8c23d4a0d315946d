"""The emulated device's compiler, as TorchNeuron registers it: torch.compile's backend "neuron".

A compiled program runs the operators of its captured graphs one by one, and counts as one program on the device. Its file in the
cache folder has the digest of its graph as its name, and no contents. A compiler does not see into an operator that Python
defines: what such an operator runs counts as outside of compiled programs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import functorch.compile
import torch.distributed as dist
from torch.fx import GraphModule

from modeling.compilation.manifest import describe, digest
from tests.emulation import usage
from tests.emulation.usage import Rejected, inside_compiled_program, outside_compiled_programs

REPLICA_GROUPS: dict[str, list[list[int]]] = {}
"""Ranks of all groups, by the name that collectives have in graphs; each rank's compiler must know those of all ranks."""
compiled_graphs: list[str] = []
"""Digests of the graphs that were compiled, or found in the cache folder."""
compiled_lines: list[Sequence[str]] = []
"""Their operators, as a manifest has them."""


@cache
def register_compiler() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import register_backend
    from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
    from torch._functorch import config

    class Interface(DeviceInterface):
        is_available = staticmethod(
            lambda: True
        )  # asked where Triton is installed, as CUDA builds of torch require

    register_interface_for_device("neuron", Interface)
    # Merging equal operators takes an eighth of the time of a compilation, and changes no result.
    config.cse = False
    capture = aot_autograd(
        fw_compiler=_compile,
        bw_compiler=_compile,
        partition_fn=functorch.compile.min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    register_backend(capture, name="neuron")
    package = ModuleType("torch_neuronx")
    package.__spec__ = ModuleSpec("torch_neuronx", None)
    package.get_dynamo_metrics = lambda: compiled_graphs
    registry = ModuleType("torch_neuronx.distributed.mesh_registry")
    registry._MESH_REGISTRY = REPLICA_GROUPS
    sys.modules |= {package.__name__: package, registry.__name__: registry}


def _compile(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    for node in graph.graph.nodes:
        namespace = getattr(node.target, "namespace", "")
        if namespace == "_c10d_functional" and isinstance(name := node.args[-1], str):
            ranks = sorted(rank for group in REPLICA_GROUPS.get(name, ()) for rank in group)
            if ranks != list(range(dist.get_world_size())):
                raise Rejected(f"{node.target} over {name!r}: its groups on all ranks are not known")
    if folder := os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR"):
        compiled_lines.extend(lines := describe([graph]))
        compiled_graphs.append(digest(lines))
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{compiled_graphs[-1]}.neff").touch()
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "").startswith("trainshed"):
            node.target = _opaque(node.target)
    graph.recompile()

    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        usage.record(usage.PROGRAM)
        with inside_compiled_program():
            return graph(*given)

    run._boxed_call = True
    return run


def _opaque(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with outside_compiled_programs():
            return operator(*args, **kwargs)

    return call
