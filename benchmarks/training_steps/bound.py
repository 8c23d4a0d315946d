"""Lower bound of a step's time in one process: its matrix products and attention alone.

For each product X Wᵀ of the forward pass, the backward pass has two, dX = dY W and dW = dYᵀ X. Each is timed separately with warm
caches, with torch's product and with the one that Trainshed uses on CPUs; the fastest of several calls counts. Attention is
torch's, forward and backward. A real step adds norms, activations, rotary embeddings, the loss's softmax, AdamW, and cold caches.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.timing import seconds
from benchmarks.harness.workload import DTYPES, Workload, start, workload_parser
from benchmarks.training_steps.llama import causal_attention
from parallel.host_products import multiply
from profiles.sections.model import Model

REPEATS = 8
Clock = Callable[[], float]


def main() -> None:
    options, workload, _, _ = start(workload_parser(__doc__))
    model, dtype = workload.model, DTYPES[options.precision]
    clock = time.process_time if options.cpu_time else time.perf_counter
    products = sum(
        count * product_seconds(workload.tokens, width_in, width_out, dtype, clock)
        for width_in, width_out, count in projections(model)
    )
    attention = model.num_hidden_layers * attention_seconds(workload, dtype, clock)
    print(json.dumps({"seconds": [products + attention]}))


def projections(model: Model) -> Iterator[tuple[int, int, int]]:
    """Input width, output width and number of the model's projections; those of one input are fused."""
    h, f, d = model.hidden_size, model.intermediate_size, model.head_dim
    n, k, layers = model.num_attention_heads, model.num_key_value_heads, model.num_hidden_layers
    yield h, (n + 2 * k) * d, layers
    yield n * d, h, layers
    yield h, 2 * f, layers
    yield f, h, layers
    yield h, model.vocab_size, 1


def product_seconds(tokens: int, width_in: int, width_out: int, dtype: torch.dtype, clock: Clock) -> float:
    """Seconds of a projection, forward and backward."""
    x = torch.randn(tokens, width_in).to(dtype)
    weight = torch.randn(width_out, width_in).to(dtype)
    grad = torch.randn(tokens, width_out).to(dtype)
    factors = (x, weight.t()), (grad, weight), (grad.t(), x)
    return sum(min(best(partial(call, a, b), clock) for call in (torch.matmul, multiply)) for a, b in factors)


def attention_seconds(workload: Workload, dtype: torch.dtype, clock: Clock) -> float:
    """Seconds of one layer's attention, forward and backward."""
    model = workload.model

    def random(heads: int) -> Tensor:
        size = (workload.batch, heads, workload.sequence, model.head_dim)
        return torch.randn(size).to(dtype).requires_grad_()

    q, k, v = map(random, (model.num_attention_heads, *[model.num_key_value_heads] * 2))
    grad = torch.randn(q.shape).to(dtype)
    return best(lambda: torch.autograd.grad(causal_attention(q, k, v), (q, k, v), grad), clock)


def best(call: Callable[[], object], clock: Clock) -> float:
    """Seconds of the fastest of several calls."""
    return min(seconds(call, clock) for _ in range(REPEATS + 1))


if __name__ == "__main__":
    main()
