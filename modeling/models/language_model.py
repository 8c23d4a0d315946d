"""Decoder-only language model: what all architectures share, such as embedding, pipeline split, loss.

With multi-token prediction (arXiv 2412.19437, section 2.2), the last stage has modules that each predict one token further
ahead. With h⁰ the hidden states that the head reads, module k predicts token i + k + 1 from position i, with the embedding E and
the head of the model:

    hᵏ = norm(block(M [norm(E t), norm(hᵏ⁻¹)])), where t is token i + k;   logits = head(hᵏ)

A module is the layer after the model's last, and after the modules before it. The published order of M's columns differs from
the paper's: the embedding is first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from modeling.models import parametrization
from modeling.models.weight_names import HuggingFaceTensor
from parallel import LayerNorm, Mesh, RMSNorm, VocabParallelEmbedding, linear_cross_entropy
from parallel.attention.maxima import ScoreMaxima
from parallel.device import CPU, Device
from parallel.layers.linear import ReplicatedLinear
from parallel.layers.norms import CenteredNorm, UnitOffsetNorm
from parallel.layers.products import EXACT, Products
from parallel.layers.tied import TiedWeight
from parallel.layout import Initializer, Placement
from parallel.loss import Chunks, LossPrograms, choose_chunks, chunk_tokens, token_cross_entropy
from parallel.optimizer.fsdp import Unit
from parallel.random import Keys, local_keys, token_keys
from profiles.sections.base import required
from profiles.sections.model import Model

NORMS: Mapping[str, type[RMSNorm]] = {
    "rms": RMSNorm,
    "unit_offset": UnitOffsetNorm,
    "layer": LayerNorm,
    "centered": CenteredNorm,
}  # by `Family.norm`


class ShardOptions(Placement, total=False):
    """Keyword arguments of every layer with weights."""

    sequence_parallel: bool


class WeightOptions(ShardOptions, total=False):
    """Keyword arguments of a layer whose matrix products are always exact."""

    initializer: Initializer


class ModelOptions(ShardOptions, total=False):
    """Keyword arguments of a model."""

    products: Products


class LayerOptions(ModelOptions, total=False):
    """Keyword arguments that a block passes on to its layers."""

    initializer: Initializer
    bias: bool


class NormOptions(ShardOptions, total=False):
    """Keyword arguments of a block's norms."""

    epsilon: float


class AttentionLayer(nn.Module):
    """Attention of a block, which can record its largest scores."""

    maxima: ScoreMaxima | None  # with QK-clip


def weight_options(options: LayerOptions) -> WeightOptions:
    """Those of a block's arguments that a layer takes whose matrix products are always exact."""
    return {
        "initializer": options["initializer"],
        "sequence_parallel": options["sequence_parallel"],
        "dtype": options["dtype"],
        "device": options["device"],
    }


@cache
def prediction_module(block: type[nn.Module]) -> type[nn.Module]:
    """The module for multi-token prediction with this block: its class with a projection and norms."""

    class PredictionModule(block):  # type: ignore[misc, valid-type]
        def __init__(
            self, model: Model, mesh: Mesh, layer: int, norm: NormOptions, **options: Unpack[LayerOptions]
        ) -> None:
            super().__init__(model, mesh, layer, norm, **options)
            h, kind = model.hidden_size, NORMS[model.family.norm]
            self.embedding_norm, self.hidden_norm, self.output_norm = (
                kind(h, mesh.tensor, **norm) for _ in range(3)
            )
            self.projection = ReplicatedLinear(2 * h, h, mesh.tensor, **weight_options(options))

        def forward(self, x: Tensor, embedded: Tensor, *arguments: Any) -> Tensor:
            x = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), -1)
            return self.output_norm(super().forward(self.projection(x), *arguments))

    return PredictionModule


