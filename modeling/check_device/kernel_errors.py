"""Errors of the kernels that training uses, compared with plain formulas in float32.

Checks attention of each kind of layer, the loss, AdamW's update, the grouped products of a mixture of experts, and the norms and
products of layers (product_errors.py). Each is called as by the model or the optimizer, so it is the kernel that a run uses, on
the shapes of one rank of a profile. Sequences and shards, but not weights, are limited to what a CPU computes in seconds. The
loss has a chunk as large as in training, so on accelerators the formula runs on the device itself, in tiles.

The blocks of ring attention are computed as by a ring of two ranks, but in one process. On accelerators, the loss is compiled if
the profile is, and the update where training compiles it; on a CPU both run eager, which takes no time to compile.

Not `torch.testing.assert_close`, which compares element by element: sums in another order differ by much in elements near zero,
and a norm of the whole difference does not. torch's own tests of operators have neither these kernels nor a profile's shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modeling.check_device.kernel_check import (
    ONE,
    TOKENS,
    UPDATE_SOFTWARE,
    Errors,
    KernelCheck,
    errors_of,
    largest,
    normal,
)
from modeling.check_device.product_errors import layer_kernels, tokens_of
from modeling.compilation.compilers import COMPILERS
from modeling.compilation.graph_cache import compile_regions, function_compiler
from modeling.models.build import build_mesh, build_stage, device_of, experts_by_layer, partition_layers
from modeling.models.rope import score_factor
from modeling.planning.memory import plan_buckets
from modeling.planning.stage_costs import META, StageCosts
from parallel import device as devices
from parallel.attention import kernels
from parallel.attention.attention import attention
from parallel.attention.gathered import gathered_attention
from parallel.attention.tiles import AttentionOptions
from parallel.attention.zigzag import RankAttention, zigzag_positions
from parallel.constraints import kv_replicas
from parallel.experts.activations import ACTIVATIONS
from parallel.experts.dropless import routed_experts
from parallel.experts.layer import MixtureOfExperts
from parallel.experts.slots import assign_slots, capacity, slotted_experts
from parallel.logits import soft_capped
from parallel.loss import LossPrograms, choose_chunks, chunk_tokens, linear_cross_entropy
from parallel.mesh import Axis
from parallel.optimizer.adamw import AdamW, Update, adamw, update
from parallel.optimizer.arithmetic import Arithmetic
from profiles.schema import Profile
from profiles.sections.base import required

SEQUENCE, SHARD = 2048, 1 << 20  # maximum tokens of attention, and elements of a shard
EAGER = ("cpu",)  # device types on which nothing is compiled, so that a check takes a second
OTHER_EXPERTS = f"set train.capacity_factor, whose experts need no grouped products, or {UPDATE_SOFTWARE}"


def kernels_of(profile: Profile) -> list[KernelCheck]:
    """The kernels that training with this profile uses."""
    model, tensor = profile.model, profile.parallel.tensor
    queries, kv, s, d = _attention_sizes(profile)
    rows, tokens = -(-model.vocab_size // tensor), _loss_tokens(profile)
    heads = f"{queries} query and {kv} KV heads of {d}"
    ring, windows = _uses_ring(profile)
    found = []
    for window in windows:
        name = "context attention" if _gathers_context(profile) else "attention"
        name += "" if window is None else f", window {window}"
        found.append(KernelCheck(name, f"{heads}, {s} tokens", partial(attention_errors, profile, window)))
    if ring:
        length = _ring_tokens(profile)
        shape = f"{heads}, {length} tokens of each of 2 ranks"
        found.append(KernelCheck("ring attention", shape, partial(ring_errors, profile)))
    loss = f"{tokens} × {model.hidden_size} by {rows} tokens"
    found.append(KernelCheck("loss", loss, partial(loss_errors, profile)))
    found.append(KernelCheck("update", f"{_shard(profile)} elements", partial(update_errors, profile)))
    layer = next(filter(model.has_experts, range(model.num_hidden_layers)), None)
    if layer is not None:
        (experts,) = experts_by_layer([StageCosts(profile).module(range(layer, layer + 1))]).values()
        found.append(_experts(profile, experts))
    return [*found, *layer_kernels(profile)]


def attention_errors(profile: Profile, window: int | None, device: torch.device) -> Errors:
    """Output and gradients of rank-local attention with this window and the profile's document mask.

    With sinks, narrower values and a scale of the scores if the model's layers have them. If the profile gathers keys and values
    over a context axis, as for one rank of it: both causal squares, and a block of queries against earlier keys.
    """
    queries, kv, s, d = _attention_sizes(profile)
    value = profile.model.v_head_dim or d
    heads = (queries, d), (kv, d), (kv, value), (queries, value)
    inputs = [normal(number, 1, n, s, width) for number, (n, width) in enumerate(heads)]
    inputs += [normal(4, queries)] if _has_sinks(profile) else []
    documents = torch.arange(s)[None] // max(1, s // 3) if profile.document_masks else None
    if window is not None and window >= s:  # of a shorter sequence than in training
        window = max(1, window * s // profile.train.sequence_length)

    def run(
        q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *sinks: Tensor, kernel: str | None = None
    ) -> list[Tensor]:
        q, k, v, *others = leaves = [x.detach().requires_grad_() for x in (q, k, v, *sinks)]
        options: dict[str, Any] = {"documents": None if documents is None else documents.to(q.device)}
        options |= {"window": window, "scale": _score_scale(profile)}
        options["soft_cap"] = profile.model.attn_logit_softcapping
        options["sinks"] = others[0] if others else None
        if gathers and kernel is None:  # over one rank, by the device's kernel, with padded values
            axis = Axis("context", graph_kernel=kernels.default_kernel(q))
            padded = torch.nn.functional.pad(v, (0, k.shape[-1] - value))
            out = gathered_attention(q, k, padded, axis, AttentionOptions(**options))[..., :value]
        else:
            out = attention(q, k, v, Axis("context"), kernel=kernel, **options)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    gathers = _gathers_context(profile)
    return errors_of(run, inputs, device, run(*inputs, kernel="math"))


def ring_errors(profile: Profile, device: torch.device) -> Errors:
    """Output and gradients of causal attention over a ring of two ranks, both computed in this process."""
    queries, kv, _, d = _attention_sizes(profile)
    s, scale = 2 * _ring_tokens(profile), _score_scale(profile)
    inputs = [normal(number, 1, n, s, d) for number, n in enumerate((queries, kv, kv, queries))]

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        shards = [zigzag_positions(s, 2, rank).to(q.device) for rank in range(2)]
        keys, values = ([x[:, :, positions] for positions in shards] for x in (k, v))
        out, dq = (torch.empty_like(x) for x in (q, q))
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        for rank, positions in enumerate(shards):
            share = ring_share(rank, q[:, :, positions], keys, values, grad[:, :, positions], scale)
            out[:, :, positions], dq[:, :, positions], dkv = share
            for source, (part_dk, part_dv) in zip(shards, dkv, strict=True):
                dk[:, :, source] += part_dk
                dv[:, :, source] += part_dv
        return [out, dq, dk, dv]

    q, k, v = leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = attention(q, k, v, scale=scale, kernel="math")
    return errors_of(run, inputs, device, [out, *torch.autograd.grad(out, leaves, inputs[3])])


def ring_share(
    rank: int,
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    grad: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What a rank of ring attention computes, without communication: causal, without masks.

    Args:
        rank: the rank of the context axis.
        q: (b, n, s/c, d), the rank's zigzag shard.
        keys, values: (b, k, s/c, d) of each rank.
        grad: gradient of the output, as q.
        scale: of the scores; None: 1 / √d.

    Returns:
        out and dq, as q, and the rank's shares of dk and dv (2, b, k, s/c, d) of each rank's keys and values, in float32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    local = RankAttention(rank, len(keys), kernels.get_kernel(kernels.default_kernel(q)), scale)
    blocks = [*local.blocks(q.shape[2])]
    out, lse = local.empty_results(q)
    for block in blocks:
        local.forward(block, q, keys[block.source], values[block.source], out, lse)
    out, dq = out.to(q.dtype), torch.zeros_like(out)
    shares = {
        block.source: local.backward(block, grad, q, keys[block.source], values[block.source], out, lse, dq)
        for block in reversed(blocks)
    }
    return out, dq.to(q.dtype), [shares[source] for source in range(len(keys))]


def loss_errors(profile: Profile, device: torch.device) -> Errors:
    """Loss of a chunk over a rank's part of the vocabulary, and its gradients by hidden states and head."""
    rows = -(-profile.model.vocab_size // profile.parallel.tensor)
    hidden = profile.model.hidden_size
    tokens = _loss_tokens(profile)
    targets = torch.randint(rows, (tokens,), generator=torch.Generator().manual_seed(2))
    inputs = [normal(0, tokens, hidden), normal(1, rows, hidden) * 0.02]
    programs, _ = _programs(profile, device)

    def run(x: Tensor, weight: Tensor) -> list[Tensor]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        chunk, keep = choose_chunks(_microbatch(profile), weight, device_of(profile))
        loss = linear_cross_entropy(
            x,
            weight,
            targets.to(x.device),
            ONE,
            first=torch.zeros((), dtype=torch.int64, device=x.device),
            vocabulary=rows,
            chunk=chunk,
            keep=keep,
            programs=programs,
            soft_cap=profile.model.final_logit_softcapping,
        )
        return [loss, *torch.autograd.grad(loss, [x, weight])]

    kind, deterministic = devices.KINDS[device.type], torch.are_deterministic_algorithms_enabled()
    place = torch.device("cpu") if tokens <= TOKENS else device
    with kind.chosen_kernels(deterministic, "float32"):
        hidden_states, weight, labels = (x.to(place) for x in (*inputs, targets))
        exact = _plain_loss(hidden_states, weight, labels, profile.model.final_logit_softcapping)
    return errors_of(run, inputs, device, exact)


def _plain_loss(x: Tensor, weight: Tensor, targets: Tensor, soft_cap: float | None) -> list[Tensor]:
    """Summed cross-entropy of the logits X Wᵀ and its gradients, in tiles of TOKENS tokens."""
    leaves = [each.detach().requires_grad_() for each in (x, weight)]
    total = x.new_zeros(())
    for rows, wanted in zip(leaves[0].split(TOKENS), targets.split(TOKENS), strict=True):
        logits = soft_capped(rows @ leaves[1].t(), soft_cap)
        loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        loss.backward()
        total += loss.detach()
    return [total, *(required(each.grad) for each in leaves)]


def update_errors(profile: Profile, device: torch.device) -> Errors:
    """Weights and moments after an update of the largest shard of a bucket, in float32."""
    train = profile.train
    settings, n = AdamW(train.betas, train.epsilon), _shard(profile)
    inputs = [normal(0, n), normal(1, n), normal(2, n), normal(3, n).abs()]
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

    weights, gradient, average, average_sq = (x.clone() for x in inputs)
    step, rate, divisor, skip = map(torch.tensor, (3.0, train.learning_rate, 1.5, 0.0))
    constants = settings.constants(train.weight_decay, weights.device)
    update(weights, gradient, average, average_sq, (step, rate, divisor, skip), constants)
    actual = run(*(x.to(device, copy=True) for x in inputs))
    return {"float32": largest(actual, [weights, average, average_sq])}


def _programs(profile: Profile, device: torch.device) -> tuple[LossPrograms, Update | None]:
    """The functions of the loss and the update, compiled as training compiles them on an accelerator."""
    kind = devices.KINDS[device.type]
    backend = profile.compile.backend or kind.compile_backend
    compiler = COMPILERS[backend](kind.type, profile.compile.flags)
    if kind.type in EAGER or not profile.compile.possible or compiler.missing_requirement():
        return LossPrograms(), None
    last = profile.model.num_hidden_layers - 1
    stage = build_stage(profile, build_mesh(profile, rank=0), range(last, last + 1), META)
    compile_regions(stage, kind.type, lambda _: compiler.compile)
    return stage.loss_programs, Arithmetic(function_compiler(kind.type, lambda _: compiler.compile)).update


def _experts(profile: Profile, layer: MixtureOfExperts) -> KernelCheck:
    """The kernel for the products of a rank's experts; `layer` is on the meta device."""
    hidden, tokens = profile.model.hidden_size, tokens_of(profile)
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
        normal(seed, *shape) * (shape[-1] ** -0.5 if name in of_experts else 1)
        for seed, (name, shape) in enumerate(shapes.items())
    ]
    inputs.append(normal(len(inputs), tokens, hidden))
    draw = torch.rand(tokens, k, generator=torch.Generator().manual_seed(0))
    indices = (draw.square() * max(1, count - 1)).long()  # (T, k)
    chosen, slots = indices, None
    if factor is not None:
        size = capacity(factor, tokens, k, count)
        slot, kept = assign_slots(indices, count, tokens, size)
        chosen, slots = indices.where(kept, count), (slot, kept, count * size)

    def run(*tensors: Tensor, kernel: bool = True) -> list[Tensor]:
        *values, grad = tensors
        leaves = {
            name: x.detach().requires_grad_(name not in frozen)
            for name, x in zip(shapes, values, strict=True)
        }
        if kernel:
            y = _call_experts(leaves, indices, slots, layer.activation)
        else:
            y = _plain_experts(leaves, chosen, layer.activation)
        return [y, *torch.autograd.grad(y, [x for x in leaves.values() if x.requires_grad], grad)]

    return errors_of(run, inputs, device, run(*inputs, kernel=False))


