"""What training, evaluation and compilation have in common: a profile made into a model on this rank's device.

    device and process group -> mesh -> model or pipeline stages, initialized by (seed, name) -> compiled blocks

and the two passes over a batch, for training and for evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modeling.compilation import compilers
from modeling.compilation.graph_cache import (
    CompileStatistics,
    EagerStatistics,
    compile_regions,
    compiled_update,
)
from modeling.models.build import DTYPES, build_mesh, build_stage, extra_warmup_forwards, partition_layers
from modeling.models.language_model import LanguageModel
from modeling.training import user_functions
from parallel import device as devices
from parallel import initialize
from parallel.attention.ring import zigzag_positions
from parallel.collectives import all_reduce
from parallel.loss import IGNORE
from parallel.random import sample_keys
from profiles.schema import Profile

if TYPE_CHECKING:
    from parallel.optimizer.adamw import Update
    from parallel.pipeline.pipeline import Pipeline


class Trainer:
    """A profile's model on this rank: all of it, or this rank's stages of a pipeline.

    Args:
        profile: resolved.
        graphs: folder for compiled graphs, read and written; None trains eagerly.
        precompiled: whether the folder should hold every graph already.
        start: whether to join the process group that the launcher's environment describes; False where there is one.
    """

    def __init__(
        self, profile: Profile, graphs: Path | None = None, *, precompiled: bool = False, start: bool = True
    ) -> None:
        self.profile = profile
        self.device = devices.resolve(profile.cluster.device, profile.cluster.accelerator)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.torch_device = self.device.local(local_rank)
        torch.set_num_threads(threads(profile))
        if start and profile.world_size > 1:
            dist.init_process_group(self.device.backend)
        self.mesh = build_mesh(profile)
        self.compile_statistics: CompileStatistics | EagerStatistics = EagerStatistics()
        if graphs is not None:
            compiler = compilers.make_compiler(profile)
            compiler.use_cache(graphs)
            self.compile_statistics = CompileStatistics(compiler, precompiled=precompiled)
        layers = partition_layers(profile)
        own = range(self.mesh.pipeline.rank, len(layers), self.mesh.pipeline.size)
        self.stages = {number: self._build(layers[number]) for number in own}
        self.user_loss = user_functions.load(profile.train.loss) if profile.train.loss else None
        self._metrics = {
            name.partition(":")[2]: user_functions.load(name) for name in profile.evaluate.metrics
        }
        self._evaluating = False
        self.first, self.last = 0 in self.stages, len(layers) - 1 in self.stages
        s, c = profile.train.sequence_length, self.mesh.context
        self.positions = zigzag_positions(s, c.size, c.rank).to(self.torch_device)  # (s/c)
        self.pipeline = self._pipeline(len(layers)) if self.mesh.pipeline.size > 1 else None

    def _build(self, layers: range) -> LanguageModel:
        model = build_stage(self.profile, self.mesh, layers, self.torch_device)
        initialize(model, self.mesh.tensor, self.profile.train.seed)
        if isinstance(self.compile_statistics, CompileStatistics):
            compile_regions(model, self.profile.train, self.compile_statistics.backend)
        return model

    def _pipeline(self, stages: int) -> Pipeline:
        from parallel.pipeline.pipeline import Pipeline  # half a second that only pipelines need

        profile = self.profile
        b = profile.train.micro_batch_size
        tokens = b * len(self.positions)
        sharded = self.mesh.tensor.size if profile.parallel.sequence_parallel else 1
        return Pipeline(
            self.stages,
            stages,
            self.mesh,
            schedule=profile.parallel.schedule,
            ahead=extra_warmup_forwards(profile),
            microbatches=profile.accumulation_steps,
            tokens=(b, len(self.positions)),
            hidden=(tokens // sharded, profile.model.hidden_size),
            dtype=DTYPES[profile.train.precision],
            device=self.torch_device,
            loss=self._loss,
            constants={"positions": self.positions},
        )

    def _loss(self, x: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Of the last stage's hidden states: the summed loss, in evaluation with the summed metrics after it."""
        stage = self.stages[max(self.stages)]
        if self.user_loss is None and not (self._evaluating and self._metrics):
            return stage.loss(x, targets) * scale
        logits, flat = stage.logits(x), targets.flatten()
        own = self.user_loss
        loss = user_functions.call(own, logits, flat) if own else stage.loss(x, targets)
        if not self._evaluating:
            return loss * scale
        metrics = [user_functions.call(metric, logits, flat).float() for metric in self._metrics.values()]
        return torch.stack([loss.float(), *metrics])

    @property
    def metrics(self) -> list[str]:
        """Names of the user's metrics."""
        return list(self._metrics)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their global names."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def compiled_update(self) -> Update | None:
        """AdamW's update for the optimizer, where it is compiled."""
        if not isinstance(self.compile_statistics, CompileStatistics):
            return None
        return compiled_update(self.device.type, self.compile_statistics.backend)

    @property
    def leader(self) -> bool:
        """Whether this rank speaks for all."""
        return self.mesh.rank == 0

    @property
    def reads_samples(self) -> bool:
        """Whether this rank needs samples: the first stage needs tokens, the last targets, and all need documents."""
        return self.first or self.last or self.profile.train.document_masks

    def _split(
        self, samples: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Samples (m·b, s + 1) to this context rank's tokens and targets, (m·b, s/c) each, and documents so too by name."""
        if samples is None:
            return None, None, {}
        samples = samples.to(self.torch_device, non_blocking=True)
        each = {}
        if documents is not None:
            each["documents"] = documents.to(self.torch_device, non_blocking=True)[:, self.positions]
        return samples[:, self.positions], samples[:, self.positions + 1], each

    def forward_backward(
        self, samples: Tensor | None, scale: float, first: int = 0, documents: Tensor | None = None
    ) -> Tensor:
        """Training on the m microbatches of a step; gradients of `scale` times the summed loss reach the optimizer.

        Args:
            samples: (m·b, s + 1); None where this rank reads none. A pipeline takes exactly a step's.
            documents: (m·b, s) the place in its sample that each token's document begins at; None lets attention cross.
            first: the first sample's number in the run; dropout depends on it.

        Returns:
            scale · summed loss of this rank's tokens, 0-dim float32, on the device; 0 without the last stage.
        """
        settings = self.profile.train
        tokens, targets, each = self._split(samples, documents)
        count = (
            settings.micro_batch_size * self.profile.accumulation_steps if samples is None else len(samples)
        )
        numbers = torch.arange(first, first + count, device=self.torch_device)
        keys = sample_keys(settings.seed, numbers)
        if self.pipeline:
            return self.pipeline.train(tokens, targets, scale, samples=keys, **each)
        total = torch.zeros((), device=self.torch_device)
        for x, y, more in self._microbatches(tokens, targets, {"samples": keys, **each}):
            loss = self._loss(self.stages[0](x, self.positions, **more), y, scale)
            loss.backward()
            total += loss.detach()
        return total

    def _microbatches(
        self, tokens: Tensor, targets: Tensor, each: dict[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        for at in range(0, len(tokens), self.profile.train.micro_batch_size):
            own = slice(at, at + self.profile.train.micro_batch_size)
            yield tokens[own], targets[own], {name: value[own] for name, value in each.items()}

    @torch.no_grad()
    def evaluate(self, samples: Tensor | None, counted: Tensor, documents: Tensor | None = None) -> Tensor:
        """Summed loss and metrics of samples (m·b, s + 1), as for training, of which `counted` (m·b) says which count.

        Returns:
            [tokens, loss, *metrics] of this rank, float64; zeros without the last stage.
        """
        tokens, targets, each = self._split(samples, documents)
        if targets is not None:
            targets = targets.where(counted[:, None].to(targets.device), IGNORE)
        self._evaluating = True
        try:
            if self.pipeline:
                sums = self.pipeline.evaluate(tokens, targets, **each)
            else:
                parts = self._microbatches(tokens, targets, each)
                sums = sum(self._loss(self.stages[0](x, self.positions, **more), y) for x, y, more in parts)
        finally:
            self._evaluating = False
        result = torch.zeros(2 + len(self._metrics), dtype=torch.float64, device=self.torch_device)
        if self.last:
            result[0] = (targets != IGNORE).sum()
            result[1:] = sums
        return result

    def sum(self, numbers: Tensor) -> list[float]:
        """Sums over all ranks of numbers that are equal along the tensor axis."""
        return all_reduce(numbers.double() / self.mesh.tensor.size, self.mesh.world).tolist()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.mesh.close()
        if dist.is_initialized() and failure[0] is None:
            dist.destroy_process_group()


def threads(profile: Profile) -> int:
    """torch's threads in each process: as the profile says, else this machine's cores shared out."""
    if profile.cluster.threads:
        return profile.cluster.threads
    return max(1, (os.cpu_count() or 1) // profile.cluster.devices_per_node)
