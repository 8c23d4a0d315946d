"""Measure this device's calibration table: `python -m modeling.check_device --calibrate`.

Products and attention run at a grid of shapes, products also in FP8 on accelerators that support it. Then one layer of a small
Llama runs forward and backward; the time beyond its products is that of its other operators. The optimizer's update, which only
reads and writes memory, runs on one flat shard. Takes seconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from itertools import product
from typing import Any

import torch

from modeling.compilation import compilers
from modeling.models.build import DTYPES, build_mesh, build_stage
from modeling.planning.calibration import Calibration
from modeling.planning.optimizer_traffic import ADAMW_BYTES
from modeling.planning.stage_costs import StageCosts
from parallel.attention.attention import attention
from parallel.device import Device, has_fused_adamw
from parallel.layers.products import E4M3, Float8, quantize
from parallel.mesh import Axis
from parallel.optimizer.adamw import AdamW, adamw, update
from profiles.schema import Profile

# Rows, and inner sizes or columns, of products; tokens of attention; the layer's hidden size and tokens; elements of an update.
ACCELERATOR = ((1024, 8192), (512, 2048, 8192), (1024, 4096, 16384), (4096, 8192), 1 << 26)
HOST = ((256, 2048), (128, 512, 2048), (256, 1024), (512, 1024), 1 << 22)
HEAD_SIZES = (64, 128)
ROUNDS, QUEUED = 5, 10
FP8 = Float8("rowwise")
Sizes = tuple[Sequence[int], Sequence[int], Sequence[int], tuple[int, int], int]


def calibrate(
    device: Device, local: torch.device, name: str, sizes: Sizes | None = None, compiled: bool = False
) -> Calibration:
    """Measure a device.

    Args:
        local: this process's device.
        name: name of the accelerator, or the device's type.
        sizes: sizes of the grid; None: chosen for the device.
        compiled: measure the layer, and the update where torch has no kernel for it, compiled, as training runs them.
    """
    rows, widths, tokens, layer, shard = sizes or (HOST if device.type == "cpu" else ACCELERATOR)
    precisions = [precision for precision in DTYPES if precision != "fp8" or device.peak(precision)]
    products = {
        precision: [
            *_products(device, local, precision, rows, widths),
            *(_attentions(device, local, DTYPES[precision], tokens) if precision != "fp8" else ()),
        ]
        for precision in precisions
    }
    table = Calibration(
        name,
        date.today().isoformat(),
        torch.__version__.split("+")[0],
        products,
        dict.fromkeys(precisions, torch.inf),
        _update_bandwidth(device, local, shard, compiled),
    )
    others = {
        precision: _others(device, local, table, _profile(device, precision, *layer), compiled)
        for precision in precisions
    }
    return replace(table, others=others)


def fastest(device: Device, call: Callable[[], Any]) -> float:
    """Seconds per call in the fastest of ROUNDS rounds, after one that warms up.

    On an accelerator, a round queues several calls between two events, so that the time of a launch is not counted.
    """
    calls = 1 if device.synchronous else QUEUED
    times = []
    for _ in range(ROUNDS + 1):
        device.synchronize()
        start = device.mark()
        for _ in range(calls):
            call()
        end = device.mark()
        device.synchronize()
        times.append(device.seconds(start, end) / calls)
    return min(times[1:])


def _products(
    device: Device, local: torch.device, precision: str, rows: Sequence[int], widths: Sequence[int]
) -> Iterator[tuple[str, int, int, int, float]]:
    """In FP8, the products alone: quantization counts as a layer's other operators."""
    for m, k, n in product(rows, widths, widths):
        a, b = (torch.randn(*shape, device=local).to(DTYPES[precision]) for shape in ((m, k), (k, n)))
        if precision == "fp8":
            eights = [quantize(x, FP8.recipe, E4M3) for x in (a, b.t())]
            seconds = fastest(device, lambda eights=eights: FP8.multiply(*eights, torch.bfloat16, fast=True))
        else:
            seconds = fastest(device, lambda a=a, b=b: a @ b)
        yield "matmul", m, k, n, 2 * m * k * n / seconds


