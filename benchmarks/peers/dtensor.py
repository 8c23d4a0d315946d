"""torch's tensor parallelism on DTensor, with a vocabulary-parallel loss: torchrun --nproc-per-node 2 -m benchmarks.peers.dtensor

With --sequence-parallel hidden states between the layers are split over the ranks, too.
"""

from __future__ import annotations

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

from benchmarks import work
from benchmarks.peers.llama import Llama, cross_entropy


def main() -> None:
    parser = work.parser(__doc__)
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args()
    _, ranks = work.begin(options)
    size = work.WORKS[options.work]
    model = Llama(size.model)
    work.fill(model, size)
    spread(model, init_device_mesh("cpu", (ranks,)), options.sequence_parallel)
    spread_parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole_parameters = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [
        work.adamw(group, foreach=True)  # for DTensors much the fastest of torch's implementations
        for group in (spread_parameters, whole_parameters)
        if group
    ]

    def step(samples: Tensor) -> Tensor:
        with loss_parallel():
            loss = cross_entropy(model(samples[:, :-1]), samples[:, 1:])
            loss.backward()
        clip(spread_parameters, whole_parameters)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach().full_tensor()

    work.measure(step, options)


def spread(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Make the model's matrices DTensors; with sequence parallelism its norms too."""
    hidden = Shard(1) if sequence_parallel else Replicate()
    ends: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "lm_head": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
    }
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    layer: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    layer |= {name: RowwiseParallel(output_layouts=hidden) for name in rows}
    if sequence_parallel:
        ends["model.norm"] = SequenceParallel()
        layer |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": gathered(hidden, None, None),
            "mlp": gathered(hidden),
        }
    parallelize_module(model, mesh, ends)
    for block in model.model.layers:
        parallelize_module(block, mesh, layer)


def gathered(*layouts: Shard | None) -> PrepareModuleInput:
    """Inputs that are gathered once for all projections that read them."""
    wanted = tuple(layout and Replicate() for layout in layouts)
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=wanted)


def clip(spread_parameters: list[Tensor], whole_parameters: list[Tensor]) -> None:
    """Scale gradients by their global norm; torch's own clipping takes no mixture of DTensors and tensors."""
    norms = []
    for group in (spread_parameters, whole_parameters):
        if group:
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in group])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    scale = (work.CLIP / (total + 1e-6)).clamp(max=1.0)
    local = [p.grad.to_local() for p in spread_parameters] + [p.grad for p in whole_parameters]
    torch._foreach_mul_(local, scale)


if __name__ == "__main__":
    main()
