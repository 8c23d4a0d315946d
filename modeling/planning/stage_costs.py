"""Costs of a pipeline stage's layers on one rank: memory, FLOPs and communication of one microbatch.

A model has a first layer (with the embedding), middle layers, which differ only in their attention (linear, or its window) and in
whether they have experts, and a last layer (with the final norm and the loss). Each kind is built once on the meta device and run
forward and backward under a `Meter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.models.build import (
    DTYPES,
    build_mesh,
    build_model,
    defers_weight_gradients,
    device_of,
    experts_by_layer,
    gathers_in_graph,
    layer_modes,
)
from modeling.models.language_model import LanguageModel
from modeling.planning.meter import Meter
from modeling.planning.operator_costs import Shape, axis_sizes
from parallel import Mesh
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.attention import kernels
from parallel.experts.layer import counting_choices
from parallel.layers.lora import without_updates
from parallel.logits import full_logits
from parallel.torch_internals import defer_dynamo_on_meta
from profiles.check import with_value
from profiles.schema import Profile

META = torch.device("meta")
defer_dynamo_on_meta()


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one microbatch in one layer, embedding or loss and multi-token prediction included."""

    saved: int  # bytes of activations alive between forward and backward, excluding the layer's input
    # maximum bytes alive during forward and backward, excluding the layer's input
    forward_peak: int
    backward_peak: int
    # FLOPs of forward and backward by shape, including recomputation, padding and the passes without gradients: the reference
    # model's, and the one that counts experts' choices
    products: Mapping[Shape, int]
    # bytes that other operators read and write; in FP8 those of bf16, as quantization belongs to its products (efficiency.py)
    moved: int
    communication: Mapping[str, int]  # bytes that the rank sends, by mesh axis

    @property
    def flops(self) -> int:
        return sum(self.products.values())


def counts_choices(profile: Profile) -> bool:
    """Whether a forward pass before each step counts the experts' choices, for a global balance loss."""
    return profile.train.balance == "global" and profile.model.num_experts is not None


CostCache = dict[tuple[Any, ...], Any]
"""Modules and costs of one model under several profiles, by the settings that they depend on."""