def _attentions(
    device: Device, local: torch.device, dtype: torch.dtype, tokens: Sequence[int]
) -> Iterator[tuple[str, int, int, int, float]]:
    """Causal attention of 4 query heads per KV head, forward and backward together."""
    for s, d in product(tokens, HEAD_SIZES):
        heads = 8
        q, k, v = (torch.randn(1, n, s, d, device=local).to(dtype).requires_grad_() for n in (heads, 2, 2))

        def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            torch.autograd.grad(attention(q, k, v, Axis("context")), (q, k, v), torch.ones_like(q))

        # as operator_costs.py counts: 2 products in forward and 5 in backward, half of each
        flops = 7 * 2 * heads * s * s * d / 2
        yield "attention", s, s, d, flops / fastest(device, call)


def _others(
    device: Device, local: torch.device, table: Calibration, profile: Profile, compiled: bool
) -> float:
    """Bytes per second of a layer's operators other than its products."""
    costs = StageCosts(profile).layers(range(1, 2))[0]
    stage = build_stage(profile, build_mesh(profile, rank=0), range(1, 2), local)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(std=0.02)
    if compiled:
        stage.compile(backend=compilers.backend_name(profile), fullgraph=True, dynamic=False)
    tokens, width = profile.train.sequence_length, profile.model.hidden_size
    x = torch.randn(tokens, width, device=local).to(DTYPES[profile.train.precision]).requires_grad_()
    positions = torch.arange(tokens, device=local)

    def call() -> None:
        y = stage(x, positions, samples=positions[:1])
        trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        torch.autograd.grad(y, (x, *trained), torch.ones_like(y))

    seconds = fastest(device, call)
    work = table.seconds(profile.train.precision, costs.products, 0)
    return costs.moved / max(seconds - work, 0.05 * seconds)


def _update_bandwidth(device: Device, local: torch.device, elements: int, compiled: bool) -> float:
    """Bytes per second that AdamW's update reads and writes: float32 weights, gradient and two moments."""
    weights, gradient, *moments = (torch.zeros(elements, device=local) for _ in range(4))
    one, zero = torch.ones((), device=local), torch.zeros((), device=local)
    settings = AdamW((0.9, 0.95), 1e-8)
    constants, program = settings.constants(0.1, local), None
    if compiled and not has_fused_adamw(device.type):
        program = torch.compile(update, backend=device.compile_backend, fullgraph=True, dynamic=False)

    def call() -> None:
        adamw(
            weights, gradient, *moments, settings=settings, weight_decay=0.1, constants=constants, step=one,
            learning_rate=one if program else 1e-3, divisor=one, skip=zero, compiled=program,
        )  # fmt: skip

    return elements * (ADAMW_BYTES + gradient.itemsize) / fastest(device, call)


def _profile(device: Device, precision: str, hidden: int, tokens: int) -> Profile:
    """A Llama of three layers on one device; the middle one is measured."""
    return Profile.model_validate(
        {
            "name": "calibration",
            "model": {
                "hidden_size": hidden,
                "intermediate_size": hidden * 7 // 2,
                "num_hidden_layers": 3,
                "num_attention_heads": hidden // 64,
                "num_key_value_heads": hidden // 128,
                "vocab_size": 512,
                "max_position_embeddings": tokens,
            },
            "tokenizer": {"source": "train", "vocabulary_size": 512},
            "data": {"sources": [{"kind": "python-docs"}]},
            "train": {
                "steps": 1,
                "global_batch_size": 1,
                "sequence_length": tokens,
                "learning_rate": 1e-3,
                "precision": precision,
            },
            "cluster": {"device": device.type},
        }
    )
