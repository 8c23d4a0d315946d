"""torch's expert parallelism: torchrun --nproc-per-node 2 -m benchmarks.training_steps.grouped_experts

As in torchtitan, every rank holds E/n experts of each layer and its share of the samples. Rows are sorted by expert, exchanged by
torch's differentiable all-to-all, regrouped by expert, and multiplied by torch's grouped matrix product, with separate gate and
up projections; router weights are applied after the second all-to-all. All other gradients are averaged in one flat all-reduce.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from benchmarks.harness import workload
from benchmarks.training_steps.llama import Llama, cross_entropy
from profiles.sections.base import required
from profiles.sections.model import Model

PROJECTIONS = ("w1", "w3", "w2")  # gate, up, down


class Experts(nn.Module):
    """Mixture of experts; this rank holds `local` consecutive ones. (b, s, h) to the same shape."""

    def __init__(self, model: Model, rank: int, ranks: int) -> None:
        super().__init__()
        h, f, self.ranks, self.k = model.hidden_size, model.expert_width, ranks, model.num_experts_per_tok
        self.experts = required(model.num_experts)
        self.local = self.experts // ranks
        self.first = rank * self.local
        self.gate = nn.Linear(h, self.experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(self.local, f, h))
        self.w3 = nn.Parameter(torch.empty(self.local, f, h))
        self.w2 = nn.Parameter(torch.empty(self.local, h, f))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (T, h)
        scores = self.gate(tokens).softmax(-1)
        weights, chosen = scores.topk(self.k, sorted=False)  # (T, k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # (T·k) by expert
        sent = chosen.flatten().bincount(minlength=self.experts)  # (E)
        group = required(dist.group.WORLD)
        received = all_to_all_single(sent.view(self.ranks, -1), None, None, group)  # (n, local)
        received = torch.ops._c10d_functional.wait_tensor(received)
        splits = sent.view(self.ranks, -1).sum(1).tolist(), received.view(self.ranks, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(tokens[order // self.k], splits[1], splits[0], group)
        numbers = torch.arange(self.local, device=x.device).repeat(self.ranks)
        owners = numbers.repeat_interleave(received.flatten(), output_size=sum(splits[1]))
        regroup = owners.argsort(stable=True)
        out = self._multiply(rows[regroup], received.view(self.ranks, -1).sum(0))
        ungrouped = torch.empty_like(out).index_copy(0, regroup, out)
        back = all_to_all_single_autograd(ungrouped, splits[0], splits[1], group)  # (T·k, h)
        scaled = back * weights.flatten()[order][:, None]
        return torch.zeros_like(tokens).index_add(0, order // self.k, scaled).view_as(x)

    def _multiply(self, rows: Tensor, counts: Tensor) -> Tensor:
        offsets = counts.cumsum(0).to(torch.int32)
        gate, up = (F.grouped_mm(rows, w.transpose(1, 2), offs=offsets) for w in (self.w1, self.w3))
        return F.grouped_mm(F.silu(gate) * up, self.w2.transpose(1, 2), offs=offsets)


@torch.no_grad()
def load(model: Llama, description: Model) -> None:
    """Load the initial weights, of experts those of this rank."""
    weights = workload.huggingface_weights(description, next(model.parameters()).device)
    for name, parameter in model.named_parameters():
        prefix, _, last = name.rpartition(".mlp.")
        if last in PROJECTIONS:
            experts = model.get_submodule(f"{prefix}.mlp")
            assert isinstance(experts, Experts)
            for i in range(experts.local):
                expert = f"{prefix}.block_sparse_moe.experts.{experts.first + i}"
                parameter[i].copy_(weights[f"{expert}.{last}.weight"])
        else:
            parameter.copy_(weights[name.replace(".mlp.", ".block_sparse_moe.")])


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of parameters that all have one."""
    return [required(parameter.grad) for parameter in parameters]


def clip(experts: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Clip by the global norm, of which the experts' part is summed over the ranks."""
    own, shared = (torch.nn.utils.get_total_norm(gradients(group)) for group in (experts, others))
    squares = own.square()
    dist.all_reduce(squares)
    total = (squares + shared.square()).sqrt()
    torch.nn.utils.clip_grads_with_norm_([*experts, *others], workload.CLIP, total)


def main() -> None:
    options, work, rank, ranks = workload.start(workload.workload_parser(__doc__))
    with torch.device(options.device):
        model = Llama(work.model)
        for block in model.model.layers:
            block.mlp = Experts(work.model, rank, ranks)
    load(model, work.model)
    workload.convert(model, options)
    named = dict(model.named_parameters())
    experts = [p for name, p in named.items() if name.rpartition(".")[2] in PROJECTIONS]
    others = [p for name, p in named.items() if name.rpartition(".")[2] not in PROJECTIONS]
    optimizer = workload.adamw(model.parameters(), fused=True)

    def step(samples: Tensor) -> Tensor:
        local = samples.chunk(ranks)[rank].to(options.device)
        loss = cross_entropy(model(local[:, :-1]), local[:, 1:])
        (loss / ranks).backward()
        flat = torch.cat([gradient.flatten() for gradient in gradients(others)])
        dist.all_reduce(flat)
        sums = flat.split([p.numel() for p in others])
        for gradient, total in zip(gradients(others), sums, strict=True):
            gradient.copy_(total.view_as(gradient))
        clip(experts, others)
        optimizer.step()
        optimizer.zero_grad()
        return workload.mean_over_ranks(loss)

    workload.measure(step, options)


if __name__ == "__main__":
    main()
