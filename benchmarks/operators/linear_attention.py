"""Measure the cost per token of linear and of full attention, in sequences of different lengths.

Runs forward and backward of one layer of each kind, of the workload `qwen3-5`, in one process, eager, in float32. The sides
alternate; prints medians. Full attention, whose cost per token grows, is measured up to --longest-full tokens.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness.results import Results
from benchmarks.harness.timing import alternate, make_parser, print_table, seconds
from benchmarks.harness.workload import SMALL_QWEN3_5
from modeling.models.families.hybrid import Hybrid
from parallel import Mesh, initialize
from parallel.device import KINDS
from profiles.arguments import integer

LENGTHS = (2048, 4096, 8192, 16384, 32768)
LAYERS = {"linear": "0", "full": "3"}


def main() -> None:
    parser = make_parser(__doc__, rounds=3, out="linear_attention")
    help_text = "tokens of the sequences (default: 2048 to 32768)"
    parser.add_argument(
        "--lengths", nargs="+", type=integer(1), default=LENGTHS, metavar="TOKENS", help=help_text
    )
    parser.add("--longest-full TOKENS", "longest sequence of full attention", type=integer(1), default=8192)
    parser.add("--threads N", "torch threads", type=integer(1), default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    KINDS["cpu"].set_current()  # as training does: freed memory is kept, whose pages take long to map again
    mesh = Mesh()
    network = Hybrid(SMALL_QWEN3_5, mesh)
    initialize(network.named_parameters(), mesh.tensor, 0)
    rows, results = [], Results(options.out)
    for length in sorted(options.lengths):
        kinds = [kind for kind in LAYERS if kind == "linear" or length <= options.longest_full]
        sides = {kind: partial(seconds, make_step(network, kind, length)) for kind in kinds}
        measured = alternate(sides, options.rounds + 1)  # the first warms up
        costs = {kind: statistics.median(times[1:]) / length * 1e6 for kind, times in measured.items()}
        results.add(f"{length} tokens", **costs)
        rows.append((length, *(f"{costs[kind]:.1f}" if kind in costs else "" for kind in LAYERS)))
    print_table("forward and backward of a layer, µs per token", ("tokens", *LAYERS), rows)


def make_step(network: Hybrid, kind: str, length: int) -> Callable[[], None]:
    """Forward and backward of the attention of a layer of this kind, over one sequence."""
    layer = network.layers[LAYERS[kind]].get_submodule("attention")
    x = torch.randn(length, network.model.hidden_size, requires_grad=True)
    grad = torch.randn_like(x)
    cos, sin, offsets = network.block_arguments(torch.arange(length), None)
    arguments = (length, offsets, None) if kind == "linear" else (cos, sin, None)

    def step() -> None:
        layer(x, *arguments).backward(grad)

    return step


if __name__ == "__main__":
    main()
