"""Hybrids of attention and Gated DeltaNet (arXiv 2412.06464): Qwen3-Next, Qwen3.5, OLMo Hybrid.

    full attention    as in `llama.py`, in the Qwens multiplied by the sigmoid of a gate
    Gated DeltaNet    q, k, v = silu(convolve(W x));   q, k normalized, q / √d;   g = -exp(A) · softplus(W_a x + bias)
                      out = W_o (norm(delta rule of q, k, v, g, β) · silu(W_z x)),   β = sigmoid(W_b x), or twice that

The convolution covers the last few tokens, the rule (parallel/attention/delta_rule.py) all of the token's document. Both restart
with each document, and pass from one context rank to the next.

Qwen3-Next has experts in place of each MLP, and a shared expert times the sigmoid of a gate. OLMo Hybrid norms the outputs of
attention and of its MLP, but the inputs of a Gated DeltaNet and of its MLP. The Qwens' module for multi-token prediction has full
attention, and is no layer of the model in files. Shapes as in `llama.py`, and of a Gated DeltaNet k
key heads of d elements and n value heads of u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.models import parametrization
from modeling.models.families import llama, mixtral
from modeling.models.families.llama import MLP
from modeling.models.language_model import LayerOptions, NormOptions
from modeling.models.weight_names import HuggingFaceTensor, Index, Locate, renamed
from parallel import ColumnParallelLinear, Constant, Mesh, RowParallelLinear
from parallel.attention.delta_context import context_delta_rule, halves, tokens_before
from parallel.attention.delta_rule import kernel_of
from parallel.attention.short_convolution import short_convolution
from parallel.initialization import Normal, Uniform
from parallel.layers.linear import ReplicatedLinear
from parallel.layers.norms import GatedHeadNorm, unit_norm
from parallel.layout import Initializer, Layout, Placement, Section, parameter
from parallel.random import Keys
from profiles.sections.model import Model
from profiles.sections.model_checks import LINEAR

CONVOLVED, PARTS = ("q", "k", "v"), ("q", "k", "v", "gate", "b", "a")
NORM_EPSILON = 1e-6  # of queries and keys
# Initial decays exp(A) and, before the softplus, the biases of their rates.
DECAYS = Uniform(0.01, 16.0, torch.log)
LEAST_RATE, MOST_RATE = 1e-3, 1e-1  # of OLMo Hybrid


def _before_softplus(logarithms: Tensor) -> Tensor:
    rates = logarithms.exp()
    return rates + torch.log(-torch.expm1(-rates))


RATES = Uniform(math.log(LEAST_RATE), math.log(MOST_RATE), _before_softplus)


class GatedDeltaNet(nn.Module):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        h, tensor, widths = model.hidden_size, mesh.tensor, model.linear_widths
        self.context = mesh.context
        _, values, self.d, self.u, taps = (int(getattr(model, name)) for name in LINEAR)
        self.widths = {part: widths[part] // tensor.size for part in PARTS}  # on this rank
        self.largest_step = 2.0 if model.linear_allow_neg_eigval else 1.0
        placed: Placement = {"dtype": options["dtype"], "device": options["device"]}
        self.input = ColumnParallelLinear(h, {part: widths[part] for part in PARTS}, tensor, **options)

        def own(sizes: Mapping[str, tuple[int, ...]], initializer: Initializer) -> nn.Parameter:
            sections = tuple(Section(part, size, 0) for part, size in sizes.items())
            return parameter(Layout(sections, tensor.size, initializer), **placed)

        filters = {part: (widths[part], taps) for part in CONVOLVED}
        self.convolution = own(filters, Normal(model.initializer_range))  # (channels, taps)
        self.decay = own({"": (values,)}, DECAYS)  # A (n/t)
        kernel_of(self.decay.device.type)
        rates = RATES if model.family.linear_attention == "separate" else Constant(1.0)
        self.rate_bias = own({"": (values,)}, rates)  # (n/t)
        epsilon = model.family.linear_norm_eps or model.norm_eps
        self.norm = GatedHeadNorm(self.u, tensor, epsilon=epsilon, **placed)
        options["initializer"] = parametrization.residual(model)
        self.output = RowParallelLinear(widths["v"], h, tensor, **options)

    def forward(
        self, x: Tensor, length: int, offsets: Tensor, documents: Tensor | None, keys: Keys | None = None
    ) -> Tensor:
        """Mix tokens.

        Args:
            length: tokens of each sample on this context rank, s/c.
            offsets: (1 or b, s/c), number of tokens of its document, or of the sample, before each token.
            documents: as for the block; None: nothing starts anew.
        """
        y = self.input(x, keys)  # (b·s/c, ·)
        y = y.view(-1, length, y.shape[-1])  # (b, s/c, ·)
        qkv, gate, steps, rates = y.split(
            (sum(self.widths[part] for part in CONVOLVED), *(self.widths[part] for part in PARTS[3:])), -1
        )
        starts = None if documents is None else offsets
        q, k, v = self.convolve(qkv, starts).split([self.widths[part] for part in CONVOLVED], -1)
        q = unit_norm(q.unflatten(-1, (-1, self.d)), self.d**-0.5, NORM_EPSILON)  # (b, s/c, k/t, d)
        k = unit_norm(k.unflatten(-1, (-1, self.d)), epsilon=NORM_EPSILON)
        v = v.unflatten(-1, (-1, self.u))  # (b, s/c, n/t, u)
        rates = F.softplus(rates.to(q.dtype) + self.rate_bias)  # (b, s/c, n/t)
        decay = -self.decay.to(q.dtype).exp() * rates
        beta = steps.sigmoid().to(q.dtype) * self.largest_step
        out = context_delta_rule(q, k, v, decay, beta, self.context, offsets=starts)
        out = self.norm(out, gate.unflatten(-1, (-1, self.u)))  # (b, s/c, n/t, u)
        return self.output(out.reshape(-1, self.widths["v"]), keys)  # (b·s/c, h)

    def convolve(self, x: Tensor, offsets: Tensor | None) -> Tensor:
        """Queries, keys and values (b, s/c, ·) after the short convolution."""
        if self.context.size == 1:
            return short_convolution(x, self.convolution, offsets)
        x = halves(x)  # (2b, s/2c, ·)
        before = tokens_before(x, self.convolution.shape[1] - 1, self.context)
        starts = None if offsets is None else halves(offsets)
        x = short_convolution(x, self.convolution, starts, before)
        return x.unflatten(0, (-1, 2)).flatten(1, 2)


class Block(llama.Sublayers):
    """A block with full attention or a Gated DeltaNet; `offsets` are an argument of all blocks."""

    def build_attention(
        self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]
    ) -> nn.Module:
        self.linear = model.is_linear(layer)
        kind = GatedDeltaNet if self.linear else llama.Attention
        return kind(model, mesh, layer, **options)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        offsets: Tensor,
        documents: Tensor | None = None,
        keys: Keys | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        if self.linear:
            x = self.sublayer("attention", x, cos.shape[1], offsets, documents, keys)
        else:
            x = self.sublayer("attention", x, cos, sin, documents, keys)
        return self.feed_forward(x, cos.shape[1], keys, padding)


class ExpertBlock(Block, mixtral.ExpertSublayers):
    """A block with routed experts, and a shared one that has a gate."""

    def __init__(
        self, model: Model, mesh: Mesh, layer: int, norm: NormOptions, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(model, mesh, layer, norm, **options)
        self.shared = MLP(model, mesh, model.shared_expert_intermediate_size, **options)
        gate: dict[str, Any] = {name: option for name, option in options.items() if name != "products"}
        self.shared_gate = ReplicatedLinear(model.hidden_size, 1, mesh.tensor, **gate)

    def feed_forward(self, x: Tensor, length: int, keys: Keys | None, padding: Tensor | None) -> Tensor:
        y = self.mlp_norm(x)
        experts = self.mlp.start(y, length, padding)
        shared = self.shared(y, keys) * self.shared_gate(y).sigmoid()
        return x + shared + experts()


def _rows_of(parts: Sequence[str], part: str, widths: Callable[[Model], Mapping[str, int]]) -> Locate:
    """Rows of a part in a tensor that stacks these parts, or in each group of one."""

    def locate(model: Model, _: Sequence[int]) -> Index:
        sizes = widths(model)
        first = sum(sizes[each] for each in parts[: parts.index(part)])
        return (slice(first, first + sizes[part]),)

    return locate


def _key_heads(model: Model) -> int:
    return model.linear_num_key_heads or 1


def _of_key_head(model: Model) -> dict[str, int]:
    """Widths of the projections of one key head."""
    return {part: width // _key_heads(model) for part, width in model.linear_widths.items()}


def _stacked(projections: Mapping[str, Sequence[str]], grouped: bool = False) -> dict[str, HuggingFaceTensor]:
    """The parts of our input projection in stored ones, which stack them, or those of each key head."""
    groups, widths = (_key_heads, _of_key_head) if grouped else (None, attrgetter("linear_widths"))
    return {
        f"{_MIXER}.input.{part}.weight": HuggingFaceTensor(
            f"{_LAYER}.{stored}.weight", locate=_rows_of(parts, part, widths), groups=groups
        )
        for stored, parts in projections.items()
        for part in parts
    }


def _filters(name: str, parts: Sequence[str]) -> dict[str, HuggingFaceTensor]:
    """Our filters (channels, taps) of parts in a stored (channels, 1, taps)."""
    rows = {part: _rows_of(parts, part, attrgetter("linear_widths")) for part in parts}
    return {
        f"{_MIXER}.{part}.convolution": HuggingFaceTensor(f"{_LAYER}.{name}.weight", locate=_first(where))
        for part, where in rows.items()
    }


def _first(rows: Locate) -> Locate:
    """The first column of rows."""
    return lambda model, numbers: (*rows(model, numbers), 0)


def _others(norm: str, output: str) -> dict[str, HuggingFaceTensor]:
    """Further parameters of a Gated DeltaNet, by transformers' names of its norm and its output."""
    names = {"decay": "A_log", "rate_bias": "dt_bias", "norm.weight": f"{norm}.weight"}
    return {
        **{f"{_MIXER}.{ours}": HuggingFaceTensor(f"{_LAYER}.{theirs}") for ours, theirs in names.items()},
        f"{_MIXER}.output.weight": _by_kind(
            f"{_LAYER}.{output}.weight", "model.layers.{}.self_attn.o_proj.weight"
        ),
    }


