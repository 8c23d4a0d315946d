"""Measure this device's calibration table: `python -m modeling.check_device --calibrate`.

Products and attention run at a grid of shapes, products also in FP8 on accelerators that support it. Then one layer of a small
Llama runs forward and backward; the time beyond its products is that of its other operators. The optimizer's update, which only
reads and writes memory, runs on one flat shard. Takes seconds on a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import product
from typing import Any

import torch

from modeling.compilation import compilers
from modeling.models.build import DTYPES, build_mesh, build_stage
from modeling.planning.calibration import Calibration
from modeling.planning.stage_costs import StageCosts
from parallel import device as devices
from parallel.attention.attention import attention
from parallel.device import Device, has_adamw_kernel
from parallel.layers.products import E4M3, Float8, quantize
from parallel.mesh import Axis
from parallel.optimizer.adamw import AdamW, adamw, update
from profiles.schema import Profile

# Rows, and inner sizes or columns, of products; tokens of attention; the layer's hidden size and tokens; elements of an update.
ACCELERATOR = (
    (1024, 8192),
    (512, 2048, 8192),
    (1024, 2048, 4096, 8192, 16384, 32768),
    (4096, 8192),
    1 << 26,
)
HOST = ((256, 2048), (128, 512, 2048), (256, 1024), (512, 1024), 1 << 22)
HEAD_SIZES = (64, 128)
HEADS, HOST_HEADS = 32, 8  # query heads of attention, 4 for each KV head
ROUNDS, QUEUED = 5, 10
LONG = 1e12  # FLOPs of attention above which a round is a single call
BUSY = 8192  # rows and columns of products that keep an accelerator busy
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


def fastest(device: Device, call: Callable[[], Any], queued: int = QUEUED) -> float:
    """Seconds per call in the fastest of ROUNDS rounds, after one that warms up.

    On an accelerator, a round queues several calls between two events, behind other work that lasts until all are queued: small
    operators take less time than their launch, and training queues them ahead. How often it calls does not depend on their time,
    so that a call may be a collective.
    """
    call()
    device.synchronize()
    if device.synchronous:
        return min(_seconds(device, call, 1) for _ in range(ROUNDS))
    begin = time.perf_counter()
    for _ in range(queued):
        call()
    launch = time.perf_counter() - begin
    device.synchronize()
    local = devices.current(device.type)
    a = torch.ones(BUSY, BUSY, dtype=torch.bfloat16, device=local)

    def product() -> None:
        a @ a

    product()
    products = math.ceil(2 * launch / _seconds(device, product, 2))
    times = []
    for _ in range(ROUNDS):
        for _ in range(products):
            product()
        times.append(_seconds(device, call, queued))
    return min(times)


def _seconds(device: Device, call: Callable[[], Any], calls: int) -> float:
    """Seconds per call by the device's clock, from the end of what is queued."""
    start = device.mark()
    for _ in range(calls):
        call()
    end = device.mark()
    device.synchronize()
    return device.seconds(start, end) / calls


def _products(
    device: Device, local: torch.device, precision: str, rows: Sequence[int], widths: Sequence[int]
) -> Iterator[tuple[str, int, int, int, float]]:
    """In FP8, the products alone: quantization counts as a layer's other operators."""
    for m, k, n in product(rows, widths, widths):
        a, b = (torch.randn(*shape, device=local).to(DTYPES[precision]) for shape in ((m, k), (k, n)))
        call = partial(torch.matmul, a, b)
        if precision == "fp8":
            a8, b8 = (quantize(x, FP8.recipe, E4M3) for x in (a, b.t()))
            call = partial(FP8.multiply, a8, b8, torch.bfloat16, fast=True)
        seconds = fastest(device, call)
        yield "matmul", m, k, n, 2 * m * k * n / seconds


def _attentions(
    device: Device, local: torch.device, dtype: torch.dtype, tokens: Sequence[int]
) -> Iterator[tuple[str, int, int, int, float]]:
    """Causal attention, forward and backward together."""
    heads = HOST_HEADS if device.synchronous else HEADS
    for s, d in product(tokens, HEAD_SIZES):
        sizes = ((1, n, s, d) for n in (heads, heads // 4, heads // 4))
        q, k, v = (torch.randn(size, device=local).to(dtype).requires_grad_() for size in sizes)

        def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            torch.autograd.grad(attention(q, k, v, Axis("context")), (q, k, v), torch.ones_like(q))

        # as operator_costs.py counts: 2 products in forward and 5 in backward, half of each
        flops = 7 * 2 * heads * s * s * d / 2
        yield "attention", s, s, d, flops / fastest(device, call, 1 if flops > LONG else QUEUED)


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
        y = stage(x, positions, sample_keys=positions[:1])
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
    if compiled and not has_adamw_kernel(device.type):
        program = torch.compile(update, backend=device.compile_backend, fullgraph=True, dynamic=False)

    def call() -> None:
        adamw(
            weights, gradient, *moments, settings=settings, weight_decay=0.1, constants=constants, step=one,
            learning_rate=one if program else 1e-3, divisor=one, skip=zero, compiled=program,
        )  # fmt: skip

    return elements * (settings.traffic + gradient.itemsize) / fastest(device, call)


def _profile(device: Device, precision: str, hidden: int, tokens: int) -> Profile:
    """A Llama of three layers on one device; the middle one is measured."""
    model = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": 3,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
    }
    train = {"steps": 1, "global_batch_size": 1, "sequence_length": tokens, "precision": precision}
    return llama_profile(model, train, cluster={"device": device.type})


def llama_profile(model: dict[str, int], train: dict[str, Any], **sections: dict[str, Any]) -> Profile:
    """The profile of a Llama with a small vocabulary; `sections`: further ones."""
    return Profile.model_validate(
        {
            "name": "small",
            "model": {"vocab_size": 512, "max_position_embeddings": train["sequence_length"], **model},
            "tokenizer": {"source": "train", "vocabulary_size": 512},
            "data": {"sources": [{"kind": "python-docs"}]},
            "train": {"learning_rate": 1e-3, **train},
            **sections,
        }
    )
