"""The work that ours and all peers do, and the meter around it.

The same Llama from the same weights, on the same batches, with the same AdamW: so losses agree step by step, and a faster step
is not a lesser one. A script builds `step(samples) -> loss` and hands it to `measure`, which prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiles.model import Model

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}  # decay on everything
CLIP = 1.0
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Work:
    """What a step is made of.

    Attributes:
        model: the architecture.
        sequence: tokens a sample.
        batch: samples a step, over all processes.
    """

    model: Model
    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.sequence * self.batch


SMALL = Work(
    Model(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=4096,
        max_position_embeddings=512,
    ),
    sequence=512,
    batch=4,
)
# The shape of Llama 3.2 1B: 1.24e9 parameters.
BILLION = Work(
    Model(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    sequence=8192,
    batch=2,
)
WORKS = {"small": SMALL, "1b": BILLION}


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of every script."""
    made = argparse.ArgumentParser(description=description and description.splitlines()[0])
    made.add_argument("--work", choices=WORKS, default="small")
    made.add_argument("--precision", choices=DTYPES, default="float32")
    made.add_argument("--device", choices=BACKENDS, default="cpu")
    made.add_argument("--threads", type=int, default=1, help="torch threads a process (default: 1)")
    made.add_argument("--graphs", metavar="FOLDER", help="compile, and keep compiled graphs here")
    made.add_argument("--warm-up", type=int, default=3, help="steps that are not timed (default: 3)")
    made.add_argument("--steps", type=int, default=20, help="steps that are (default: 20)")
    return made


def begin(options: argparse.Namespace) -> tuple[int, int]:
    """Set threads and the compiler's folder, join the process group that the launcher describes. Returns rank and world size."""
    torch.set_num_threads(options.threads)
    if options.graphs:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = options.graphs
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(BACKENDS[options.device])
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, as Hugging Face has them, and shapes of the weights."""
    h, f, d = model.hidden_size, model.intermediate_size, model.head_dim
    n, k = model.num_attention_heads, model.num_key_value_heads
    yield "model.embed_tokens.weight", (model.vocab_size, h)
    for i in range(model.num_hidden_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (h,)
        yield f"{layer}.self_attn.q_proj.weight", (n * d, h)
        yield f"{layer}.self_attn.k_proj.weight", (k * d, h)
        yield f"{layer}.self_attn.v_proj.weight", (k * d, h)
        yield f"{layer}.self_attn.o_proj.weight", (h, n * d)
        yield f"{layer}.post_attention_layernorm.weight", (h,)
        yield f"{layer}.mlp.gate_proj.weight", (f, h)
        yield f"{layer}.mlp.up_proj.weight", (f, h)
        yield f"{layer}.mlp.down_proj.weight", (h, f)
    yield "model.norm.weight", (h,)
    if not model.tie_word_embeddings:
        yield "lm_head.weight", (model.vocab_size, h)


def weights(work: Work) -> dict[str, Tensor]:
    """Initial weights in float32: norms 1, matrices normal with the model's deviation."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator).mul_(work.model.initializer_range)
        for name, shape in shapes(work.model)
    }


@torch.no_grad()
def fill(module: nn.Module, work: Work) -> None:
    """Give a module with Hugging Face's names its initial weights."""
    initial = weights(work)
    for name, parameter in module.named_parameters():
        parameter.copy_(initial[name])


def batch(work: Work, step: int) -> Tensor:
    """Token ids (batch, sequence + 1) of a step: four in five follow from the token before, so there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    size, vocabulary = (work.batch, work.sequence + 1), work.model.vocab_size
    tokens = torch.randint(vocabulary, size, generator=generator)
    follows = torch.rand(size, generator=generator) < 0.8
    for i in range(1, work.sequence + 1):
        successor = (5 * tokens[:, i - 1] + 1) % vocabulary
        tokens[:, i] = successor.where(follows[:, i], tokens[:, i])
    return tokens


def adamw(parameters: Iterable[Tensor], **settings: Any) -> torch.optim.AdamW:
    """torch's AdamW, with its own choice of implementation unless `settings` say otherwise."""
    return torch.optim.AdamW(parameters, **ADAMW, **settings)


def mean_over_ranks(loss: Tensor) -> Tensor:
    """A loss that each rank has of its own tokens, over all of them."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def measure(step: Callable[[Tensor], Tensor], options: argparse.Namespace) -> None:
    """Run and time `step` on every batch; rank 0 prints what came out.

    Args:
        step: (batch, sequence + 1) token ids of all ranks -> 0-dim mean loss, the same on all ranks.
    """
    work: Work = WORKS[options.work]
    batches = [batch(work, number) for number in range(options.warm_up + options.steps)]
    seconds, losses = [], []
    for samples in batches:
        if dist.is_initialized():
            dist.barrier()
        begun = time.perf_counter()
        loss = step(samples)
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        losses.append(float(loss))
    peak = torch.tensor(peak_bytes(options.device), device=options.device)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            json.dumps({"seconds": seconds[options.warm_up :], "losses": losses, "peak_bytes": int(peak)}),
            flush=True,
        )
    if dist.is_initialized():
        dist.barrier()
        # No tidying up: torch 2.13's DTensor aborts one exit in four ("terminate called without an active exception").
        os._exit(0)


def peak_bytes(device: str) -> int:
    """The most memory that this process has taken on the device; on a CPU all of its resident memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