def _call_experts(
    values: dict[str, Tensor], indices: Tensor, slots: tuple[Tensor, Tensor, int] | None, activation: str
) -> Tensor:
    """Outputs of each token's experts by the layer's kernels (experts/layer.py), grouped or in `slots`."""
    values = dict(values)
    x, weights, gate_up, down = (values.pop(name) for name in ("x", "weights", "gate_up", "down"))
    axis = Axis("expert")
    options: dict[str, Any] = {"activation": activation}
    for name in ("gate_up", "down"):
        if f"{name}_a" in values:
            options[f"{name}_update"] = values.pop(f"{name}_a"), values.pop(f"{name}_b")
    options |= values  # biases
    if slots is None:
        return routed_experts(x, weights, indices.to(x.device), gate_up, down, axis, **options)
    slot, kept = (each.to(x.device) for each in slots[:2])
    return slotted_experts(x, weights, slot, kept, slots[2], gate_up, down, axis, **options)


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


def _attention_sizes(profile: Profile) -> tuple[int, int, int, int]:
    """Query heads and KV heads of a rank, tokens, and head size."""
    model, tensor = profile.model, profile.parallel.tensor
    kv = model.num_key_value_heads * kv_replicas(model.num_key_value_heads, tensor) // tensor
    return model.num_attention_heads // tensor, kv, min(_sequence(profile), SEQUENCE), model.head_dim