class StageCosts:
    """Costs of a profile's stages, measured on first use.

    Args:
        cache: measurements of layers under other profiles, to reuse and extend.
    """

    def __init__(self, profile: Profile, cache: CostCache | None = None) -> None:
        self.profile = profile
        self.cache: CostCache = {} if cache is None else cache

    @cached_property
    def mesh(self) -> Mesh:
        return build_mesh(self.profile, rank=0)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a microbatch's hidden states between layers, on one rank."""
        train, parallel = self.profile.train, self.profile.parallel
        tokens = self.profile.micro_batch_rows * train.sequence_length // parallel.context
        shards = parallel.tensor if parallel.sequence_parallel else 1
        return tokens // shards * self.profile.model.hidden_size * DTYPES[train.precision].itemsize

    def layers(self, layers: range) -> list[LayerCosts]:
        """Costs of a stage's layers, in order."""
        return [self.layer(layer, self._modes[layer]) for layer in layers]

    def module(self, layers: range) -> LanguageModel:
        """A stage on the meta device with the same parameters as the stage of `layers`."""
        count = self.profile.model.num_hidden_layers
        experts = sum(map(self.profile.model.has_experts, layers))
        linear = sum(map(self.profile.model.is_linear, layers))
        key = (*self._setting, 0 in layers, count - 1 in layers, len(layers), experts, linear)
        if key not in self.cache:
            self.cache[key] = build_model(self.profile, self.mesh, layers, META)
        stage: LanguageModel = self.cache[key]
        return stage

    @cached_property
    def _modes(self) -> list[str]:
        return layer_modes(self.profile)

    @cached_property
    def _setting(self) -> tuple[Any, ...]:
        """What affects all modules alike; a pipeline matters for an embedding shared by both ends."""
        profile, parallel = self.profile, self.profile.parallel
        return (
            profile.model.model_dump_json(),
            profile.lora.model_dump_json() if profile.lora else None,
            profile.train.precision,
            profile.cluster.device,
            parallel.tensor,
            parallel.context,
            parallel.expert,
            parallel.sequence_parallel,
            profile.model.shares_embedding and parallel.pipeline > 1,
        )

    @cached_property
    def _measured(self) -> tuple[Any, ...]:
        """What affects the costs of all layers alike."""
        profile, train = self.profile, self.profile.train
        return (
            *self._setting,
            *(profile.micro_batch_rows, train.sequence_length // profile.parallel.context),
            *(profile.document_masks, profile.padding_masks, profile.scores_pairs_in_step),
            *(counts_choices(profile), train.capacity_factor, train.fp8_recipe, train.qk_clip is not None),
            *(profile.compile.possible, self.mesh.tensor.chunks, self._returns_gradients_together),
        )

    def layer(self, layer: int, mode: str) -> LayerCosts:
        """Costs of a layer with a mode of activation checkpointing; equal layers share one object."""
        train, model = self.profile.train, self.profile.model
        last = layer == model.num_hidden_layers - 1
        kind = model.window(layer), model.has_experts(layer), model.has_rope(layer), model.is_linear(layer)
        # the loss's chunk depends on the accelerator's memory and speed
        accelerator = self.profile.cluster.accelerator if last else None
        key = (*self._measured, layer == 0, last, accelerator, last and train.loss is not None, *kind, mode)
        if key not in self.cache:
            stage = build_model(self.profile, self.mesh, range(layer, layer + 1), META)
            costs = self._measure(stage, mode)
            if train.precision == "fp8":
                unquantized = StageCosts(with_value(self.profile, "train.precision", "bf16"), self.cache)
                costs = replace(costs, moved=unquantized.layer(layer, mode).moved)
            self.cache[key] = costs
        return self.cache[key]

    @cached_property
    def _returns_gradients_together(self) -> bool:
        """Whether a block's backward holds the gradients of all its weights until it ends.

        A compiled one does, unless its graph reduces them or leaves them to a separate pass.
        """
        profile = self.profile
        return profile.compile.possible and not (
            gathers_in_graph(profile) or defers_weight_gradients(profile)
        )

    @property
    def _waits(self) -> bool:
        """Whether an embedding's gradient from the head waits for that from the stage's input."""
        return self.profile.model.shares_embedding and self.profile.parallel.pipeline == 1

    def _drop_gradients(self, stage: LanguageModel) -> None:
        """Let gradients be dropped when they are complete, as they move into buckets."""
        groups: list[list[nn.Parameter]] = []
        if self._returns_gradients_together:
            groups += [[*block.parameters()] for block in stage.layers.values()]
        known = {id(parameter) for group in groups for parameter in group}
        if self._waits and stage.last and not stage.first:
            known.add(id(stage.embedding.weight))  # stays: the embedding's layer is not part of this stage
        groups += [[each] for each in stage.parameters() if id(each) not in known]
        for group in groups:
            _drop_together([each for each in group if each.requires_grad])

    def _measure(self, stage: LanguageModel, mode: str) -> LayerCosts:
        """Run one microbatch forward and backward as the trainer does."""
        apply_activation_checkpointing(stage.layers.values(), mode)
        self._drop_gradients(stage)
        b, s = self.profile.micro_batch_rows, self.profile.train.sequence_length // self.mesh.context.size
        tokens = torch.empty(b, s, dtype=torch.int64, device=META)
        positions, keys = tokens[0], tokens.new_empty(b, dtype=torch.int32)  # as `sample_keys` returns
        x = tokens if stage.first else self._hidden_states()
        documents = torch.empty_like(tokens) if self.profile.document_masks else None
        padding = torch.empty_like(tokens, dtype=torch.bool) if self.profile.padding_masks else None
        following, targets = following_like(tokens, len(stage.ahead))
        existing = [*stage.parameters(), *stage.buffers(), tokens, x, targets]
        name = kernels.load(device_of(self.profile).attention_kernel)
        kernel = kernels.get_kernel(self.mesh.context.graph_kernel or name)
        compiled = self.profile.compile.possible
        with Meter(existing, axis_sizes(self.mesh), kernel, compiled) as meter:
            if self.profile.scores_pairs_in_step:
                with torch.no_grad(), without_updates(stage):
                    y = stage(x, positions, documents, padding=padding)
                    if stage.last:
                        stage.loss(y, tokens)
            if counts_choices(self.profile):
                with torch.no_grad(), counting_choices(experts_by_layer([stage]).values()):
                    stage(x, positions, documents, padding=padding, following=following)
            y = stage(x, positions, documents, keys, padding, following)
            if stage.last:
                y = self._loss(stage, y, targets)
            saved, forward_peak, meter.peak = meter.live, meter.peak, meter.live
            y.backward(torch.empty_like(y))
        waiting = 0
        if self._waits and not stage.last and not self.profile.lora.rank:
            waiting = DTYPES[self.profile.train.precision].itemsize * self.profile.model.hidden_size
            waiting *= -(-self.profile.model.vocab_size // self.mesh.tensor.size)
        counted = dict(meter.products), meter.moved, dict(meter.communication)
        return LayerCosts(saved, forward_peak, meter.peak + waiting, *counted)

    def loss(self, stage: LanguageModel) -> tuple[int, int]:
        """Peak bytes, less those that graphs save, and FLOPs of a microbatch's losses on the last stage."""
        b, s = self.profile.micro_batch_rows, self.profile.train.sequence_length // self.mesh.context.size
        x = self._hidden_states(1 + len(stage.ahead))
        _, targets = following_like(torch.empty(b, s, dtype=torch.int64, device=META), len(stage.ahead))
        with Meter([*stage.parameters(), *stage.buffers(), targets, x], axis_sizes(self.mesh), None) as meter:
            if self.profile.scores_pairs_in_step:
                with torch.no_grad():
                    stage.loss(x, targets)
            y = self._loss(stage, x, targets)
            saved = 0 if self.profile.train.loss else meter.live
            y.backward(torch.empty_like(y))
        stage.zero_grad()
        return meter.peak - saved, sum(meter.products.values())

    def _loss(self, stage: LanguageModel, x: Tensor, targets: Tensor) -> Tensor:
        """The last stage's loss; cross-entropy of the full logits stands in for a user-defined one.

        The user's function cannot run here: it may read values, which tensors on the meta device do not have.
        """
        if self.profile.train.loss is None:
            return reduce(torch.add, stage.losses_ahead(x, targets))
        return F.cross_entropy(full_logits(**stage.logits_arguments(x)), targets.flatten(), reduction="sum")

    def _hidden_states(self, parts: int = 1) -> Tensor:
        """Empty hidden states of a microbatch; `parts`: of the model and modules for multi-token prediction."""
        width, dtype = self.profile.model.hidden_size, DTYPES[self.profile.train.precision]
        rows = parts * self.hidden_bytes // (width * dtype.itemsize)
        return torch.empty(rows, width, dtype=dtype, device=META, requires_grad=True)


def following_like(tokens: Tensor, depth: int) -> tuple[Tensor | None, Tensor]:
    """Empty inputs of multi-token prediction for tokens (b, s/c): the following tokens, and targets."""
    following = tokens.new_empty(len(tokens), depth, tokens.shape[1]) if depth else None
    return following, tokens.new_empty(len(tokens), (1 + depth) * tokens.shape[1])


def _drop_together(parameters: Sequence[nn.Parameter]) -> None:
    """Drop the gradients of parameters whenever all of them have one."""
    complete: list[nn.Parameter] = []

    def hook(parameter: nn.Parameter) -> None:
        complete.append(parameter)
        if len(complete) == len(parameters):
            while complete:
                complete.pop().grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
