"""Errors of a layer's norms and matrix products in each precision, against float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from modeling.check_device.kernel_check import ONE, TOKENS, Errors, KernelCheck, errors_of, largest, normal
from modeling.models.build import build_products
from modeling.planning.stage_costs import StageCosts
from parallel.layers.linear import ColumnParallelLinear
from parallel.layers.norms import CenteredNorm, LayerNorm, RMSNorm
from parallel.layers.products import EXACT, Float8, Products
from profiles.schema import Profile

NO_FP8 = "set train.precision=bf16"


def tokens_of(profile: Profile) -> int:
    """Tokens of a context rank, at most TOKENS."""
    return min(profile.train.sequence_length // profile.parallel.context, TOKENS)


def layer_kernels(profile: Profile) -> list[KernelCheck]:
    """The norms of hidden states and the matrix products of each distinct kind of layer."""
    modules = [*_modules(profile)]
    tokens, hidden = tokens_of(profile), profile.model.hidden_size
    norm = next(each for each in modules if isinstance(each, RMSNorm))
    exact = (each for each in modules if not isinstance(getattr(each, "products", None), Float8))
    weights = (weight for each in exact if isinstance(weight := getattr(each, "weight", None), Tensor))
    matrices = dict.fromkeys((len(weight), weight.shape[1]) for weight in weights if weight.dim() == 2)
    found = [KernelCheck("norm", f"{tokens} × {hidden}", partial(norm_errors, norm, tokens, hidden))]
    if matrices:
        shapes = ", ".join(f"{outputs} × {inputs}" for outputs, inputs in matrices)
        errors = partial(product_errors, [*matrices], tokens)
        found.append(KernelCheck("products", f"{tokens} tokens by {shapes}", errors))
    return [*found, *fp8_products(profile)]


def _modules(profile: Profile) -> Iterator[nn.Module]:
    """Modules of the first layer, and of the first with experts, on the meta device."""
    model, costs = profile.model, StageCosts(profile)
    first = next(filter(model.has_experts, range(model.num_hidden_layers)), 0)
    for layer in {0, first}:
        yield from costs.module(range(layer, layer + 1)).layers.modules()


def norm_errors(norm: RMSNorm, tokens: int, hidden: int, device: torch.device) -> Errors:
    """Output and gradients of a norm of hidden states; `norm` is on the meta device."""
    inputs = [normal(0, tokens, hidden) + 0.5, 1 + 0.1 * normal(1, hidden), normal(2, tokens, hidden)]
    epsilon, centred = norm.epsilon, isinstance(norm, CenteredNorm | LayerNorm)

    def run(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        layer = type(norm)(hidden, ONE, epsilon=epsilon, dtype=x.dtype, device=x.device)
        with torch.no_grad():
            layer.weight.copy_(weight)
        x = x.detach().requires_grad_()
        y = layer(x)
        return [y, *torch.autograd.grad(y, (x, layer.weight), grad)]

    leaves = [each.clone().requires_grad_() for each in inputs[:2]]
    z = leaves[0] - leaves[0].mean(-1, keepdim=True) if centred else leaves[0]
    y = z / (z.square().mean(-1, keepdim=True) + epsilon).sqrt() * leaves[1]
    return errors_of(run, inputs, device, [y, *torch.autograd.grad(y, leaves, inputs[2])])


def product_errors(shapes: list[tuple[int, int]], tokens: int, device: torch.device) -> Errors:
    """Largest errors of linear layers with weights of these shapes: output and gradients."""
    found = []
    for outputs, inputs in shapes:
        values = [normal(0, tokens, inputs), normal(1, outputs, inputs), normal(2, tokens, outputs)]
        x, weight, grad = values
        exact = [x @ weight.t(), grad @ weight, grad.t() @ x]
        found.append(errors_of(partial(_linear, EXACT), values, device, exact))
    return {precision: max(each[precision] for each in found) for precision in found[0]}


def _linear(products: Products, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Output of a linear layer, and its gradients with respect to x and the weight."""
    outputs, inputs = weight.shape
    layer = ColumnParallelLinear(inputs, outputs, ONE, products=products, dtype=x.dtype, device=x.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, (x, layer.weight), grad)]


def fp8_products(profile: Profile) -> list[KernelCheck]:
    """The FP8 products for each shape of a layer's matrices; none in other precisions."""
    if profile.train.precision != "fp8":
        return []
    layers = StageCosts(profile).module(range(1)).layers
    matrices = [
        tuple(module.get_parameter("weight").shape)
        for module in layers.modules()
        if isinstance(getattr(module, "products", None), Float8)
    ]
    tokens = tokens_of(profile)
    return [
        KernelCheck(
            f"FP8 {outputs} × {inputs}",
            f"{tokens} × {inputs} by {inputs} × {outputs}, fp8_recipe {profile.train.fp8_recipe}",
            partial(fp8_errors, profile, inputs, outputs),
            NO_FP8,
        )
        for outputs, inputs in dict.fromkeys(matrices)
    ]


def fp8_errors(profile: Profile, inputs: int, outputs: int, device: torch.device) -> Errors:
    """Output and gradients of an FP8 linear layer, compared with float32 and with emulated FP8."""
    tokens = tokens_of(profile)
    # Scales differ by row and by block of a row, so that scales in a wrong order cause errors.
    values = [
        normal(seed, *size) * _magnitudes(size[0], 1)[:, None] * _magnitudes(size[1], 32)
        for seed, size in enumerate(((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    ]

    low = [x.bfloat16() for x in values]
    found = _linear(build_products(profile, device), *(x.to(device) for x in low))
    emulated = _linear(Float8(profile.train.fp8_recipe, emulated=True), *low)
    x, weight, grad = values
    exact = [x @ weight.t(), grad @ weight, grad.t() @ x]
    return {
        "fp8": largest(found, exact),
        "emulated": largest(found, [each.detach().float() for each in emulated]),
    }


def _magnitudes(size: int, block: int) -> Tensor:
    """Powers of two from 1/4 to 4 that change from block to block."""
    return torch.exp2((torch.arange(size) // block % 5).float() - 2)
