"""Tracing without a device: `python -m modeling.tracing.trace --run-folder RUN --output FILE`, no weights, no cluster.

Every stage of the pipeline is built in its real size under fake tensors (which have shapes and no memory) and a fake process
group of the run's real world size, and runs forward for training and for evaluation. Regions are captured as training captures
them, by Dynamo and AOTAutograd, so what is counted is what will be compiled:

    stages -> regions in two modes -> forward and backward graphs -> the distinct programs, by digest

Layers that are alike share a capture, stages and ranks share digests; a rank's number in a graph would show as another digest.
What the graphs and autograd keep is summed up on the way (figures.py): it replaces the planner's estimates.

Cost: about 4 s a profile and 0.3 s a pipeline stage, under 1 GB, whatever the model's size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from modeling.compilation.graph_cache import Backend, compile_regions, compiled_update, program_name
from modeling.models.build import DTYPES, build_mesh, build_stage, partition_layers
from modeling.tracing import graph_stats
from parallel import Mesh
from parallel import device as devices
from parallel.attention.ring import zigzag_positions
from parallel.optimizer.adamw import TILE
from parallel.random import sample_keys
from profiles.resolve import load
from profiles.schema import Profile

log = logging.getLogger("trainshed")


@dataclass(frozen=True)
class Traced:
    """A distinct program.

    Attributes:
        name: region and mode, "block, training".
        digest: of its graphs, the same on every rank and in every process.
        stage: the first pipeline stage that runs it.
        graphs: what figures.py knows of each: its forward, and its backward where there is one.
    """

    name: str
    digest: str
    stage: int
    graphs: tuple[graph_stats.Graph, ...]


@dataclass(frozen=True)
class Trace:
    """A run's distinct programs, and each stage's figures."""

    programs: tuple[Traced, ...]
    stages: tuple[graph_stats.Stage, ...]

    @property
    def graphs(self) -> int:
        """Distinct graphs in all."""
        return sum(len(traced.graphs) for traced in self.programs)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def trace(profile: Profile, place: int = 0) -> Trace:
    """Trace a checked profile.

    Args:
        place: which rank of each stage to see it as, of data × context × tensor.
    """
    recorder = Recorder()
    distinct: dict[tuple[str, str], Traced] = {}
    stages = []
    torch.compiler.reset()  # so that everything is captured here, and once
    fake = FakeTensorMode()
    for number, layers in enumerate(partition_layers(profile)):
        before = len(recorder.programs)
        kept, last = run_stage(profile, number, recorder.backend, fake, place)
        for name, graphs in recorder.programs[before:]:
            found = Traced(name, graph_stats.digest(graphs), number, tuple(map(graph_stats.of, graphs)))
            distinct.setdefault((name, found.digest), found)
        peaks = [
            graph.peak
            for traced in distinct.values()
            if last or not traced.name.startswith("loss")
            for graph in traced.graphs
        ]
        stages.append(graph_stats.Stage((layers.start, layers.stop), kept, max(peaks)))
    torch.compiler.reset()
    return Trace(tuple(distinct[key] for key in sorted(distinct)), tuple(stages))


class Recorder:
    """torch.compile's backend that keeps the graphs it is given, and compiles nothing."""

    def __init__(self) -> None:
        self.programs: list[tuple[str, list[GraphModule]]] = []
        self._backends: dict[str, Backend] = {}

    def backend(self, region: str) -> Backend:
        return self._backends.setdefault(region, lambda graph, inputs: self._record(region, graph, inputs))

    def _record(self, region: str, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        import torch._functorch.config as functorch
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        graphs: list[GraphModule] = []
        self.programs.append((program_name(region), graphs))

        def keep(graph: GraphModule, _: Sequence[Any]) -> GraphModule:
            graphs.append(graph)
            return graph

        capture = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
        )
        with functorch.patch(force_non_lazy_backward_lowering=True):
            return capture(graph, inputs)


def run_stage(
    profile: Profile, number: int, backend: Callable[[str], Backend], fake: FakeTensorMode, place: int = 0
) -> tuple[int, bool]:
    """Build a stage and run it forward, for training and for evaluation.

    Returns:
        bytes that autograd keeps of a microbatch for backward; whether it is the last stage.
    """
    settings = profile.train
    with fake_world(profile, number, place) as mesh, fake:
        device = trace_device(profile)
        model = build_stage(profile, mesh, partition_layers(profile)[number], device)
        compile_regions(model, settings, backend)
        axis, b = mesh.context, settings.micro_batch_size
        positions = zigzag_positions(settings.sequence_length, axis.size, axis.rank).to(device)  # (s/c)
        tokens = torch.zeros(b, len(positions), dtype=torch.int64, device=device)  # (b, s/c)
        keys = sample_keys(settings.seed, torch.arange(b, device=device))
        x = tokens
        if number:
            t = mesh.tensor.size if profile.parallel.sequence_parallel else 1
            shape = (tokens.numel() // t, profile.model.hidden_size)
            x = torch.empty(shape, dtype=DTYPES[settings.precision], device=device, requires_grad=True)
        documents = torch.zeros_like(tokens) if settings.document_masks else None
        y = model(x, positions, documents, samples=keys)
        loses = model.last and settings.loss is None  # a loss of the user's own runs eager
        end = model.loss(y, tokens) if loses else y
        kept = graph_stats.kept_bytes(end, [*model.parameters(), *model.buffers()])
        with torch.no_grad():
            y = model(x.detach(), positions, documents)
            if loses:
                model.loss(y, tokens)
            step = compiled_update(profile.cluster.device, backend)
            if step is not None:
                step(*(torch.zeros(TILE, device=device) for _ in range(4)), torch.zeros(8, device=device))
        return kept, model.last


@contextlib.contextmanager
def fake_world(profile: Profile, number: int, place: int) -> Iterator[Mesh]:
    """The mesh as a rank of this stage sees it, in a fake process group of the run's world size."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = profile.world_size // profile.parallel.pipeline  # of a stage
    rank = number % profile.parallel.pipeline * ranks + place % ranks
    if profile.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=profile.world_size)
    mesh = build_mesh(profile)
    try:
        yield mesh
    finally:
        mesh.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def trace_device(profile: Profile) -> torch.device:
    """The profile's device, or the CPU in its place where this machine has none."""
    kind = profile.cluster.device
    try:
        here = devices.resolve(kind).available()
    except RuntimeError:  # not even its software
        here = 0
    return torch.device(kind if here else "cpu")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.tracing.trace")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    profile = load(str(options.run_folder / "profile.yaml"))
    begun = time.perf_counter()
    traced = trace(profile)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {**traced.to_json(), "seconds": seconds, "peak_bytes": peak}
    options.output.write_text(json.dumps(result, indent=1))
    log.info(f"traced {len(traced.programs)} programs, {traced.graphs} graphs in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
