"""The training workload that ours and every peer run, and its timing.

All sides train the same model from the same weights on the same batches with the same AdamW, so their losses must agree at every
step. A script builds `step(samples) -> loss` and passes it to `measure`, which prints the fields of `Measurement` as a JSON
line.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.timing import make_parser
from modeling.conversion.huggingface import entries
from modeling.conversion.weights import Part, Weights, global_shapes
from parallel import device as devices
from profiles.arguments import Parser
from profiles.sections.model import Model

ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}  # weight decay for every parameter
# of the blocks' matrices, by torch.optim.Muon, which orthogonalizes in bf16
MUON: dict[str, Any] = {
    "lr": ADAMW["lr"],
    "momentum": 0.95,
    "weight_decay": ADAMW["weight_decay"],
    "adjust_lr_fn": "match_rms_adamw",
}
CLIP = 1.0
PERIOD = 8192  # tokens of a sample that are drawn; longer ones repeat them
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Workload:
    """One training step.

    Attributes:
        sequence: tokens per sample.
        batch: samples per step over all processes.
    """

    model: Model
    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequence * self.batch


def llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **others: Any
) -> Model:
    """A Llama of the given sizes; `others` are further fields of `Model`."""
    return Model(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        **others,
    )


def mixtral(
    sizes: tuple[int, int, int, int, int, int], positions: int, experts: int = 8, **others: Any
) -> Model:
    """A Mixtral whose tokens choose two experts; `sizes` are those of `llama`."""
    others |= {"architecture": "mixtral", "num_experts": experts, "num_experts_per_tok": 2}
    return llama(*sizes, max_position_embeddings=positions, **others)


SMALL = llama(256, 688, 4, 8, 2, 4096, max_position_embeddings=512)
SMALL_MIXTRAL = mixtral((256, 512, 4, 8, 2, 4096), 512)
TINY_LLAMA = llama(32, 64, 2, 4, 2, 128, max_position_embeddings=64)
TINY_MIXTRAL = mixtral((32, 64, 2, 4, 2, 128), 64, experts=4)
# three layers of four with linear attention, whose heads are as large as half of a published model's
HYBRID: dict[str, Any] = {
    "full_attention_every": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 2048,
}
SMALL_QWEN3_5 = llama(*(256, 688, 4, 4, 2, 4096), architecture="qwen3_5", **HYBRID)
SMALL_QWEN3_NEXT = llama(
    *(256, 512, 4, 4, 2, 4096),
    architecture="qwen3_next",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    **HYBRID,
)
LLAMA_1B = llama(
    *(2048, 8192, 16, 32, 8, 128256),  # Llama 3.2 1B: 1.24e9 parameters
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=True,
)
MIXTRAL_LAYERS = mixtral((4096, 14336, 2, 32, 8, 32000), 8192, rope_theta=1e6)  # 2 of Mixtral 8x7B


DEPTH = 32  # layers of Llama 3 8B


def llama_8b(layers: int, sequence: int = 8192) -> Model:
    """Llama 3 8B with so many of its layers."""
    return llama(*(4096, 14336, layers, 32, 8, 128256), max_position_embeddings=sequence, rope_theta=500000.0)


def full_depth_speed(tokens: float, two: float, four: float) -> float | None:
    """Tokens/s of 8B with all its layers, extrapolated linearly from the seconds with 2 and with 4.

    None if 4 layers are not slower than 2.
    """
    return tokens / (four + (DEPTH - 4) * (four - two) / 2) if four > two else None


WORKLOADS = {
    "tiny": Workload(TINY_LLAMA, sequence=64, batch=4),
    "tiny-mixtral": Workload(TINY_MIXTRAL, sequence=64, batch=4),
    "small": Workload(SMALL, sequence=512, batch=4),
    "mixtral": Workload(SMALL_MIXTRAL, sequence=512, batch=4),
    "qwen3-5": Workload(SMALL_QWEN3_5, sequence=2048, batch=1),
    "qwen3-next": Workload(SMALL_QWEN3_NEXT, sequence=2048, batch=1),
    "mixtral-layers": Workload(MIXTRAL_LAYERS, sequence=8192, batch=2),
    "1b": Workload(LLAMA_1B, sequence=8192, batch=2),
    "8b-layers": Workload(llama_8b(4), sequence=8192, batch=1),
    "8b-2-layers": Workload(llama_8b(2), sequence=8192, batch=1),
    "8b-4k": Workload(llama_8b(DEPTH, 4096), sequence=4096, batch=2),
    **{
        f"8b-2-layers-{name}": Workload(llama_8b(2, thousands * 1024), sequence=thousands * 1024, batch=1)
        for name, thousands in {"128k": 128, "512k": 512, "1m": 1024}.items()
    },
}


def workload_parser(documentation: str | None) -> Parser:
    """Parser with the options that ours, every peer and the bound share."""
    parser = make_parser(documentation)
    parser.add_argument("--workload", choices=WORKLOADS, default="small")
    parser.add_argument("--precision", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    parser.add("--threads N", "torch threads per process", type=int, default=1)
    parser.add("--graphs FOLDER", "compile, with the compiler's cache in this folder")
    parser.add("--warm-up N", "untimed steps", type=int, default=3)
    parser.add("--steps N", "timed steps", type=int, default=20)
    parser.add("--cpu-time", "measure CPU time in place of elapsed time (mean over processes)")
    return parser


def start(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Workload, int, int]:
    """Parse arguments, set up torch and its process group; returns options, workload, rank, world size."""
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.graphs:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = options.graphs
    rank, ranks = 0, 1
    kind = devices.KINDS[options.device]
    local = torch.device("cpu")
    if options.device != "cpu":
        local = kind.set_current(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        kind.start_process_group(local)
        rank, ranks = dist.get_rank(), dist.get_world_size()
    return options, WORKLOADS[options.workload], rank, ranks


def initial_weights(model: Model, device: str | torch.device) -> dict[str, Tensor]:
    """Initial float32 weights by global name: norms 1, matrices normal with the model's initializer_range.

    Drawn on the device, where a billion of them take milliseconds; they depend on its type.
    """
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.ones(shape, device=device)
        if len(shape) == 1
        else torch.randn(shape, generator=generator, device=device).mul_(model.initializer_range)
        for name, shape in global_shapes(model).items()
    }


def huggingface_weights(model: Model, device: str | torch.device) -> dict[str, Tensor]:
    """The initial weights as the tensors of Hugging Face's files."""
    drawn = initial_weights(model, device)
    parts = {
        name: [Part((0,) * weight.dim(), tuple(weight.shape), weight.dtype, weight.__getitem__)]
        for name, weight in drawn.items()
    }
    stored = entries(Weights(model, parts))
    return {each.name: torch.cat([*each.rows(0, each.shape[0])]) for each in stored}


