"""Trace a run's graphs without a device: `python -m modeling.tracing.trace --run-folder RUN ...`

Builds every pipeline stage at full size under fake tensors (shapes without memory) and a fake process group of the
run's world size, and runs it forward for training and for evaluation. Dynamo and AOTAutograd capture the regions as
in training, so the measured graphs are those that will be compiled:

    stages -> regions in two modes -> forward and backward graphs -> the distinct programs, by digest

Identical layers share a capture, stages and ranks share digests; a graph that depends on the rank would have another
digest. The statistics (graph_stats.py) replace the planner's estimates. Tensors are on a fake device of the profile's type if
torch has its operators (`parallel.device.for_traces`), so that digests are those of a machine with the device.

Takes about 4 s plus 0.3 s per pipeline stage, and less than 1 GB, for a model of any size.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from modeling import job_log
from modeling.compilation import compilers, graph_cache, manifest
from modeling.compilation.compilers import Compiled
from modeling.compilation.manifest import Captured, Manifest
from modeling.models.build import (
    DTYPES,
    build_mesh,
    build_optimizer,
    build_stage,
    experts_by_layer,
    layer_modes,
    partition_layers,
)
from modeling.models.language_model import LanguageModel
from modeling.planning.operator_costs import axis_sizes
from modeling.planning.stage_costs import following_like
from modeling.tracing import graph_stats
from modeling.tracing.graph_stats import GraphStats, StageStats
from modeling.tracing.rehearsal import rehearse
from parallel import Mesh, torch_internals
from parallel import device as devices
from parallel.attention.zigzag import zigzag_positions
from parallel.experts.layer import counting_choices
from parallel.layers.lora import without_updates
from parallel.random import sample_keys
from parallel.torch_internals import FakeTensorMode
from profiles.arguments import Parser
from profiles.files import exit_codes, run_files
from profiles.resolve import load
from profiles.schema import Profile

LOSS = "loss, training"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TracedProgram:
    """A distinct program."""

    name: str  # region and mode, such as "block, training"
    digest: str  # of its graphs, the same on every rank and in every process
    regions: tuple[str, ...]  # digests of what Dynamo captured of it
    stage: int  # the first pipeline stage that runs it
    graphs: tuple[GraphStats, ...]  # its forward graph, and its backward graph in training


@dataclass(frozen=True)
class Trace:
    """A run's distinct programs with their manifest, and the statistics of each stage."""

    programs: tuple[TracedProgram, ...]
    stages: tuple[StageStats, ...]
    manifest: Manifest

    @property
    def graphs(self) -> int:
        """Number of distinct graphs."""
        return sum(len(program.graphs) for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        """The statistics, without the manifest."""
        return {name: [asdict(each) for each in getattr(self, name)] for name in ("programs", "stages")}


def trace(profile: Profile, rank: int = 0) -> Trace:
    """Trace a profile that `profiles.resolve.check` accepts.

    Args:
        rank: which rank of each stage to trace as, of data × context × tensor.
    """
    recorder = Recorder()
    distinct: dict[tuple[str, str], TracedProgram] = {}
    stages, modes = [], layer_modes(profile)
    freed: dict[str, int] = {}  # bytes, by program, that autograd frees after its backward
    sizes = axis_sizes(build_mesh(profile, rank=0))
    # On Neuron, a program holds its inputs until it ends.
    frees_inputs = compilers.backend_name(profile) == "inductor"
    torch.compiler.reset()  # earlier captures would be reused and not recorded
    fake = FakeTensorMode()
    parts = partition_layers(profile)
    for number, layers in enumerate(parts):
        log.info("tracing stage %d of %d", number + 1, len(parts))
        before = len(recorder.programs)
        memory = run_stage(profile, number, recorder.backend, fake, rank, counts_saved=True)
        for captured, graphs in recorder.programs[before:]:
            name = captured.name
            consumed = graph_stats.consumed_inputs(*graphs) if len(graphs) == 2 else {}
            if known := distinct.get((name, captured.digest)):
                regions = tuple(sorted({*known.regions, captured.region}))
                distinct[name, captured.digest] = replace(known, regions=regions)
            else:
                stats = tuple(
                    graph_stats.measure(graph, sizes, consumed if frees_inputs else {}) for graph in graphs
                )
                program = TracedProgram(name, captured.digest, (captured.region,), number, stats)
                distinct[name, captured.digest] = program
            size = sum(consumed.values())
            freed[name] = min(freed.get(name, size), size)
        held = [*layers, *(profile.model.prediction_layers if memory.last else ())]
        blocks = [graph_cache.BLOCKS[modes[layer]] for layer in held]
        available = freed | {LOSS: memory.loss}
        peak = _stage_peak(distinct.values(), blocks, memory.last, available, memory.total)
        stages.append(StageStats((layers.start, layers.stop), memory.saved, peak))
    torch.compiler.reset()
    return Trace(tuple(distinct[key] for key in sorted(distinct)), tuple(stages), recorder.manifest())


def _stage_peak(
    programs: Iterable[TracedProgram],
    blocks: Sequence[str],
    last: bool,
    freed: Mapping[str, int],
    total: int,
) -> int:
    """Maximum bytes that a graph of a stage needs in addition to all that autograd saves.

    When a block program's last forward runs, it and all later layers and the loss have not saved anything yet; when its first
    backward runs, those after it have freed what they saved.

    Args:
        blocks: region of each of the stage's layers.
        last: whether the stage has the final norm and the loss.
        freed: bytes that autograd frees after a program's backward, or after that of the loss.
        total: bytes that the loss holds while its graphs run, less those that it saves when it ends.
    """
    names = [*(f"{block}, training" for block in blocks), *([LOSS] if last else [])]
    available = {
        name: sum(freed.get(later, 0) for later in names[len(names) - names[::-1].index(name) :])
        for name in set(names)
    } | {LOSS: -total}
    others = set(graph_cache.REGIONS) - {*graph_cache.BLOCKS.values()} - (set() if last else {"norm", "loss"})
    regions = {*others, *blocks, graph_cache.STEP}
    peaks = [0]
    for program in programs:
        if program.name.partition(",")[0] in regions:
            *forward, backward = (graph.peak - available.get(program.name, 0) for graph in program.graphs)
            peaks += [*(peak - freed.get(program.name, 0) for peak in forward), backward]
    return max(peaks)


class Recorder(graph_cache.RegionBackends):
    """torch.compile backends that record graphs and compile nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[tuple[Captured, list[GraphModule]]] = []

    def _compile(self, region: str, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        name = graph_cache.program_name(region)
        digest = manifest.region_digest(name, graph, inputs)
        captured, graphs = manifest.capture(graph, inputs)
        self.programs.append((Captured(name, digest, manifest.describe(graphs)), graphs))
        return captured

    def manifest(self) -> Manifest:
        return Manifest.of(captured for captured, _ in self.programs)


def run_stage(
    profile: Profile,
    number: int,
    backend: Callable[[str], graph_cache.Backend],
    fake: FakeTensorMode,
    rank: int = 0,
    *,
    counts_saved: bool = False,
) -> _Saved:
    """Build a stage and run it forward, for training and for evaluation.

    Args:
        counts_saved: count what autograd saves, in regions for which the backend returns traced programs.
    """
    settings = profile.train
    # Operators dispatch, and compilers look up graphs, by whether kernels must be deterministic.
    kind = devices.resolve(profile.cluster.device)
    chosen = kind.chosen_kernels(settings.deterministic, settings.precision)
    with chosen, fake_world(profile, number, rank) as mesh, fake:
        device = devices.for_traces(profile.cluster.device)
        model = build_stage(profile, mesh, partition_layers(profile)[number], device)
        graph_cache.compile_regions(model, profile.cluster.device, backend)
        if profile.parallel.data_sharding == "fsdp":
            build_optimizer(profile, [model], mesh)
        batch = _batch(profile, number, mesh, device)
        following, targets = following_like(batch.tokens, len(model.ahead))
        y = model(batch.x, batch.positions, batch.documents, batch.sample_keys, batch.padding, following)
        compiles_loss = model.last and settings.loss is None  # a user-defined loss runs in eager mode
        # For preference pairs, a step computes the losses of tokens, then their weighted sum.
        pairs = profile.objective.traits.pairs
        weights = torch.zeros(batch.tokens.shape, device=device) if pairs else None
        output = y
        if compiles_loss and pairs:
            output = model.loss(y, targets, weights)
        elif compiles_loss:
            output = reduce(torch.add, model.losses_ahead(y, targets))
        constant = [*model.parameters(), *model.buffers()]
        saved = loss = total = 0
        if counts_saved:
            saved = graph_stats.saved_bytes(output, constant)
            loss = saved - graph_stats.saved_bytes(y, constant) - y.nbytes
            if model.first and model.model.tie_word_embeddings:
                loss -= model.embedding.weight.nbytes
            head = model.output_embedding().weight if compiles_loss else None
            if head is not None and head.requires_grad and not model.loss_chunks(batch.tokens.numel()).keep:
                wide = torch.promote_types(head.dtype, torch.float32).itemsize
                total = head.numel() * (wide - head.itemsize)
        with torch.no_grad():
            y = _run_without_gradients(profile, model, batch, compiles_loss)
            if compile := graph_cache.function_compiler(profile.cluster.device, backend):
                layers = partition_layers(profile)
                local = range(number % profile.parallel.pipeline, len(layers), profile.parallel.pipeline)
                stages = [build_stage(profile, mesh, layers[stage], device) for stage in local]
                rehearse(profile, model, stages, mesh, y, compile)
        return _Saved(saved, max(loss, 0), total, model.last)


class _Saved(NamedTuple):
    """What autograd saves for a stage's backward, per microbatch; 0 if not counted."""

    saved: int  # bytes
    loss: int  # bytes of these that are free when backward reaches the blocks; the gradients of tied weights are not
    total: int  # bytes of the sum that the loss's chunks add to, less those that it saves of it
    last: bool  # whether it is the last stage


class _Batch(NamedTuple):
    """Inputs of a stage for one microbatch of b rows."""

    tokens: Tensor  # (b, s/c)
    positions: Tensor  # (s/c)
    sample_keys: Tensor  # (b), of dropout
    documents: Tensor | None  # (b, s/c)
    padding: Tensor | None  # (b, s/c)
    x: Tensor  # the tokens on the first stage, hidden states (b·s/(c·t), h) on the others


def _batch(profile: Profile, number: int, mesh: Mesh, device: torch.device) -> _Batch:
    """Inputs of stage `number` on the device."""
    settings, axis, b = profile.train, mesh.context, profile.micro_batch_rows
    positions = zigzag_positions(settings.sequence_length, axis.size, axis.rank).to(device)
    tokens = torch.zeros(b, len(positions), dtype=torch.int64, device=device)
    x = tokens
    if number:
        t = mesh.tensor.size if profile.parallel.sequence_parallel else 1
        shape = (tokens.numel() // t, profile.model.hidden_size)
        x = torch.empty(shape, dtype=DTYPES[settings.precision], device=device, requires_grad=True)
    documents = torch.zeros_like(tokens) if profile.document_masks else None
    padding = torch.zeros_like(tokens, dtype=torch.bool) if profile.padding_masks else None
    keys = sample_keys(settings.seed, torch.arange(b, device=device))
    return _Batch(tokens, positions, keys, documents, padding, x)


def _run_without_gradients(
    profile: Profile, model: LanguageModel, batch: _Batch, compiles_loss: bool
) -> Tensor:
    """Run all passes of a stage without gradients; returns the hidden states of evaluation."""
    modules, _ = following_like(batch.tokens, len(model.ahead))

    def forward(following: Tensor | None = None) -> Tensor:
        inputs = batch.x.detach(), batch.positions, batch.documents
        return model(*inputs, padding=batch.padding, following=following)

    y = forward()
    if profile.evaluate.mtp:
        forward(modules)
    if compiles_loss:
        (model.token_losses if profile.objective.traits.pairs else model.loss)(y, batch.tokens)
    if profile.train.balance == "global":
        with counting_choices(experts_by_layer([model]).values()):
            forward(modules)
    if profile.scores_pairs_in_step:
        with without_updates(model):
            forward()
    return y


@contextlib.contextmanager
def fake_world(profile: Profile, number: int, rank: int) -> Iterator[Mesh]:
    """The mesh of a rank of this stage, in a fake process group of the run's world size."""
    from parallel.torch_internals import FakeStore

    ranks = profile.world_size // profile.parallel.pipeline  # ranks per stage
    rank = number % profile.parallel.pipeline * ranks + rank % ranks
    if profile.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=profile.world_size)
    mesh = build_mesh(profile)
    try:
        yield mesh
    finally:
        mesh.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="modeling.tracing.trace", description=__doc__.splitlines()[0])
    parser.add_argument("--run-folder", type=Path, required=True, help="folder of the run, with profile.yaml")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write, beside the manifest")
    parser.add_argument("--cache", type=Path, help="compile cache folder to prepare for later compilations")
    options = parser.parse_args(arguments)
    job_log.configure(sys.stdout)
    profile = load(str(options.run_folder / run_files.PROFILE))
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        if options.cache:
            # Modules of torch's compiler import each other, which must not happen in two threads at the same time: what `prepare`
            # would import is imported here.
            torch_internals.find(torch_internals.NAMES["compile_fx"])
            import_module("torch.utils.cpp_extension")
            compiler = compilers.make_compiler(profile)
            compiler.use_cache(options.cache, ahead_of_time=True)
            preparing = pool.submit(compiler.prepare)
        traced = trace(profile)
    if options.cache:
        preparing.result()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {**traced.to_json(), "seconds": seconds, "peak_bytes": peak}
    options.output.write_text(json.dumps(result, indent=1))
    traced.manifest.write(options.output.parent)
    log.info(f"traced {len(traced.programs)} programs, {traced.graphs} graphs in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.code_of(main))
