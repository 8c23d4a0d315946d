"""DTensor tensor parallelism: torchrun --nproc-per-node 2 -m benchmarks.training_steps.dtensor

The loss is vocabulary-parallel. With --sequence-parallel, hidden states between the layers are sharded too. With --graphs, the
model is compiled, but not the loss, whose operators `loss_parallel` replaces.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.harness import workload
from benchmarks.training_steps.llama import Llama, cross_entropy
from profiles.sections.base import required


def main() -> None:
    parser = workload.workload_parser(__doc__)
    parser.add_argument("--sequence-parallel", action="store_true")
    options, work, _, ranks = workload.start(parser)
    with torch.device(options.device):
        model = Llama(work.model)
    workload.load_initial_weights(model, work.model)
    workload.convert(model, options)
    shard(model, init_device_mesh(options.device, (ranks,)), options.sequence_parallel)
    if options.graphs:  # block by block, backward fails in torch 2.13
        compiled: Any = model  # mypy rejects assignments to methods
        compiled.forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    replicated = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [group for group in (sharded, replicated) if group]
    # foreach is by far the fastest of torch's implementations for DTensors
    optimizers = [workload.adamw(group, foreach=True) for group in groups]

    def step(samples: Tensor) -> Tensor:
        samples = samples.to(options.device)
        with loss_parallel():
            loss = cross_entropy(model(samples[:, :-1]), samples[:, 1:])
            loss.backward()
        clip_gradients(sharded, replicated)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = loss.detach()
        assert isinstance(found, DTensor)
        return found.full_tensor()

    workload.measure(step, options)


def shard(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Convert the model's matrices to DTensors; with sequence parallelism its norms too."""
    hidden = Shard(1) if sequence_parallel else Replicate()
    outer: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "lm_head": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
    }
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    layer: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    layer |= {name: RowwiseParallel(output_layouts=hidden) for name in rows}
    if sequence_parallel:
        outer["model.norm"] = SequenceParallel()
        layer |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": gather(hidden, None, None),
            "mlp": gather(hidden),
        }
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(model, mesh, outer)
    if tied:  # both are sharded alike, over the vocabulary
        model.lm_head.weight = model.model.embed_tokens.weight
    for block in model.model.layers:
        parallelize_module(block, mesh, layer)


def gather(*layouts: Shard | Replicate | None) -> PrepareModuleInput:
    """Gather a module's inputs once for all projections that read them."""
    gathered = tuple(layout and Replicate() for layout in layouts)
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=gathered)


def clip_gradients(sharded: Sequence[Tensor], replicated: Sequence[Tensor]) -> None:
    """Clip by global norm; torch's own clipping does not support a mixture of DTensors and tensors."""
    norms = []
    for group in (sharded, replicated):
        if group:
            norm = torch.nn.utils.get_total_norm([required(parameter.grad) for parameter in group])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    scale = (workload.CLIP / (total + 1e-6)).clamp(max=1.0)
    gradients = [required(parameter.grad) for parameter in (*sharded, *replicated)]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    torch._foreach_mul_(local, scale)


if __name__ == "__main__":
    main()