class LanguageModel(nn.Module):
    """A model, or the pipeline stage of it that holds `layers`.

    The first stage has the embedding, the last the final norm, the head and the modules for multi-token prediction. A tied model
    has no head: its last stage has a copy of the embedding, as it does for those modules, whose gradient is summed over the
    embedding group.

    Args:
        model: architecture hyperparameters.
        mesh: device mesh.
        layers: layers of this stage; all by default.
        sequence_parallel: shard hidden states over the tensor axis between layers.
        products: how the layers' matrix products are computed; the head's are always exact.

    Attributes:
        axis: tensor axis, over which the vocabulary is sharded.
        embedding_scale: multiplier of token embeddings; None: 1.
        sequence_parallel: whether hidden states are actually sharded; False on a tensor axis of one rank.
        first, last: whether this stage has the embedding, and the head.
        layers: this stage's blocks by number, those of multi-token prediction included.
        ahead: numbers of the layers for multi-token prediction; empty before the last stage.
        loss_programs: the functions of the loss; compiled in compiled runs.
        tied: sums the gradients of a tied embedding; None: autograd does.
        token_keys: `random.token_keys`, or a compiled version of it.
        device: the run's device, which determines the loss's chunk size.
        weights: Hugging Face's tensor for each of our names, with `{}` for the numbers of layers and experts.
        copies: the model's weights that Hugging Face's files repeat in the layer of each module for multi-token prediction: the
            name there, and ours.
        update_dropout: dropout rate in LoRA's updates.
    """

    block: type[nn.Module]
    weights: Mapping[str, HuggingFaceTensor]
    copies: Mapping[str, str] = {}
    loss_programs = LossPrograms()
    tied: TiedWeight | None = None
    token_keys = staticmethod(token_keys)
    device: Device = CPU
    update_dropout: float = 0.0
    layer_numbers: Tensor

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        layers: range | None = None,
        *,
        sequence_parallel: bool = False,
        products: Products = EXACT,
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        layers = range(model.num_hidden_layers) if layers is None else layers
        self.model, self.axis = model, mesh.tensor
        self.numbers = layers  # without those for multi-token prediction
        self.register_buffer("layer_numbers", torch.tensor([*layers], device=device), persistent=False)
        self.sequence_parallel = sequence_parallel and mesh.tensor.size > 1
        self.embedding_scale = model.embedding_multiplier
        if model.family.scaled_embedding:  # rounded to the weights' dtype, as in transformers
            self.embedding_scale = torch.tensor(model.hidden_size**0.5, dtype=dtype, device="cpu").item()
        self.first, self.last = 0 in layers, model.num_hidden_layers - 1 in layers
        self.ahead = model.prediction_layers if self.last else range(0)
        shared: ShardOptions = {"sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        norm: NormOptions = {"epsilon": model.norm_eps, **shared}
        embedding: WeightOptions = {"initializer": parametrization.embedding(model), **shared}
        options: LayerOptions = {
            "initializer": parametrization.hidden(model),
            "products": products,
            "sequence_parallel": sequence_parallel,
            "dtype": dtype,
            "device": device,
        }
        tied, vocabulary = model.tie_word_embeddings, (model.vocab_size, model.hidden_size, mesh.tensor)
        if self.first or (self.last and model.shares_embedding):
            partial = ("embedding",) if model.shares_embedding and mesh.pipeline.size > 1 else ()
            self.embedding = VocabParallelEmbedding(*vocabulary, partial_axes=partial, **embedding)
        if self.first:
            self.add_position_embedding(**embedding)
        self.layers = nn.ModuleDict({str(i): self.block(model, mesh, i, norm, **options) for i in layers})
        for i in self.ahead:
            module = prediction_module(self.block)  # type: ignore[arg-type]  # to mypy, classes of modules have no hash
            self.layers[str(i)] = module(model, mesh, i, norm, **options)
        if self.last:
            scale, kind = parametrization.final_norm(model), NORMS[model.family.norm]
            self.norm = kind(model.hidden_size, mesh.tensor, initializer=scale, **norm)
            if not tied:
                head: WeightOptions = {"initializer": parametrization.head(model), **shared}
                self.head = VocabParallelEmbedding(*vocabulary, **head)

    def add_position_embedding(self, **options: Unpack[WeightOptions]) -> None:
        """Add learned positions, in architectures that have them."""

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        sample_keys: Tensor | None = None,
        padding: Tensor | None = None,
        following: Tensor | None = None,
    ) -> Tensor:
        """Token ids (b, s/c), or the previous stage's hidden states, to hidden states.

        With `following`, the last stage's are followed by those of each of the D modules for multi-token prediction:
        ((1 + D)·b·s/c, h).

        Args:
            positions: (s/c) positions of this context rank's tokens.
            documents: (b, s/c), the position where each token's document starts: attention stays within a document, and
                positions restart with it. None: attention crosses documents.
            sample_keys: (b), dropout keys (`parallel.random.sample_keys`); None disables dropout, of LoRA's updates too.
            padding: (b, s/c), true for padding, which experts do not count; only for architectures with experts.
            following: (b, D, s/c), the tokens at distances 1 to D from each token; None: their modules do not run.
        """
        keys, layer_keys = self.dropout_keys(sample_keys, positions)
        shared = self.block_arguments(positions, documents)
        if self.first:
            x = self.embed_tokens(x, positions, documents, keys)  # (b·s/c, h)
        uncounted = () if padding is None else (padding,)
        for number, own in zip(self.numbers, layer_keys, strict=True):
            arguments = *self.arguments_of(number, shared), documents, own, *uncounted
            x = self.layers[str(number)](x, *arguments)
        if not self.last:
            return x
        x = self.norm(x)
        if following is not None:
            states = [x]
            for number, ids in zip(self.ahead, following.unbind(1), strict=True):
                # `forward` skips FSDP's hooks: the weights are gathered already.
                embedded = self.embedding.forward(ids)
                embedded = embedded if self.embedding_scale is None else self.scale_embedding(embedded)
                arguments = *self.arguments_of(number, shared), documents, None, *uncounted
                states.append(self.layers[str(number)](states[-1], embedded, *arguments))
            x = torch.cat(states)
        return x if self.model.logits_scaling is None else self.scale_output(x)

    def block_arguments(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
        """Arguments of all blocks between the hidden states and the documents."""
        return (positions,)

    def arguments_of(self, layer: int, shared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of `block_arguments` that the block of this layer takes."""
        return shared

    def embed_tokens(
        self, ids: Tensor, positions: Tensor, documents: Tensor | None, keys: Keys | None
    ) -> Tensor:
        """Hidden states (b·s/c, h) of token ids (b, s/c)."""
        x = self.embedding(ids)
        return x if self.embedding_scale is None else self.scale_embedding(x)

    def scale_embedding(self, x: Tensor) -> Tensor:
        """The embeddings of tokens times their multiplier."""
        return x * required(self.embedding_scale)

    def scale_output(self, x: Tensor) -> Tensor:
        """The last hidden states divided by `logits_scaling`, which divides the logits."""
        return x / required(self.model.logits_scaling)

    def dropout_keys(
        self, sample_keys: Tensor | None, positions: Tensor
    ) -> tuple[Keys | None, Sequence[Keys | None]]:
        """Dropout keys of tokens, overall and by layer, from the samples' keys (b); None without dropout."""
        if sample_keys is None or not (self.model.has_dropout or self.update_dropout):
            return None, [None] * len(self.numbers)
        tokens, layers = self.token_keys(sample_keys, positions, self.layer_numbers)
        shard = self.axis, self.sequence_parallel
        return local_keys(tokens, *shard), [local_keys(layer, *shard) for layer in layers]

    def sharding_units(self, in_graph: bool = False) -> list[Unit]:
        """Units of weights gathered together, in forward order; they cover all of this stage's parameters.

        Args:
            in_graph: whether blocks gather their weights themselves.
        """
        tied = self.model.tie_word_embeddings
        units = [Unit((layer,), (f"layers.{i}.",), True, in_graph) for i, layer in self.layers.items()]
        if self.last:
            prefixes = ["norm.", "embedding." if tied else "head."]
            if self.ahead and not self.first:
                prefixes.append("embedding.")
            units.insert(len(self.numbers), Unit((self.norm,), tuple(prefixes)))
        if self.first:
            units.insert(0, Unit((self.embedding,), ("embedding.", "positions.")))
        return units

    def loss(self, x: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Summed cross-entropy of the last stage's hidden states; targets (b, s/c), -100 is ignored.

        Args:
            weights: (b, s/c), weight of each token in the sum; None: 1.
        """
        chunk, keep = self.loss_chunks(targets.numel())
        weights = None if weights is None else weights.flatten()
        arguments = self._loss_arguments(x, targets)
        return linear_cross_entropy(**arguments, weights=weights, chunk=chunk, keep=keep)

    def losses_ahead(self, x: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """`loss` of the model and of each module for multi-token prediction, at increasing distances.

        Args:
            x: ((1 + D)·b·s/c, h), or (1 + D)·b·s/(c·t) rows with sequence parallelism.
            targets: (b, (1 + D)·s/c), side by side.
        """
        parts = 1 + len(self.ahead)
        return map(self.loss, x.chunk(parts), targets.chunk(parts, 1))

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy (b, s/c) of each token, without gradient; arguments as for `loss`."""
        # As with a frozen head, such as the reference model's, so that both run one program.
        chunk = chunk_tokens(targets.numel(), self.output_embedding().weight.shape[0], self.device)
        return token_cross_entropy(**self._loss_arguments(x, targets), chunk=chunk).view(targets.shape)

    def _loss_arguments(self, x: Tensor, targets: Tensor) -> dict[str, Any]:
        return {
            **self.logits_arguments(x),
            "targets": targets.flatten(),
            "first": self.output_embedding().first,
            "programs": self.loss_programs,
        }

    def loss_chunks(self, tokens: int) -> Chunks:
        """Chunks of the loss over this many tokens, b·s/c."""
        return choose_chunks(tokens, self.output_embedding().weight, self.device)

    def logits_arguments(self, x: Tensor) -> dict[str, Any]:
        """Arguments of the loss and of `full_logits` for the last stage's hidden states x."""
        return {
            "x": x,
            "weight": self.tied.use() if self.tied else self.output_embedding().weight,
            "axis": self.axis,
            "vocabulary": self.model.vocab_size,
            "sequence_parallel": self.sequence_parallel,
            "soft_cap": self.model.final_logit_softcapping,
        }

    @classmethod
    def huggingface_tensors(cls, model: Model) -> Mapping[str, HuggingFaceTensor]:
        """`weights` of a model with these hyperparameters."""
        return cls.weights

    def output_embedding(self) -> VocabParallelEmbedding:
        """The head, or the embedding of a tied model."""
        return self.embedding if self.model.tie_word_embeddings else self.head
