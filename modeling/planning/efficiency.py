"""Speeds that plans assume without a measurement: products, attention, other operators, overlap.

GPUs       product    FLOPs / (SHARES · peak), or the bytes of its factors and its result / memory bandwidth if that is longer; in
                      FP8 also the bytes that quantize its factors
           attention  FLOPs / (share of the kernel · peak), in float32 that of products; at short lengths less
           others     the bytes that they move, of which compiled kernels move 1 / FUSED
others     0.55 of the published peak for everything, which agrees with AWS's published throughputs on trn1

Figures that Trainshed has measured on a GPU (docs/devices/gpus.md) are used where there are any. The others are published, or
fitted to published steps of other frameworks (benchmarks/published_fit.py). `Software` states what such a framework does
differently from Trainshed; plans of runs have `OURS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from modeling.models.build import device_of
from modeling.planning import calibration
from modeling.planning.calibration import MEMORY_SHARE, PEAK_SHARE, product_precision
from modeling.planning.operator_costs import Shape
from modeling.planning.stage_costs import LayerCosts
from parallel.device import Device
from profiles.schema import Profile

# Share of the bf16 peak of products by architecture. Hopper: measured on an H100, 760 to 800 TFLOP/s in training. Ampere: fitted.
# Blackwell, with too few published steps: as Hopper.
SHARES = {"ampere": 0.75, "hopper": 0.78, "blackwell": 0.78}
FP8 = 0.70  # share of the FP8 peak; fitted, at most 0.75: no published product is faster (1,480 TFLOP/s on an H100)
FUSED = 2.2  # bytes that eager operators move for each byte that compiled kernels move; measured on layers of an 8B model
CONTENTION = 0.57  # seconds by which a second of overlapping exchange slows the compute down; fitted
# Share of the bf16 peak of causal attention with heads of 128, forward and backward together, by kernel and architecture.
# "flash-1", in Triton: FlashAttention-2's paper (arXiv 2307.08691), figure 4, on A100; on H100, which lacks a figure, as fast as
# "deterministic". "flash-2": the same figure, and 335 TFLOP/s on H100 (figure 7).
# "deterministic" FlashAttention-2 and "cudnn" on Hopper: flash-attention pull request 1893, 7 products at their two speeds. On
# Blackwell FlashAttention-2 has Ampere's instructions only; cuDNN as on Hopper.
ATTENTION = {
    "flash-1": {"ampere": 0.33, "hopper": 0.19},
    "flash-2": {"ampere": 0.58, "hopper": 0.34, "blackwell": 0.20},
    "deterministic": {"ampere": 0.45, "hopper": 0.19, "blackwell": 0.15},
    "cudnn": {"ampere": 0.58, "hopper": 0.50, "blackwell": 0.50},
}
HALF_LENGTH = 512  # queries at which attention reaches half of its share: the curves of the papers above
QUANTIZED = 5.0  # bytes for each factor's element: read for the scale, read again and written in 8 bits

LONG = 32768  # tokens of a sequence
# Published step time ÷ the one planned for Trainshed's own software, by kind of run: 10th and 90th percentile, number of steps
# (benchmarks/published.py). Others' experts and long contexts are faster: a node gets tokens once, and attention is cuDNN's.
ERRORS = {
    "FSDP or ZeRO-1 alone": (0.91, 1.3, 31),
    "TP or PP": (0.93, 1.14, 17),
    "long context": (0.7, 1.09, 10),
    "experts": (0.44, 0.83, 7),
}


@dataclass(frozen=True)
class Software:
    """What a framework does differently from Trainshed.

    Published steps are compared with plans for the framework that they were measured with.
    """

    attention: str | None = None  # kernel (ATTENTION); None: by `train.deterministic`
    fuses: bool | None = None  # whether operators other than products are fused; None: by `compile.enabled`
    hopper_products: float = 1.0  # speed of products on Hopper, relative to today's libraries
    quantized: float = QUANTIZED  # less if a tensor is quantized once for several products
    overlapped: frozenset[str] = frozenset()  # "tensor", "expert": exchanges that overlap with compute
    balances_context: bool = True  # whether the ranks of a ring of causal attention compute equally much
    sends_once: bool = False  # whether experts' exchanges send a token once to each node
    splits_tokens: bool = False  # whether each tensor rank exchanges its part of the tokens with experts


OURS = Software()


def layer_seconds(
    profile: Profile, layer: LayerCosts, software: Software = OURS
) -> tuple[float, float] | None:
    """Seconds of a microbatch in a layer, and those of attention in it; None if they are unknown."""
    device, precision = device_of(profile), profile.train.precision
    if device.architecture is None:
        peaks = {shape: device.peak(product_precision(precision, shape)) for shape in layer.products}
        times = {
            shape: n / (peak * PEAK_SHARE) for shape, n in layer.products.items() if (peak := peaks[shape])
        }
        if len(times) < len(peaks):
            return None
        return sum(times.values()), sum(time for shape, time in times.items() if shape[0] == "attention")
    if device.peak(precision) is None:
        return None
    products = attention = 0.0
    for shape, flops in layer.products.items():
        if shape[0] == "attention":
            attention += _attention_seconds(profile, shape, flops, software)
        else:
            products += _product_seconds(profile, shape, flops, software)
    fuses = profile.compile.possible if software.fuses is None else software.fuses
    others = layer.moved / (bandwidth_of(device) * (FUSED if fuses else 1))
    return products + attention + others, attention


def bandwidth_of(device: Device) -> float:
    """Bytes/s of memory that kernels of a device with published figures reach."""
    assert device.bandwidth is not None
    return device.bandwidth * MEMORY_SHARE


def _product_seconds(profile: Profile, shape: Shape, flops: float, software: Software) -> float:
    device, precision = device_of(profile), profile.train.precision
    operation, rows, inner, columns = shape
    # Experts are computed in FP8 by those who train them so; here such a run can only be planned.
    eight = operation == "fp8" or (operation == "experts" and precision == "fp8")
    kind = "fp8" if eight else "float32" if precision == "float32" else "bf16"
    peak = device.peak(kind)
    assert peak is not None
    assert device.architecture is not None
    share = FP8 if eight else SHARES[device.architecture]
    if device.architecture == "hopper":
        share *= software.hopper_products
    factors, result, width = rows * inner + inner * columns, rows * columns, 4 if kind == "float32" else 2
    calls, bandwidth = flops / (2 * rows * inner * columns), bandwidth_of(device)
    accessed = (factors if eight else width * factors) + width * result
    quantized = software.quantized * factors if eight else 0.0
    return max(flops / (peak * share), calls * accessed / bandwidth) + calls * quantized / bandwidth


def _attention_seconds(profile: Profile, shape: Shape, flops: float, software: Software) -> float:
    device, ranks = device_of(profile), profile.parallel.context
    kernel = software.attention or ("deterministic" if profile.train.deterministic else "cudnn")
    full, queries = profile.train.precision == "float32", shape[1]
    peak = device.peak("float32" if full else "bf16")
    assert peak is not None
    assert device.architecture is not None
    # These kernels are for half precision; in float32, attention is as fast as products.
    share = SHARES[device.architecture] if full else ATTENTION[kernel][device.architecture]
    share *= queries / (queries + HALF_LENGTH)
    # The last of n ranks sees all keys, and (n + 1) / 2n of them the average rank.
    slowest = 1.0 if software.balances_context else 2 * ranks / (ranks + 1)
    return slowest * flops / (peak * share)


def exposed(seconds: float, hidden: float, device: Device) -> float:
    """Seconds that an exchange adds to a step, if up to `hidden` seconds of compute run beside it."""
    overlapping = min(seconds, hidden)
    contention = CONTENTION if device.architecture else 0.0
    return seconds - overlapping + contention * overlapping


def sent_share(profile: Profile, software: Software = OURS) -> float:
    """Share of experts' rows that a rank sends.

    Less than 1 if each node gets a token once, or tensor ranks split tokens.
    """
    parallel, model = profile.parallel, profile.model
    share = 1.0 / parallel.tensor if software.splits_tokens else 1.0
    nodes = parallel.expert * parallel.tensor // profile.cluster.devices_per_node
    choices = model.num_experts_per_tok
    if not software.sends_once or nodes < 2 or choices is None:
        return share
    # Nodes with a token's experts, if each choice is random.
    distinct = nodes * (1 - (1 - 1 / nodes) ** choices)
    return share * min(distinct, model.topk_group or nodes) / choices


def basis(profile: Profile) -> str:
    """What a plan's times are based on, as text for the plan, the search and the report."""
    table, device = calibration.find(profile), device_of(profile)
    if table:
        return f"calibrated: {table.accelerator} measured on {table.measured} with torch {table.torch} ({table.path})"
    if not device.peak(profile.train.precision):
        return f"no published peak of {profile.cluster.device}, uncalibrated"
    if device.architecture is None:
        return f"uncalibrated, published peaks × {PEAK_SHARE}"
    low, high, count = ERRORS[kind_of(profile)]
    return (
        f"uncalibrated, fitted to published steps of other frameworks: of {count} with {kind_of(profile)}, "
        f"80% took {low:.2f} to {high:.2f} of the planned time"
    )


def kind_of(profile: Profile) -> str:
    """The kind of run by which plans' errors differ."""
    parallel = profile.parallel
    if profile.model.num_experts is not None:
        return "experts"
    if profile.train.sequence_length >= LONG or parallel.context > 1:
        return "long context"
    if parallel.tensor * parallel.pipeline > 1:
        return "TP or PP"
    return "FSDP or ZeRO-1 alone"
