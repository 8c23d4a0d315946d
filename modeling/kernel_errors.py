"""Errors of the kernels that training uses, compared with plain formulas on the CPU in float32.

Checks attention, the loss, AdamW's update, the grouped products of a mixture of experts, and the products of layers in FP8. Each
is called as by the model or the optimizer, so it is the kernel that a run uses, on the shapes of one rank of a profile. Sequences
and shards, but not weights, are limited to what a CPU computes in seconds.

The blocks of ring attention are computed as by a ring of two ranks, but in one process. On accelerators, the loss is compiled if
the profile is, and the update where training compiles it; on a CPU both run eager, which takes no time to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modeling.compilation.compilers import COMPILERS
from modeling.compilation.graph_cache import compile_regions, function_compiler
from modeling.models.build import build_mesh, build_products, build_stage, expert_layers, partition_layers
from modeling.planning.memory import plan_buckets
from modeling.planning.stage_costs import META, StageCosts
from parallel import device as devices
from parallel.attention import kernels, tiles
from parallel.attention.attention import attention
from parallel.attention.ring import merge, zigzag_positions
from parallel.constraints import kv_replicas
from parallel.experts.activations import ACTIVATIONS
from parallel.experts.dropless import routed_experts
from parallel.experts.layer import MixtureOfExperts
from parallel.experts.slots import assign_slots, capacity, slotted_experts
from parallel.layers.linear import ColumnParallelLinear
from parallel.layers.products import Float8, Products
from parallel.loss import LossPrograms, linear_cross_entropy
from parallel.mesh import Axis
from parallel.optimizer.adamw import AdamW, Update, adamw, update
from parallel.optimizer.arithmetic import Arithmetic
from profiles.schema import Profile

# maximum tokens of attention, tokens of other kernels, and elements of a shard
SEQUENCE, TOKENS, SHARD = 2048, 256, 1 << 20
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {
    "float32": 1e-5,
    "bf16": 2e-2,
    "fp8": 8e-2,  # 3 mantissa bits, 2 in tensorwise gradients; sums over rows of different magnitudes
    "emulated": 2e-2,  # the same quantization, multiplied in float32
}
EAGER = ("cpu",)  # device types on which nothing is compiled, so that a check takes a second
ONE = Axis("tensor")
Errors = dict[str, float]  # largest relative norm of a difference, by precision

UPDATE_SOFTWARE = "do not train on this device; update its driver and torch, and check again"
OTHER_EXPERTS = f"set train.capacity_factor, whose experts need no grouped products, or {UPDATE_SOFTWARE}"
NO_FP8 = "set train.precision=bf16"


@dataclass(frozen=True)
class KernelCheck:
    """A kernel on the shapes of a profile."""

    name: str
    shape: str
    errors: Callable[[torch.device], Errors]
    remedy: str = UPDATE_SOFTWARE  # what to do if it is missing or wrong

    def check(self, device: torch.device) -> tuple[str, bool]:
        """Measured errors, with shape and remedy on failure, and whether they are within the tolerances."""
        try:
            errors = self.errors(device)
        except (RuntimeError, ValueError) as error:
            return f"{self.name} of {self.shape}: {error}; {self.remedy}", False
        measured = ", ".join(f"{precision} {error:.1e}" for precision, error in errors.items())
        wrong = [precision for precision, error in errors.items() if not error <= TOLERANCES[precision]]
        if not wrong:
            return f"{self.name}: {measured}", True
        limits = ", ".join(f"{precision} above {TOLERANCES[precision]:.0e}" for precision in wrong)
        return f"{self.name} of {self.shape}: {measured}, {limits}; {self.remedy}", False


def kernels_of(profile: Profile) -> list[KernelCheck]:
    """The kernels that training with this profile uses."""
    model, tensor = profile.model, profile.parallel.tensor
    queries, kv, s, d = _attention_sizes(profile)
    shard = _shard(profile)
    rows, tokens = -(-model.vocab_size // tensor), _tokens(profile)
    heads = f"{queries} query and {kv} KV heads of {d}"
    ring, others = _uses_ring(profile)
    found = []
    if others:
        found.append(KernelCheck("attention", f"{heads}, {s} tokens", partial(attention_errors, profile)))
    if ring:
        length = _ring_tokens(profile)
        shape = f"{heads}, {length} tokens of each of 2 ranks"
        found.append(KernelCheck("ring attention", shape, partial(ring_errors, profile)))
    found += [
        KernelCheck(
            "loss", f"{tokens} × {model.hidden_size} by {rows} tokens", partial(loss_errors, profile)
        ),
        KernelCheck("update", f"{shard} elements", partial(update_errors, profile)),
    ]
    layer = next(filter(model.has_experts, range(model.num_hidden_layers)), None)
    if layer is not None:
        (experts,) = expert_layers(StageCosts(profile).module(range(layer, layer + 1)))
        found.append(_experts(profile, experts))
    return [*found, *_fp8_products(profile)]


def attention_errors(profile: Profile, device: torch.device) -> Errors:
    """Output and gradients of rank-local attention with the profile's document mask and sliding window."""
    queries, kv, s, d = _attention_sizes(profile)
    inputs = [_normal(number, 1, n, s, d) for number, n in enumerate((queries, kv, kv, queries))]
    documents = torch.arange(s)[None] // max(1, s // 3) if profile.document_masks else None
    window = profile.model.sliding_window
    window = window and max(1, window * s // profile.train.sequence_length)

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, kernel: str | None = None) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        masks = None if documents is None else documents.to(q.device)
        out = attention(*leaves, Axis("context"), documents=masks, window=window, kernel=kernel)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    return _errors(run, inputs, device, run(*inputs, kernel="math"))