def _uses_ring(profile: Profile) -> tuple[bool, list[int | None]]:
    """Whether layers use ring attention, and the distinct windows of those that do not."""
    model = profile.model
    windows = list(dict.fromkeys(model.window(layer) for layer in range(model.num_hidden_layers)))
    masked = profile.document_masks or _has_sinks(profile) or profile.model.attn_logit_softcapping is not None
    context = profile.parallel.context > 1 and not _gathers_context(profile)
    ring = context and None in windows and not masked
    return ring, [window for window in windows if not (ring and window is None)]


def _gathers_context(profile: Profile) -> bool:
    """Whether attention over the context axis gathers keys in the graph (attention/gathered.py)."""
    return profile.parallel.context > 1 and devices.KINDS[profile.cluster.device].compiles_operators


def _has_sinks(profile: Profile) -> bool:
    parameters = StageCosts(profile).module(range(1)).named_parameters()
    return any(name.endswith(".sinks") for name, _ in parameters)


def _score_scale(profile: Profile) -> float | None:
    """The scale of attention scores; None: 1 / √d."""
    model = profile.model
    return score_factor(model) * model.head_dim**-0.5 if model.v_head_dim else model.score_scale


def _ring_tokens(profile: Profile) -> int:
    """Tokens of a context rank, at most SEQUENCE / 2."""
    return min(_sequence(profile), SEQUENCE // 2)


def _shard(profile: Profile) -> int:
    """Elements of the largest shard of a bucket, at most SHARD."""
    buckets = plan_buckets(profile, [StageCosts(profile).module(partition_layers(profile)[0])])
    return min(max(bucket.size // bucket.shards for bucket in buckets if not bucket.frozen), SHARD)


def _sequence(profile: Profile) -> int:
    return profile.train.sequence_length // profile.parallel.context


def _loss_tokens(profile: Profile) -> int:
    """Tokens of a chunk of the loss that adds up the head's gradient."""
    rows = -(-profile.model.vocab_size // profile.parallel.tensor)
    return chunk_tokens(_microbatch(profile), rows, device_of(profile))


def _microbatch(profile: Profile) -> int:
    """Tokens of a context rank's microbatch."""
    return profile.micro_batch_rows * _sequence(profile)
