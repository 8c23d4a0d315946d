"""Trainer: a profile's model on this rank's device, with its forward and backward passes.

    device and process group -> mesh -> model or pipeline stages -> compiled blocks

Its parameters have no memory yet: an optimizer initializes them from (seed, name) in its own memory, unit by unit
(`build_optimizer`), so that with FSDP a rank never holds its complete stage. `parallel.initialize` does so without an
optimizer.

Training, evaluation and the device check share it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor

from modeling import job_log
from modeling.compilation import compilers, graph_cache
from modeling.compilation.graph_cache import CompileStatistics, EagerStatistics
from modeling.compilation.manifest import Manifest
from modeling.cores import usable_cores
from modeling.data.corpus import Samples
from modeling.data.prefetch import Batch
from modeling.data.records import RecordSamples
from modeling.models.build import (
    DTYPES,
    build_mesh,
    build_stage,
    device_of,
    experts_by_layer,
    extra_warmup_forwards,
    maxima_by_layer,
    partition_layers,
)
from modeling.models.language_model import LanguageModel
from modeling.supervision.watchdog import Timeouts
from modeling.training import multi_token, user_functions
from modeling.training.multi_token import MultiTokenLoss
from modeling.training.outputs import Collector, Output, PairLoss, Pairs, TokenLoss, nothing
from modeling.training.preference import loss as preference
from modeling.training.preference.reference_model import ReferenceModel
from modeling.training.step_functions import StepFunctions
from parallel import device as devices
from parallel.attention.zigzag import zigzag_positions
from parallel.collectives import all_reduce
from parallel.experts.layer import counting_choices
from parallel.experts.pending import dropped_on_failure
from parallel.layers.lora import without_updates
from parallel.layout import deferred_parameters
from parallel.random import sample_keys
from profiles.arguments import Parser
from profiles.files import run_files
from profiles.resolve import load
from profiles.schema import Profile
from profiles.sections.base import required
from profiles.sections.objective import PAIR_METRICS

if TYPE_CHECKING:
    from parallel.optimizer.arithmetic import Compile
    from parallel.pipeline.pipeline import Pipeline

# A context rank's tokens and targets (m·b, s/c), and the stages' other inputs.
Local = tuple[Tensor | None, Tensor | None, dict[str, Tensor]]


def job_parser(module: str) -> Parser:
    """Argument parser of a job module in this folder, with the arguments that all of them accept."""
    parser = Parser(prog=f"modeling.training.{module}")
    parser.add_argument("--run-folder", type=Path, required=True, help="folder of the run, with profile.yaml")
    parser.add_argument("--dataset", type=Path, required=True, help="folder of the dataset artifact")
    help_text = "folder of the graphs artifact; without it graphs compile on first use"
    parser.add_argument("--graphs", type=Path, help=help_text)
    parser.add_argument("--checkpoints", help="folder or URI of the run's checkpoints (RUN/checkpoints)")
    parser.add_argument("--artifacts", default="", help="URI of the store's artifacts, if it is not a folder")
    parser.add_argument("--cache", type=Path, help="folder to cache remote shards in")
    return parser


@contextmanager
def start_job(options: argparse.Namespace) -> Iterator[Trainer]:
    """A job's trainer in this block, of --profile or else the run's; messages go to the standard output."""
    job_log.configure(sys.stdout)
    profile = load(str(getattr(options, "profile", None) or options.run_folder / run_files.PROFILE))
    graphs, ahead = graph_cache.prepare_cache(profile, options.graphs, options.run_folder)
    with Trainer(profile, graphs, ahead=ahead) as trainer:
        yield trainer


class Trainer:
    """A profile's model on this rank: all of it, or this rank's pipeline stages.

    Initializes the process group from the launcher's environment, unless there is one.

    Args:
        profile: resolved profile.
        graphs: folder of compiled graphs, read and written; None: eager mode.
        ahead: manifest of the programs that the folder should hold, so that any other is reported.

    Attributes:
        stages: this rank's stages by number; a model without pipeline is stage 0.
        experts: this rank's mixtures of experts by layer number.
        maxima: the records of the largest attention scores by layer number; empty without `train.qk_clip`.
        first, last: whether this rank has the first stage, the last stage.
        positions: (s/c) positions of this context rank in a sample.
        reference_model: the frozen reference model for DPO; None unless the profile needs one.
        user_loss: the user's `train.loss`; None for cross-entropy.
        module_losses: (D) losses of multi-token prediction in the last step's `forward_backward`, scaled like its result.
    """

    def __init__(
        self, profile: Profile, graphs: Path | None = None, *, ahead: Manifest | None = None
    ) -> None:
        self.profile = profile
        self.device = device_of(profile)
        self.compile_statistics: CompileStatistics | EagerStatistics = EagerStatistics()
        if graphs is not None:  # before anything runs on the device
            compiler = compilers.make_compiler(profile)
            compiler.use_cache(graphs, jobs=threads(profile))
            self.compile_statistics = CompileStatistics(compiler, ahead=ahead)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.torch_device = self.device.set_current(local_rank)
        torch.set_num_threads(threads(profile))
        self.device.choose_kernels(profile.train.deterministic, profile.train.precision)
        self._started = profile.world_size > 1 and not dist.is_initialized()
        if self._started:
            self.device.start_process_group(self.torch_device, timeouts_of(profile).process_group)
        self.mesh = build_mesh(profile, timeout=timeouts_of(profile).process_group)
        layers = partition_layers(profile)
        local_stages = range(self.mesh.pipeline.rank, len(layers), self.mesh.pipeline.size)
        self.stages = {number: self._build(layers[number]) for number in local_stages}
        self.user_loss = user_functions.load(profile.train.loss) if profile.train.loss else None
        metrics = profile.evaluate.metrics
        self._metrics = {name.partition(":")[2]: user_functions.load(name) for name in metrics}
        self.experts = experts_by_layer(self.stages.values())
        self.maxima = {} if profile.train.qk_clip is None else maxima_by_layer(self.stages.values())
        self.first, self.last = 0 in self.stages, len(layers) - 1 in self.stages
        s, context = profile.train.sequence_length, self.mesh.context
        self.functions = StepFunctions(self.compile)
        self._uploaded: dict[str, tuple[float, Tensor]] = {}  # factors by name, and the same on the device
        self.depth = len(profile.model.prediction_layers)
        self.module_losses = devices.upload(torch.zeros(self.depth), self.torch_device)
        self._zero = torch.zeros((), device=self.torch_device)
        self.positions = zigzag_positions(s, context.size, context.rank).to(self.torch_device)  # (s/c)
        self._pairs = Pairs(
            self.functions, preference_settings(profile), len(self.positions), profile.answers_per_row
        )
        self._output: Output = nothing(self._zero)  # of the current pass
        self.pipeline = self._pipeline(self.stages, len(layers))
        self.reference_model: ReferenceModel | None = None
        if profile.copies_reference:
            stages = {number: self._build(layers[number]) for number in local_stages}
            pipeline = self._pipeline(stages, len(layers))
            self.reference_model = ReferenceModel(profile, stages, pipeline, self.mesh)

    def _build(self, layers: range) -> LanguageModel:
        with deferred_parameters():
            model = build_stage(self.profile, self.mesh, layers, self.torch_device)
        if isinstance(self.compile_statistics, CompileStatistics):
            statistics = self.compile_statistics
            graph_cache.compile_regions(model, self.device.type, statistics.backend)
        return model

    def _pipeline(self, stages: dict[int, LanguageModel], count: int) -> Pipeline | None:
        """The pipeline of these stages, of `count` in all; None without pipeline parallelism."""
        if self.mesh.pipeline.size == 1:
            return None
        from parallel.pipeline.pipeline import Pipeline  # takes half a second to import

        profile = self.profile
        b = profile.micro_batch_rows
        tokens = b * len(self.positions)
        sequence_shards = self.mesh.tensor.size if profile.parallel.sequence_parallel else 1
        return Pipeline(
            stages,
            count,
            self.mesh,
            schedule=profile.parallel.schedule,
            extra_forwards=extra_warmup_forwards(profile),
            microbatches=profile.accumulation_steps,
            tokens=(b, len(self.positions)),
            hidden=(tokens // sequence_shards, profile.model.hidden_size),
            dtype=DTYPES[profile.train.precision],
            device=self.torch_device,
            loss=self._last_stage,
            add=self.functions.add,
            constants={"positions": self.positions},
        )

    def _last_stage(self, x: Tensor, targets: Tensor) -> Tensor:
        return self._output(self.stages[max(self.stages)], x, targets)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that `evaluate` sums: the user's and modules', or those of preference pairs."""
        if self.profile.objective.traits.pairs:
            return list(PAIR_METRICS)
        modules = range(1, self.depth + 1) if self.profile.evaluate.mtp else ()
        return [*self._metrics, *(f"mtp_loss_{distance}" for distance in modules)]

    @property
    def compile(self) -> Compile | None:
        """Function compiler for devices that only run compiled programs; None elsewhere and in eager runs."""
        if not isinstance(self.compile_statistics, CompileStatistics):
            return None
        return graph_cache.function_compiler(self.device.type, self.compile_statistics.backend)

    @property
    def leader(self) -> bool:
        """Whether this is rank 0, which logs and writes for all ranks."""
        return self.mesh.rank == 0

    @property
    def reads_samples(self) -> bool:
        """Whether this rank needs samples: for tokens (first stage), targets (last) or masks (all)."""
        masks = self.profile.document_masks or self.profile.padding_masks
        return self.first or self.last or masks

    def read_batch(self, samples: Samples | RecordSamples, first: int, count: int) -> Batch:
        """The samples [first, first + count), ready to be copied to the device; empty if this rank reads none."""
        if not self.reads_samples:
            return Batch()
        arrays = {"tokens": samples.batch(first, count)}
        if self.profile.document_masks:
            arrays["documents"] = samples.document_starts(first, count)
        if isinstance(samples, RecordSamples):
            if samples.answers > 1:
                arrays["answers"] = samples.answer_numbers(first, count)
            if samples.reference is not None:
                arrays["reference"] = samples.references(first, count)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Batch(**{name: devices.page_locked(each, self.torch_device) for name, each in tensors.items()})

    def _shard(self, batch: Batch, *, modules: bool = False) -> Local:
        """This context rank's tokens and targets (`step_functions.shard`) of m·b rows, and its masks.

        Args:
            modules: whether the last stage runs the modules for multi-token prediction, with their tokens and targets.
        """
        if batch.tokens is None:
            return None, None, {}
        rows = batch.tokens.to(self.torch_device, non_blocking=True)
        documents, answers = (
            None if each is None else each.to(self.torch_device, non_blocking=True)
            for each in (batch.documents, batch.answers)
        )
        kind = self.profile.objective.traits.sample_kind
        tokens, targets, local = self.functions.shard(rows, self.positions, documents, answers, kind)
        masks = {} if local is None else {"documents": local}
        if modules and self.depth and self.last:
            inputs = rows, self.positions, documents, targets, self.depth
            masks["following"], targets = multi_token.shard(*inputs)
        if self.profile.padding_masks:
            masks["padding"] = self.functions.find_padding(rows, self.positions)
        return tokens, targets, masks

    @dropped_on_failure()
    def forward_backward(
        self, batch: Batch, scale: float, first: int = 0, *, step: int = 1, pairs_per_token: float = 0.0
    ) -> Tensor:
        """Forward and backward over a step's m microbatches; gradients are those of `scale` · summed loss.

        With multi-token prediction, gradients include its weighted loss, the result does not.

        Args:
            batch: m·b rows; a pipeline needs exactly those of one step.
            first: number of the first sample in the run, which seeds dropout.
            step: number of the step, from 1, which determines the weight of multi-token prediction.
            pairs_per_token: for orpo, of the global batch (`RecordSamples.pairs_per_token`).

        Returns:
            scale · summed loss of this rank's tokens, 0-dim float32 on the device; 0 without the last stage.
        """
        settings = self.profile.train
        tokens, targets, masks = self._shard(batch, modules=True)
        output = self._losses(batch, (tokens, targets, masks), pairs_per_token, training=True)
        if self.depth:
            weight = self._upload("weight", multi_token.weight(settings, step))
            output = MultiTokenLoss(output, weight)
        if settings.balance == "global" and self.profile.model.num_experts is not None:
            self._count_choices(tokens, targets, masks)
        extra = masks
        if self.profile.has_dropout:
            local_rows = self.profile.micro_batch_rows * self.profile.accumulation_steps
            count = local_rows if batch.tokens is None else len(batch.tokens)
            first_row = first * self.profile.rows_per_sample
            keys = sample_keys(settings.seed, torch.arange(first_row, first_row + count))
            extra = {"sample_keys": devices.upload(keys, self.torch_device), **masks}
        factor = self._upload("scale", scale)
        total: Tensor | None = None
        self._output = output
        if self.pipeline:
            total = self.pipeline.train(tokens, targets, factor, **extra)
        else:
            for x, y, inputs in self._microbatches(required(tokens), required(targets), extra):
                loss = self._last_stage(self.stages[0](x, self.positions, **inputs), y)
                loss.backward(factor.to(loss.dtype))
                total = loss.detach() if total is None else self.functions.add(total, loss.detach())
        if isinstance(output, MultiTokenLoss) and output.sums is not None:
            self.module_losses = output.sums * factor
        return self.functions.multiply(required(total), factor)

    def _upload(self, name: str, factor: float) -> Tensor:
        """A factor of losses as a tensor on the device, uploaded when it changes."""
        if name not in self._uploaded or self._uploaded[name][0] != factor:
            self._uploaded[name] = factor, devices.upload(torch.tensor(factor), self.torch_device)
        return self._uploaded[name][1]

    @torch.no_grad()
    def _count_choices(self, tokens: Tensor | None, targets: Tensor | None, masks: dict[str, Tensor]) -> None:
        """Set each layer's choices per expert and sample, for a balance loss over a step's microbatches.

        Collective over all ranks, including pipeline stages without experts.
        """
        loads, numbers = [layer.load for layer in self.experts.values()], tuple(self.experts)
        model = self.profile.model
        if loads:
            self.functions.clear(loads)
        with counting_choices(self.experts.values()):
            self._run(nothing(self._zero), tokens, targets, masks)
        if loads:
            counts = self.functions.to_table(loads, numbers, model.num_layers, self.mesh.tensor.size)
        else:
            zeros = torch.zeros(model.num_layers * required(model.num_experts))
            counts = devices.upload(zeros, self.torch_device)
        counts = all_reduce(counts, self.mesh.world)
        if loads:
            rows_per_step = self.profile.train.global_batch_size * self.profile.rows_per_sample
            self.functions.set_loads(loads, counts, numbers, rows_per_step)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Compute with the reference model in this block: its copy or, with LoRA, the base model."""
        if self.reference_model is None:
            with ExitStack() as stack:
                for stage in self.stages.values():
                    stack.enter_context(without_updates(stage))
                yield
            return
        own = self.stages, self.pipeline
        with self.reference_model.gathered() as (self.stages, self.pipeline):
            try:
                yield
            finally:
                self.stages, self.pipeline = own

    def _losses(self, batch: Batch, local: Local, pairs_per_token: float, *, training: bool) -> Output:
        """The output that computes a batch's losses; runs the reference model if pairs need it."""
        if not self.profile.objective.traits.pairs:
            return TokenLoss(self.functions, self.user_loss, None if training else [*self._metrics.values()])
        reference, ratio = batch.reference, self._zero
        if self.profile.scores_pairs_in_step:
            with self.reference_weights():
                reference = all_reduce(self._log_probabilities(*local), self.mesh.context)
        if reference is not None:
            reference = reference.to(self.torch_device, non_blocking=True).view(len(reference), -1)
        if self._pairs.settings.odds_ratio:
            ratio = devices.upload(torch.tensor(pairs_per_token), self.torch_device)
        return PairLoss(self._pairs, self.mesh.context, reference, ratio, training)

    @torch.no_grad()
    @dropped_on_failure()
    def _run(
        self, output: Output, tokens: Tensor | None, targets: Tensor | None, inputs: dict[str, Tensor]
    ) -> list[Tensor]:
        """Forward passes over m microbatches without gradients. Returns outputs, whose sum is the batch's."""
        self._output = output
        try:
            if self.pipeline:
                return [self.pipeline.evaluate(tokens, targets, **inputs)]
            microbatches = self._microbatches(required(tokens), required(targets), inputs)
            stage, positions = self.stages[0], self.positions
            return [self._last_stage(stage(x, positions, **own), y) for x, y, own in microbatches]
        finally:
            self._output = nothing(self._zero)  # releases what the output holds

    def _microbatches(
        self, tokens: Tensor, targets: Tensor, inputs: dict[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        size = self.profile.micro_batch_rows
        for start in range(0, len(tokens), size):
            rows = slice(start, start + size)
            yield tokens[rows], targets[rows], {name: value[rows] for name, value in inputs.items()}

    @torch.no_grad()
    def evaluate(self, batch: Batch, counted: int, *, pairs_per_token: float = 0.0) -> Tensor:
        """Summed loss and metrics of samples; other arguments as for `forward_backward`.

        Args:
            counted: number of leading rows to count; the others are ignored.

        Returns:
            [tokens or pairs, loss, *metrics] of this rank, float32 on the device; zeros without the last stage.
        """
        modules = self.profile.evaluate.mtp and self.depth > 0
        tokens, targets, masks = self._shard(batch, modules=modules)
        output, count = self._losses(batch, (tokens, targets, masks), pairs_per_token, training=False), None
        output = MultiTokenLoss(output, None) if modules else output
        if targets is not None:
            rows = devices.upload(torch.tensor(counted, dtype=torch.int32), self.torch_device)
            width = len(self.positions) if modules else None
            kind = self.profile.objective.traits.sample_kind
            targets, count = self.functions.count_targets(targets, rows, kind, width)
        sums = reduce(self.functions.add, self._run(output, tokens, targets, masks))
        if not self.last:
            return devices.upload(torch.zeros(2 + len(self.metrics)), self.torch_device)
        return sums if count is None else self.functions.pack_evaluation(count, sums)

    def hidden_states(self, batch: Batch, microbatches: int) -> list[Tensor]:
        """Final hidden states of each of the batch's first microbatches; empty without the last stage."""
        output = Collector(lambda stage, x, targets: x.detach(), self._zero, microbatches)
        self._run(output, *self._shard(batch))
        return output.collected

    def answer_log_probabilities(self, batch: Batch) -> Tensor:
        """Log-probabilities (m·b, answers) of pair rows: this rank's partial sum over its tokens, on device."""
        return self._log_probabilities(*self._shard(batch))

    @torch.no_grad()
    def _log_probabilities(
        self, tokens: Tensor | None, targets: Tensor | None, masks: dict[str, Tensor]
    ) -> Tensor:
        output = Collector(self._pairs.log_probabilities, self._zero)
        self._run(output, tokens, targets, masks)
        if self.last:
            return self.functions.concatenate(output.collected)
        rows = self.profile.micro_batch_rows * self.profile.accumulation_steps
        return devices.upload(torch.zeros(rows, self.profile.answers_per_row), self.torch_device)

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum numbers over all axes but tensor, along which they must be equal; one all-reduce on the device."""
        return all_reduce(numbers / self.mesh.tensor.size, self.mesh.world)

    def sum_on_host(self, numbers: Tensor) -> list[float]:
        """The same sum in float64, of numbers on the host, by the CPU's process group."""
        total = numbers.double() / self.mesh.tensor.size
        if self.mesh.host is not None:
            dist.all_reduce(total, group=self.mesh.host)
        return total.tolist()

    def connect_store(self) -> dist.Store | None:
        """A separate connection to the store that all ranks share; None for a single rank."""
        if self.mesh.size == 1:
            return None
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(*address, is_master=False, wait_for_workers=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        # After an error, the others wait in a collective. NCCL would wait for them here, so that the error is never reported.
        if failure[0] is None or self.device.type == "cpu":
            self.mesh.close()
        if self._started and failure[0] is None:
            dist.destroy_process_group()


def preference_settings(profile: Profile) -> preference.LossSettings:
    objective, odds_ratio = profile.objective, profile.objective.traits.odds_ratio
    return preference.LossSettings(odds_ratio, objective.loss, objective.beta, objective.label_smoothing)


def timeouts_of(profile: Profile) -> Timeouts:
    cluster = profile.cluster
    return Timeouts(
        cluster.hang_factor,
        cluster.hang_seconds,
        slow_compiler=devices.KINDS[cluster.device].compiles_operators,
    )


def threads(profile: Profile) -> int:
    """torch threads per process: `cluster.threads`, else its share of the node's usable cores."""
    if profile.cluster.threads:
        return profile.cluster.threads
    return max(1, usable_cores() // profile.cluster.devices_per_node)
