"""Estimate the loss's time on an H100 from its FLOPs and memory traffic, without a GPU.

Bytes are of bf16 logits L (tokens × v) and of the projection's weight E (v × h). Products take their FLOPs at the measured speed,
and hide their own traffic, except that for a float32 sum. All other passes over memory take their bytes at the measured
bandwidth:

    torch    all logits at once: read in forward, read and written in backward: 6 L
    kept     the same in chunks, whose gradients are kept, and dW is scaled in backward: 6 L + 4 E
    summed   n chunks, whose gradients are read three times and written, and a float32 sum dW: zeroed, read and written by each
             product, converted to bf16, scaled in backward: 8 L + (14 + 8 n) E

`memory` is that of logits, their gradients and dW at the peak. docs/devices/gpus.md has measured times of `torch` and `summed`.
"""

from benchmarks.harness.timing import make_parser, print_table
from benchmarks.operators.kernels import SIZES, Sizes

FLOPS, BANDWIDTH = 779e12, 3.02e12  # measured on an H100 by `check_device`
CHUNK = 4096  # tokens of a chunk of `summed`, as measured


def estimate(side: str, sizes: Sizes) -> tuple[float, float]:
    """Milliseconds of forward and backward, and bytes at the peak."""
    logits, weight = sizes.sequence * sizes.vocabulary, sizes.vocabulary * sizes.hidden
    chunks = sizes.sequence / CHUNK
    moved = {
        "torch": 6 * logits,
        "kept": 6 * logits + 4 * weight,
        "summed": 8 * logits + (14 + 8 * chunks) * weight,
    }[side]
    memory = {
        "torch": 4 * logits,
        "kept": 2 * logits + 2 * weight,
        "summed": max(4 * weight + 4 * logits / chunks, 6 * weight),
    }[side]
    seconds = 6 * sizes.sequence * weight / FLOPS + moved / BANDWIDTH
    return 1e3 * seconds, memory


def main() -> None:
    make_parser(__doc__).parse_args()
    for name in ("1b", "8b"):
        sides = {side: estimate(side, SIZES[name]) for side in ("torch", "kept", "summed")}
        rows = [
            (side, f"{ms:.1f}", f"{sides['torch'][0] / ms:.2f}", f"{memory / 2**30:.1f}")
            for side, (ms, memory) in sides.items()
        ]
        print_table(f"loss with projection, {name}", ("side", "ms", "ratio", "memory, GiB"), rows)


if __name__ == "__main__":
    main()
