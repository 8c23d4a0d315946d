"""Manifest of programs: digests of those compiled ahead of time, and how others differ from them.

A region that Dynamo captured is a program: its forward graph, and in training its backward graph, as AOTAutograd and torch's
partitioner make them of it. That is what a compiler receives, so `capture` makes it in the same way before training, under fake
tensors, and in training. A digest has no device index, rank or path. The manifest is a file of the graphs artifact.

The graphs follow from the region, but take long to make. So the manifest also has digests of regions, and training makes the
graphs only of regions that it lacks. What else decides them, such as decompositions, is not in a region: training also makes the
graphs of regions that the compiler did not find in its cache, to say what differs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from parallel.torch_internals import tree_leaves, tree_map
from profiles.files import state_files

FILE = "programs.json"  # of the graphs artifact
TEXT = 240  # characters of an operator in a message
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
Lines = Sequence[Sequence[str]]  # of each graph, a line per node


def torch_version() -> str:
    """torch's version, without the label of a build (+cpu), which machines of a run may differ in."""
    return str(torch.__version__).partition("+")[0]


@contextmanager
def without_random_state() -> Iterator[None]:
    """Partition graphs without saving the state of random numbers for recomputed operators.

    As torch's attention can apply dropout, it would be called by an operator that saves or restores this state, which needs more
    inputs and which not every compiler supports. Our dropout is stateless (parallel/random.py).
    """
    from parallel.torch_internals import partitioners

    found = partitioners.has_recomputable_rng_ops
    partitioners.has_recomputable_rng_ops = lambda graph: False
    try:
        yield
    finally:
        partitioners.has_recomputable_rng_ops = found


def capture(graph: GraphModule, inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[GraphModule]]:
    """Capture a region, and compile nothing.

    Returns:
        a function that runs the region's operators; its forward graph and, in training, its backward graph.
    """
    from functorch.compile import min_cut_rematerialization_partition

    from parallel.torch_internals import aot_autograd, functorch_config

    graphs: list[GraphModule] = []

    def record(graph: GraphModule, _: Sequence[Any]) -> GraphModule:
        graphs.append(graph)
        return graph

    partition = min_cut_rematerialization_partition
    # As compilers do: otherwise a graph would return what it writes to an input, like a graph that only computes it.
    captured = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=partition, keep_inference_input_mutations=True
    )
    with functorch_config.patch(force_non_lazy_backward_lowering=True), without_random_state():
        return captured(graph, inputs), graphs


def region_digest(name: str, graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Digest of a program's region as Dynamo captured it, 32 hex digits; equal ones, equal programs.

    That is, with the same decompositions and version of torch. Different regions may have equal programs, too: a variable's name
    is in a region, but not in its program. Whether inputs share memory is not in it, as weights do only in training; a program
    that depends on it is a miss in the compiler's cache.

    Args:
        name: the program's.
        inputs: example inputs, on which AOTAutograd would trace the region.
    """
    lines, autograd = [name], torch.is_grad_enabled()
    for x in inputs:
        found = (*_layout(x), x.device.type, x.requires_grad and autograd) if isinstance(x, Tensor) else x
        lines.append(str(found))
    for module in graph.modules():  # the region, and bodies of higher-order operators in it
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            # torch's partitioner reads the annotations of parallel/activation_checkpointing.py.
            line = f"{_line(node)} {getattr(node.target, '__module__', '')} {node.meta.get('custom')}"
            lines.append(ADDRESS.sub("", line))
    return digest([lines])


def describe(graphs: Sequence[GraphModule]) -> Lines:
    """Operators, arguments, shapes, dtypes and strides of a program, without device indices."""
    return tuple(tuple(map(_line, graph.graph.nodes)) for graph in graphs)


def digest(program: Lines) -> str:
    """Digest of a program, 32 hex digits."""
    total = hashlib.sha256()
    for lines in program:
        for line in lines:
            total.update(f"{line}\n".encode())
        total.update(b"\0")
    return total.hexdigest()[:32]


def _line(node: torch.fx.Node) -> str:
    tensors = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    arguments = tree_map(_without_index, [list(node.args), dict(node.kwargs)])
    return f"{node.name} {node.op} {node.target} {arguments} {[_layout(tensor) for tensor in tensors]}"


def _without_index(argument: Any) -> Any:
    return argument.type if isinstance(argument, torch.device) else argument


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride() if tensor.layout == torch.strided else ()


@dataclass(frozen=True)
class Captured:
    """A program, with the digest of its region."""

    name: str
    region: str
    lines: Lines

    @cached_property
    def digest(self) -> str:
        return digest(self.lines)


class Manifest:
    """Programs that were compiled ahead of time, by name and digest.

    Several programs have the same name if layers differ, such as dense ones and experts.

    Args:
        regions: digests of the programs' regions.
        torch: version that captured them; by default this process's.
    """

    def __init__(
        self,
        programs: Mapping[str, Mapping[str, Lines]],
        regions: Iterable[str] = (),
        torch: str | None = None,
    ) -> None:
        self.programs, self.regions = programs, frozenset(regions)
        self.torch = torch or torch_version()

    @classmethod
    def of(cls, programs: Iterable[Captured]) -> Manifest:
        found: dict[str, dict[str, Lines]] = {}
        regions = set()
        for program in programs:
            found.setdefault(program.name, {})[program.digest] = program.lines
            regions.add(program.region)
        return cls(found, regions)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a graphs artifact; None if it has none, or one in an earlier version's format."""
        found = json.loads(state_files.read(folder / FILE) or b"{}")
        return cls(**found) if found.keys() == {"programs", "regions", "torch"} else None

    def write(self, folder: Path) -> None:
        values = {"programs": self.programs, "regions": sorted(self.regions), "torch": self.torch}
        (folder / FILE).write_text(json.dumps(values, indent=0))

    def difference(self, name: str, program: Lines) -> str | None:
        """Where a program first differs from the most similar one of its name; None if it is in the manifest."""
        known = self.programs.get(name, {})
        if digest(program) in known:
            return None
        if not known:
            return "no program of this name was compiled ahead of time"
        return max(
            (_first_difference(program, other) for other in known.values()), key=lambda found: found[0]
        )[1]


def _first_difference(program: Lines, other: Lines) -> tuple[int, str]:
    """Number of equal lines before the first difference, and the difference as a phrase."""
    ours, theirs = (
        [(("forward", "backward")[min(i, 1)], line) for i, lines in enumerate(each) for line in lines]
        for each in (program, other)
    )
    shared = min(len(ours), len(theirs))
    first = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    here, ahead = (
        f"{lines[first][1][:TEXT]!r} ({lines[first][0]})" if first < len(lines) else "the end"
        for lines in (ours, theirs)
    )
    return first, f"operator {first + 1} is {here}, ahead of time it was {ahead}"