@torch.no_grad()
def load_initial_weights(module: nn.Module, model: Model) -> None:
    """Load the initial weights into a module whose parameters have Hugging Face's names."""
    parameters = dict(module.named_parameters())
    device = next(iter(parameters.values())).device
    for name, weight in huggingface_weights(model, device).items():
        parameters.pop(name).copy_(weight)
    assert not parameters, f"parameters without initial weights: {', '.join(parameters)}"


def convert(module: nn.Module, options: argparse.Namespace) -> None:
    """Move a module to the device, parameters to the precision; buffers (rotary tables) stay in float32."""
    module.to(options.device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(DTYPES[options.precision])


def batch(workload: Workload, step: int) -> Tensor:
    """Token ids (b, s + 1) of a step; four in five follow from the previous token, so the loss falls.

    After PERIOD tokens, they repeat.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    size, vocabulary = (workload.batch, workload.sequence + 1), workload.model.vocab_size
    tokens = torch.randint(vocabulary, size, generator=generator)
    predictable = torch.rand(size, generator=generator) < 0.8
    for i in range(1, min(PERIOD, workload.sequence) + 1):
        successor = (5 * tokens[:, i - 1] + 1) % vocabulary
        tokens[:, i] = successor.where(predictable[:, i], tokens[:, i])
    for i in range(PERIOD, workload.sequence, PERIOD):
        tokens[:, i + 1 : i + 1 + PERIOD] = tokens[:, 1 : PERIOD + 1][:, : workload.sequence - i]
    return tokens


def adamw(parameters: Iterable[Tensor], **settings: Any) -> torch.optim.AdamW:
    """torch's AdamW; `settings` select an implementation, by default the fused one on a GPU."""
    given = list(parameters)
    options: dict[str, Any] = {**ADAMW, **(settings or {"fused": given[0].is_cuda})}
    return torch.optim.AdamW(given, **options)


class Optimizer(Protocol):
    """What is used of torch's optimizers."""

    def step(self) -> object: ...
    def zero_grad(self) -> None: ...


def mean_over_ranks(loss: Tensor) -> Tensor:
    """Mean over ranks of values such as each rank's mean loss."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def measure(
    step: Callable[[Tensor], Tensor],
    options: argparse.Namespace,
    updates: Sequence[tuple[devices.Mark, devices.Mark]] = (),
) -> None:
    """Run and time `step` on every batch; rank 0 prints the result.

    A GPU's own clock times it: the host queues a step while the one before still runs, as in training. With `cpu_time`, steps are
    timed by the CPU time of all threads of a process.

    Args:
        step: (batch, sequence + 1) token ids of all ranks, on the device -> mean loss of one element, equal on all ranks.
        updates: begin and end of each step's update, to which `step` appends.
    """
    workload, device = WORKLOADS[options.workload], devices.KINDS[options.device]
    local = devices.current(options.device)
    batches = [batch(workload, number) for number in range(options.warm_up + options.steps)]
    marks, results = [], []
    mark: Callable[[], devices.Mark] = time.process_time if options.cpu_time else device.mark
    for samples in batches:
        if dist.is_initialized() and device.synchronous:
            dist.barrier()
        begin = mark()
        results.append(step(devices.upload(samples, local)))
        marks.append((begin, mark()))
    device.synchronize()
    seconds, losses = [device.seconds(*each) for each in marks], [float(loss) for loss in results]
    if options.cpu_time and dist.is_initialized():
        seconds = mean_over_ranks(torch.tensor(seconds, dtype=torch.float64)).tolist()
    update_seconds = [device.seconds(*each) for each in updates]
    if not dist.is_initialized() or dist.get_rank() == 0:
        result = {"seconds": seconds[options.warm_up :], "losses": losses}
        result |= {"update_seconds": update_seconds[options.warm_up :]}
        print(json.dumps({**result, "peak_bytes": device.allocated_bytes or 0}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        # Exit without cleanup: torch 2.13's DTensor aborts one exit in four ("terminate called without an active exception").
        os._exit(0)


def measure_training(
    module: nn.Module,
    optimizer: Optimizer,
    compute_loss: Callable[[Tensor], Tensor],
    options: argparse.Namespace,
    reduce: Callable[[Tensor], Tensor] = Tensor.detach,
) -> None:
    """Measure a plain PyTorch training step: loss, backward, clipping by global norm, optimizer step."""
    device = devices.KINDS[options.device]
    updates: list[tuple[devices.Mark, devices.Mark]] = []

    def step(samples: Tensor) -> Tensor:
        loss = compute_loss(samples)
        loss.backward()
        begin = device.mark()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        updates.append((begin, device.mark()))
        optimizer.zero_grad()
        return reduce(loss)

    measure(step, options, updates)
