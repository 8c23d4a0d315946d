"""The least time that a step of the work can take on one process: its matrix products and its attention alone.

A product X Wᵀ of the forward pass has two more in backward, dX = dY W and dW = dYᵀ X. Each is timed by itself on memory that is
in the caches already, and the best of several timings counts; attention is torch's own, forward and backward. What a real
step adds is everything between: norms, activations, rotary positions, the loss's softmax, AdamW, and cold memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import work
from benchmarks.peers.llama import causal
from profiles.model import Model

REPEATS = 8


def main() -> None:
    options = work.parser(__doc__).parse_args()
    work.begin(options)
    size, dtype = work.WORKS[options.work], work.DTYPES[options.precision]
    products = sum(count * product_seconds(size.tokens, *of, dtype) for *of, count in projections(size.model))
    attention = size.model.num_hidden_layers * attention_seconds(size, dtype)
    print(json.dumps({"seconds": [products + attention]}))


def projections(model: Model) -> Iterator[tuple[int, int, int]]:
    """Input and output width of the model's products, and how many there are; what reads the same input is one product."""
    h, f, d = model.hidden_size, model.intermediate_size, model.head_dim
    n, k, layers = model.num_attention_heads, model.num_key_value_heads, model.num_hidden_layers
    yield h, (n + 2 * k) * d, layers
    yield n * d, h, layers
    yield h, 2 * f, layers
    yield f, h, layers
    yield h, model.vocab_size, 1


def product_seconds(tokens: int, width_in: int, width_out: int, dtype: torch.dtype) -> float:
    """Of a projection, forward and backward."""
    x = torch.randn(tokens, width_in).to(dtype)
    weight = torch.randn(width_out, width_in).to(dtype)
    grad = torch.randn(tokens, width_out).to(dtype)
    return best(lambda: x @ weight.t()) + best(lambda: grad @ weight) + best(lambda: grad.t() @ x)


def attention_seconds(size: work.Work, dtype: torch.dtype) -> float:
    """Of one layer, forward and backward."""
    model = size.model

    def heads(count: int) -> Tensor:
        return torch.randn(size.batch, count, size.sequence, model.head_dim).to(dtype).requires_grad_()

    q, k, v = (heads(count) for count in (model.num_attention_heads, *[model.num_key_value_heads] * 2))
    grad = torch.randn(q.shape).to(dtype)
    return best(lambda: torch.autograd.grad(causal(q, k, v), (q, k, v), grad))


def best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    seconds = []
    for _ in range(REPEATS + 1):  # the first one also warms up
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


if __name__ == "__main__":
    main()