def _by_kind(linear: str, full: str) -> HuggingFaceTensor:
    """A tensor that has another name in layers with linear attention than in those with full attention."""

    def rename(model: Model, numbers: Sequence[int]) -> str:
        return linear if model.is_linear(numbers[0]) else full

    return HuggingFaceTensor(full, rename=rename)


def _with_module(weights: Mapping[str, HuggingFaceTensor]) -> dict[str, HuggingFaceTensor]:
    """These weights, of which those of the layer for multi-token prediction have names of their own."""

    def in_module(where: HuggingFaceTensor) -> HuggingFaceTensor:
        def rename(model: Model, numbers: Sequence[int]) -> str:
            name = where.rename(model, numbers) if where.rename else where.name
            first, *rest = numbers
            if first < model.num_hidden_layers:
                return name
            return name.format(first - model.num_hidden_layers, *rest).replace("model.", "mtp.", 1)

        return replace(where, rename=rename)

    return {
        **{
            name: in_module(where) if name.startswith("layers.") else where for name, where in weights.items()
        },
        **renamed(_MODULE),
    }


_MODULE = {  # for multi-token prediction
    "layers.{}.embedding_norm": "mtp.pre_fc_norm_embedding",
    "layers.{}.hidden_norm": "mtp.pre_fc_norm_hidden",
    "layers.{}.projection": "mtp.fc",
    "layers.{}.output_norm": "mtp.norm",
}
_LAYER, _MIXER = "model.layers.{}.linear_attn", "layers.{}.attention"
_GATED_QUERIES = {
    f"{_MIXER}.qkv.{name}.{kind}": HuggingFaceTensor(
        f"model.layers.{{}}.self_attn.q_proj.{kind}",
        locate=partial(llama.locate_in_head, part),
        groups=attrgetter("num_attention_heads"),
    )
    for part, name in enumerate(("q", "gate"))
    for kind in ("weight", "bias")
}
_QWEN = {
    **_GATED_QUERIES,
    **_others("norm", "out_proj"),
    **_filters("conv1d", CONVOLVED),
}
QWEN3_5 = {
    **llama.WEIGHTS,
    **_QWEN,
    **_stacked({"in_proj_qkv": CONVOLVED, "in_proj_z": ("gate",), "in_proj_b": ("b",), "in_proj_a": ("a",)}),
}
QWEN3_NEXT = {
    **mixtral.Qwen3Moe.weights,
    **_QWEN,
    **_stacked({"in_proj_qkvz": PARTS[:4], "in_proj_ba": PARTS[4:]}, grouped=True),
    **mixtral.shared_weights("mlp.shared_expert"),
    **renamed({"layers.{}.shared_gate": "model.layers.{}.mlp.shared_expert_gate"}),
}
OLMO = {
    **llama.WEIGHTS,
    **_others("o_norm", "o_proj"),
    **_stacked({f"{stored}_proj": (part,) for part, stored in zip(PARTS, "qkvgba", strict=True)}),
    **{name: where for part in CONVOLVED for name, where in _filters(f"{part}_conv1d", (part,)).items()},
    "layers.{}.attention_norm.weight": _by_kind(
        "model.layers.{}.attention_layer_norm.weight", "model.layers.{}.post_attention_layernorm.weight"
    ),
    "layers.{}.mlp_norm.weight": _by_kind(
        "model.layers.{}.feedforward_layer_norm.weight",
        "model.layers.{}.post_feedforward_layernorm.weight",
    ),
}


class Hybrid(llama.Llama):
    """Qwen3.5, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block: type[nn.Module] = Block
    weights = _with_module(QWEN3_5)

    def block_arguments(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
        offsets = positions[None] if documents is None else positions - documents
        return *self.rotations(positions, documents), offsets

    def arguments_of(self, layer: int, shared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return shared


class Qwen3Next(Hybrid):
    """Qwen3-Next, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = ExpertBlock
    weights = _with_module(QWEN3_NEXT)


class OlmoHybrid(Hybrid):
    """OLMo Hybrid, or one pipeline stage of it; arguments as for `LanguageModel`."""

    weights = OLMO