def ring_errors(profile: Profile, device: torch.device) -> Errors:
    """Output and gradients of causal attention over a ring of two ranks, both computed in this process."""
    queries, kv, _, d = _attention_sizes(profile)
    s = 2 * _ring_tokens(profile)
    inputs = [_normal(number, 1, n, s, d) for number, n in enumerate((queries, kv, kv, queries))]

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        shards = [zigzag_positions(s, 2, rank).to(q.device) for rank in range(2)]
        keys, values = ([x[:, :, positions] for positions in shards] for x in (k, v))
        out, dq = (torch.empty_like(x) for x in (q, q))
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        for rank, positions in enumerate(shards):
            share = ring_share(rank, q[:, :, positions], keys, values, grad[:, :, positions])
            out[:, :, positions], dq[:, :, positions], *sums = share
            for source, (part_dk, part_dv) in zip(shards, zip(*sums, strict=True), strict=True):
                dk[:, :, source] += part_dk
                dv[:, :, source] += part_dv
        return [out, dq, dk, dv]

    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = attention(*leaves, kernel="math")
    return _errors(run, inputs, device, [out, *torch.autograd.grad(out, leaves, inputs[3])])


def ring_share(
    rank: int, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """What a rank of ring attention computes, without communication: causal, without masks.

    Args:
        rank: the rank of the context axis.
        q: (b, n, s/c, d), the rank's zigzag shard.
        keys, values: (b, k, s/c, d) of each rank.
        grad: gradient of the output, as q.

    Returns:
        out and dq, as q, and the rank's shares of dk and dv of each rank's keys and values, in float32.
    """
    kernel, scale = kernels.get_kernel(kernels.default_kernel(q)), q.shape[-1] ** -0.5
    b, n, s, d = q.shape
    everything, first, second = slice(None), slice(0, s // 2), slice(s // 2, None)
    earlier, later = (everything, first, False), (second, everything, False)
    areas = [(rank, everything, everything, True)]  # its own keys, then those of the other ranks (ring.py)
    sources = ((rank - step) % len(keys) for step in range(1, len(keys)))
    areas += [(source, *(earlier if source < rank else later)) for source in sources]
    out = q.new_empty(b, s, n, d, dtype=torch.float32).transpose(1, 2)
    lse = q.new_empty(b, n, s, dtype=torch.float32)
    for source, rows, columns, causal in areas:
        block = q[:, :, rows], keys[source][:, :, columns], values[source][:, :, columns]
        sums = out[:, :, rows], lse[:, :, rows]
        for tile, *result in tiles.forward(kernel, *block, scale, tiles.Visibility(causal)):
            tile_out, tile_lse = (x[:, :, tile] for x in sums)
            if causal:
                tile_out.copy_(result[0])
                tile_lse.copy_(result[1])
            else:
                merge(tile_out, tile_lse, *result)
    out = out.to(q.dtype)
    dq = torch.zeros_like(out, dtype=torch.float32)
    dks, dvs = ([torch.zeros_like(x, dtype=torch.float32) for x in given] for given in (keys, values))
    for source, rows, columns, causal in reversed(areas):
        block = q[:, :, rows], keys[source][:, :, columns], values[source][:, :, columns]
        final = out[:, :, rows], lse[:, :, rows]
        sums = dq[:, :, rows], dks[source][:, :, columns], dvs[source][:, :, columns]
        for tile, seen, gradients in tiles.backward(
            kernel, grad[:, :, rows], *block, *final, scale, tiles.Visibility(causal)
        ):
            for total, part, gradient in zip(sums, (tile, seen, seen), gradients, strict=True):
                total[:, :, part] += gradient
    return out, dq.to(q.dtype), dks, dvs


def loss_errors(profile: Profile, device: torch.device) -> Errors:
    """Loss over a rank's part of the vocabulary, and its gradients with respect to hidden states and head."""
    rows = -(-profile.model.vocab_size // profile.parallel.tensor)
    hidden = profile.model.hidden_size
    tokens = _tokens(profile)
    targets = torch.randint(rows, (tokens,), generator=torch.Generator().manual_seed(2))
    inputs = [_normal(0, tokens, hidden), _normal(1, rows, hidden) * 0.02]
    programs, _ = _programs(profile, device)

    def run(x: Tensor, weight: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        options = {"first": torch.zeros((), dtype=torch.int64, device=x.device), "vocabulary": rows}
        loss = linear_cross_entropy(*leaves, targets.to(x.device), ONE, **options, programs=programs)
        return [loss, *torch.autograd.grad(loss, leaves)]

    logits = (leaves := [x.clone().requires_grad_() for x in inputs])[0] @ leaves[1].t()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return _errors(run, inputs, device, [loss, *torch.autograd.grad(loss, leaves)])


def update_errors(profile: Profile, device: torch.device) -> Errors:
    """Weights and moments after an update of the largest shard of a bucket, in float32."""
    train = profile.train
    settings, n = AdamW(train.betas, train.epsilon), _shard(profile)
    inputs = [_normal(0, n), _normal(1, n), _normal(2, n), _normal(3, n).abs()]
    _, compiled = _programs(profile, device)

    def run(*tensors: Tensor) -> list[Tensor]:
        local = tensors[0].device
        values = 3.0, 1.5, 0.0, train.learning_rate
        step, divisor, skip, rate = (torch.full((), value, device=local) for value in values)
        adamw(
            *tensors, settings=settings, weight_decay=train.weight_decay,
            learning_rate=train.learning_rate if compiled is None else rate,
            constants=settings.constants(train.weight_decay, local), step=step, divisor=divisor, skip=skip,
            compiled=compiled,
        )  # fmt: skip
        return [tensors[0], *tensors[2:]]

    weights, gradient, *moments = (x.clone() for x in inputs)
    scalars = tuple(map(torch.tensor, (3.0, train.learning_rate, 1.5, 0.0)))
    update(weights, gradient, *moments, scalars, settings.constants(train.weight_decay, weights.device))
    actual = run(*(x.to(device, copy=True) for x in inputs))
    return {"float32": _largest(actual, [weights, *moments])}


def _programs(profile: Profile, device: torch.device) -> tuple[LossPrograms, Update | None]:
    """The functions of the loss and the update, compiled as training compiles them on an accelerator."""
    kind = devices.KINDS[device.type]
    backend = profile.compile.backend or kind.compile_backend
    compiler = COMPILERS[backend](kind.type, profile.compile.flags)
    if kind.type in EAGER or not profile.compile.enabled or compiler.missing_requirement():
        return LossPrograms(), None
    last = profile.model.num_hidden_layers - 1
    stage = build_stage(profile, build_mesh(profile, rank=0), range(last, last + 1), META)
    compile_regions(stage, kind.type, lambda _: compiler.compile)
    return stage.loss_programs, Arithmetic(function_compiler(kind.type, lambda _: compiler.compile)).update


def _experts(profile: Profile, layer: MixtureOfExperts) -> KernelCheck:
    """The kernel for the products of a rank's experts; `layer` is on the meta device."""
    hidden, tokens = profile.model.hidden_size, _tokens(profile)
    count, _, width = _expert_shapes(layer, hidden)["down"]
    rows = tokens * layer.routing.top_k
    shape = f"{count} experts of {hidden} × {width}, {rows} rows"
    shape += ", of the last expert none" if count > 1 else ""
    remedy = OTHER_EXPERTS if layer.options.capacity_factor is None else UPDATE_SOFTWARE
    return KernelCheck("experts", shape, partial(expert_errors, layer, hidden, tokens), remedy)


def _expert_shapes(layer: MixtureOfExperts, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights, biases and updates of a rank's experts, by name."""
    width = layer.down.weight.shape[1]
    count = layer.gate_up.weight.numel() // (2 * width * hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up": (count, 2 * width, hidden),
        "down": (count, hidden, width),
    }
    if layer.gate_up.bias is not None:
        shapes |= {f"{name}_bias": shapes[name][:2] for name in ("gate_up", "down")}
    for name, linear in (("gate_up", layer.gate_up), ("down", layer.down)):
        if (factors := linear.update()) is not None:
            shapes |= {f"{name}_{letter}": tuple(x.shape) for letter, x in zip("ab", factors, strict=True)}
    return shapes


def expert_errors(layer: MixtureOfExperts, hidden: int, tokens: int, device: torch.device) -> Errors:
    """Outputs and gradients of a rank's experts, where the first have the most rows and the last has none.

    Args:
        layer: mixture of experts on the meta device.
        hidden: h.
        tokens: T.
    """
    k, factor = layer.routing.top_k, layer.options.capacity_factor
    of_experts = _expert_shapes(layer, hidden)
    count = of_experts["down"][0]
    shapes = {"x": (tokens, hidden), "weights": (tokens, k), **of_experts}
    frozen = () if layer.gate_up.weight.requires_grad else ("gate_up", "down", "gate_up_bias", "down_bias")
    inputs = [
        _normal(seed, *shape) * (shape[-1] ** -0.5 if name in of_experts else 1)
        for seed, (name, shape) in enumerate(shapes.items())
    ]
    inputs.append(_normal(len(inputs), tokens, hidden))
    draw = torch.rand(tokens, k, generator=torch.Generator().manual_seed(0))
    indices = (draw.square() * max(1, count - 1)).long()  # (T, k)
    chosen, slots = indices, None
    if factor is not None:
        size = capacity(factor, tokens, k, count)
        slot, kept = assign_slots(indices, count, tokens, size)
        chosen, slots = indices.where(kept, count), (slot, kept, count * size)

    def run(*tensors: Tensor, kernel: bool = True) -> list[Tensor]:
        *tensors, grad = tensors
        leaves = {
            name: x.detach().requires_grad_(name not in frozen)
            for name, x in zip(shapes, tensors, strict=True)
        }
        if kernel:
            y = _call_experts(leaves, indices, slots, layer.activation)
        else:
            y = _plain_experts(leaves, chosen, layer.activation)
        return [y, *torch.autograd.grad(y, [x for x in leaves.values() if x.requires_grad], grad)]

    return _errors(run, inputs, device, run(*inputs, kernel=False))


def _call_experts(
    values: dict[str, Tensor], indices: Tensor, slots: tuple[Tensor, Tensor, int] | None, activation: str
) -> Tensor:
    """Outputs of each token's experts by the layer's kernels (experts/layer.py), grouped or in `slots`."""
    values = dict(values)
    x, *operands = (values.pop(name) for name in ("x", "weights"))
    matrices = values.pop("gate_up"), values.pop("down"), Axis("expert")
    options: dict[str, Any] = {"activation": activation}
    for name in ("gate_up", "down"):
        if f"{name}_a" in values:
            options[f"{name}_update"] = values.pop(f"{name}_a"), values.pop(f"{name}_b")
    options |= values  # biases
    if slots is None:
        return routed_experts(x, *operands, indices.to(x.device), *matrices, **options)
    slot, kept, size = slots
    return slotted_experts(x, *operands, slot.to(x.device), kept.to(x.device), size, *matrices, **options)


def _plain_experts(values: dict[str, Tensor], indices: Tensor, activation: str) -> Tensor:
    """Weighted sum of the outputs of each token's experts, one expert after the other."""
    x, weights = values["x"], values["weights"]
    by_expert = {
        name: value.unbind() for name, value in values.items() if value is not x and value is not weights
    }

    def product(name: str, rows: Tensor, expert: int) -> Tensor:
        parts = {key: of_experts[expert] for key, of_experts in by_expert.items() if key.startswith(name)}
        weight = parts[name]
        if f"{name}_a" in parts:
            weight = weight + parts[f"{name}_b"] @ parts[f"{name}_a"]
        return torch.nn.functional.linear(rows, weight, parts.get(f"{name}_bias"))

    y = torch.zeros_like(x)
    for expert in range(len(values["gate_up"])):
        token, choice = (indices == expert).nonzero(as_tuple=True)
        hidden = ACTIVATIONS[activation].forward(product("gate_up", x[token], expert))
        out = product("down", hidden, expert) * weights[token, choice][:, None]
        y = y.index_add(0, token, out)
    return y


def _fp8_products(profile: Profile) -> list[KernelCheck]:
    """The FP8 products for each shape of a layer's matrices; none in other precisions."""
    if profile.train.precision != "fp8":
        return []
    layers = StageCosts(profile).module(range(1)).layers
    matrices = [
        module.weight.shape
        for module in layers.modules()
        if isinstance(getattr(module, "products", None), Float8)
    ]
    tokens = _tokens(profile)
    return [
        KernelCheck(
            f"FP8 {outputs} × {inputs}",
            f"{tokens} × {inputs} by {inputs} × {outputs}, fp8_recipe {profile.train.fp8_recipe}",
            partial(fp8_errors, profile, inputs, outputs),
            NO_FP8,
        )
        for outputs, inputs in dict.fromkeys(map(tuple, matrices))
    ]


def fp8_errors(profile: Profile, inputs: int, outputs: int, device: torch.device) -> Errors:
    """Output and gradients of an FP8 linear layer, compared with float32 and with emulated FP8."""
    tokens = _tokens(profile)
    # Scales differ by row and by block of a row, so that scales in a wrong order cause errors.
    values = [
        _normal(seed, *size) * _magnitudes(size[0], 1)[:, None] * _magnitudes(size[1], 32)
        for seed, size in enumerate(((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    ]

    def run(products: Products, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        placed = {"dtype": x.dtype, "device": x.device}
        layer = ColumnParallelLinear(inputs, outputs, ONE, products=products, **placed)
        with torch.no_grad():
            layer.weight.copy_(weight)
        x = x.detach().requires_grad_()
        y = layer(x)
        return [y, *torch.autograd.grad(y, (x, layer.weight), grad)]

    low = [x.bfloat16() for x in values]
    found = run(build_products(profile, device), *(x.to(device) for x in low))
    emulated = run(Float8(profile.train.fp8_recipe, emulated=True), *low)
    x, weight, grad = values
    exact = [x @ weight.t(), grad @ weight, grad.t() @ x]
    return {
        "fp8": _largest(found, exact),
        "emulated": _largest(found, [each.detach().float() for each in emulated]),
    }


def _magnitudes(size: int, block: int) -> Tensor:
    """Powers of two from 1/4 to 4 that change from block to block."""
    return torch.exp2((torch.arange(size) // block % 5).float() - 2)


def _attention_sizes(profile: Profile) -> tuple[int, int, int, int]:
    """Query heads and KV heads of a rank, tokens, and head size."""
    model, tensor = profile.model, profile.parallel.tensor
    kv = model.num_key_value_heads * kv_replicas(model.num_key_value_heads, tensor) // tensor
    return model.num_attention_heads // tensor, kv, min(_sequence(profile), SEQUENCE), model.head_dim


def _uses_ring(profile: Profile) -> tuple[bool, bool]:
    """Whether layers use ring attention, and whether any use another: with masks, or on one context rank."""
    model = profile.model
    windows = [model.window(layer) for layer in range(model.num_hidden_layers)]
    names = [name for name, _ in StageCosts(profile).module(range(1)).named_parameters()]
    masked = profile.document_masks or any(name.endswith(".sinks") for name in names)
    in_graph = devices.KINDS[profile.cluster.device].compiles_operators  # attention/gathered.py
    ring = profile.parallel.context > 1 and None in windows and not masked and not in_graph
    return ring, not ring or any(windows)


def _ring_tokens(profile: Profile) -> int:
    """Tokens of a context rank, at most SEQUENCE / 2."""
    return min(_sequence(profile), SEQUENCE // 2)


def _shard(profile: Profile) -> int:
    """Elements of the largest shard of a bucket, at most SHARD."""
    buckets = plan_buckets(profile, [StageCosts(profile).module(partition_layers(profile)[0])])
    return min(max(bucket.size // bucket.shards for bucket in buckets if not bucket.frozen), SHARD)


def _sequence(profile: Profile) -> int:
    return profile.train.sequence_length // profile.parallel.context


def _tokens(profile: Profile) -> int:
    return min(_sequence(profile), TOKENS)


def _normal(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def _errors(
    run: Callable[..., list[Tensor]], inputs: list[Tensor], device: torch.device, expected: list[Tensor]
) -> Errors:
    """Errors of a function of the inputs on the device, in each precision."""
    return {
        precision: _largest(run(*(x.to(device, dtype) for x in inputs)), expected)
        for precision, dtype in PRECISIONS.items()
    }


def _largest(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative norm of a difference; NaN if any is NaN."""
    pairs = zip(actual, expected, strict=True)
    return torch.stack([(x.detach().float().cpu() - y).norm() / y.norm() for x, y in pairs]).max().item()
