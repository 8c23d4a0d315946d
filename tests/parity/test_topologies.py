"""Every topology trains like one process, within the tolerances."""

import pytest
import torch

from modeling.data.records import PADDING
from parallel.experts.balance import EXTRA
from tests.parity.harness import MANY_STEPS, STEPS, Case, batch, differences, one_process, run

CASES = {
    "tensor 4, KV replicated": Case(tensor=4),
    "tensor 8, KV replicated, padded vocabulary": Case(tensor=8),
    "tensor 4, no sequence parallelism, gpt_neox": Case("gpt_neox", tensor=4, sequence_parallel=False),
    "tensor 4, tied, biases": Case("llama tied", tensor=4),
    "tensor 2, tied, biases, no sequence parallelism": Case("llama tied", tensor=2, sequence_parallel=False),
    "tensor 2, gpt": Case("gpt", tensor=2),
    "tensor 4, gpt, no sequence parallelism": Case("gpt", tensor=4, sequence_parallel=False),
    "tensor 4, KV replicated, gemma3": Case("gemma3", tensor=4),
    "tensor 4, KV replicated, data 2, fsdp, olmo3": Case("olmo3", tensor=4, data=2, sharding="fsdp"),
    "tensor 2, glm4": Case("glm4", tensor=2),
    "data 2": Case(data=2),
    "data 4, shard degree 2": Case(data=4, shard_degree=2),
    "data 2, replicated optimizer": Case(data=2, sharding="none"),
    "data 4, replicated optimizer, gpt": Case("gpt", data=4, sharding="none"),
    "tensor 4, data 2": Case(tensor=4, data=2),
    "tensor 2, data 2, tied, granite": Case("granite", tensor=2, data=2),
    "context 2": Case(context=2),
    "context 4, sliding window": Case("mistral", context=4),
    "context 2, gpt": Case("gpt", context=2),
    "context 2, documents": Case(context=2, documents=True),
    "context 2, tensor 4, KV replicated, documents, sliding window": Case(
        "mistral", context=2, tensor=4, documents=True
    ),
    "tensor 2, documents, sliding window, qwen2": Case("qwen2", tensor=2, documents=True),
    "pipeline 2, tensor 2, sft, smollm3": Case(
        "smollm3", pipeline=2, tensor=2, documents=True, objective="sft"
    ),
    "context 2, documents, gpt": Case("gpt", context=2, documents=True),
    "pipeline 2": Case(pipeline=2),
    "pipeline 4": Case("llama 4 layers", pipeline=4),
    "pipeline 2, interleaved": Case("llama 4 layers", pipeline=2, schedule="interleaved"),
    "pipeline 2, zero bubble": Case(pipeline=2, schedule="zero_bubble"),
    "pipeline 4, zero bubble": Case("llama 4 layers", pipeline=4, schedule="zero_bubble"),
    "pipeline 4, gpt": Case("gpt 4 layers", pipeline=4),
    "tensor 2, context 2, pipeline 2, documents, gemma2": Case(
        "gemma2", tensor=2, context=2, pipeline=2, documents=True
    ),
    "pipeline 2, interleaved, tied": Case("gpt 4 layers", pipeline=2, schedule="interleaved"),
    "tensor 2, pipeline 2, data 2, gpt": Case("gpt", tensor=2, pipeline=2, data=2),
    "fsdp 2": Case(data=2, sharding="fsdp"),
    "fsdp 4, tied, full activation checkpointing": Case(
        "llama tied", data=4, sharding="fsdp", recompute="full"
    ),
    "fsdp 8, context 2": Case(data=4, context=2, sharding="fsdp"),
    "hsdp 2 x 4, sft": Case(
        data=4, context=2, sharding="fsdp", shard_degree=4, documents=True, objective="sft"
    ),
    "tensor 2, context 2, pipeline 2, dpo": Case(tensor=2, context=2, pipeline=2, objective="dpo"),
    "context 2, pipeline 2, dpo, packed": Case(context=2, pipeline=2, objective="dpo", documents=True),
    "tensor 2, data 2, orpo, packed": Case(tensor=2, data=2, objective="orpo", documents=True),
    "tensor 4, KV replicated, lora, overlapped in chunks": Case(
        tensor=4, lora=("qkv", "output", "gate_up", "down"), overlap_chunks=2
    ),
    "muon, tensor 2, no sequence parallelism, lora of some projections": Case(
        tensor=2, sequence_parallel=False, lora=("q_proj", "v_proj", "o_proj", "up_proj"), optimizer="muon"
    ),
    "fsdp 2, context 2, pipeline 2, lora": Case(
        data=2, context=2, pipeline=2, sharding="fsdp", lora=("qkv", "down"), recompute="full"
    ),
    "tensor 2, data 2, lora, gpt": Case("gpt", tensor=2, data=2, lora=("qkv", "output", "gate_up", "down")),
    "tensor 2, pipeline 2, lora of experts, dbrx": Case(
        "dbrx", tensor=2, pipeline=2, lora=("qkv", "gate_up", "down")
    ),
    "expert 2, tensor 2, context 2, fsdp 2, lora of experts, full activation checkpointing": Case(
        "mixtral",
        tensor=2,
        context=2,
        expert=2,
        sharding="fsdp",
        lora=("qkv", "gate_up", "down"),
        recompute="full",
    ),
    "expert 2, data 2, pipeline 2, lora of experts, capacity, deepseek_v3": Case(
        "deepseek_v3", data=2, pipeline=2, expert=2, lora=("output", "gate_up", "down"), capacity=1.0
    ),
    "tensor 2, context 2, expert 2, lora, dpo, reference computed in each step": Case(
        "gpt_oss",
        tensor=2,
        context=2,
        expert=2,
        lora=("q_proj", "v_proj", "gate_up"),
        objective="dpo",
        sharding="fsdp",
        recompute="selective",
    ),
    "context 4, tensor 2, qwen3_5": Case("qwen3_5", context=4, tensor=2),
    "context 2, tensor 2, expert 2, fsdp 4, documents, qwen3_next, multi-token": Case(
        "qwen3_next multi-token", context=2, tensor=2, data=2, expert=2, sharding="fsdp", documents=True
    ),
    "tensor 4, pipeline 2, no sequence parallelism, documents, qwen3_5, multi-token": Case(
        "qwen3_5 multi-token", tensor=4, pipeline=2, sequence_parallel=False, documents=True
    ),
    "pipeline 3, context 2, selective activation checkpointing, qwen3_next": Case(
        "qwen3_next", pipeline=3, context=2, recompute="selective"
    ),
    "context 4, fsdp 8, documents, full activation checkpointing, olmo_hybrid": Case(
        "olmo_hybrid", context=4, data=2, sharding="fsdp", documents=True, recompute="full"
    ),
    "fsdp 4, tensor 2": Case(tensor=2, context=2, data=2, sharding="fsdp", native=True),
    "fsdp 2, pipeline 2, tied": Case("llama tied", data=2, pipeline=2, sharding="fsdp"),
    "fsdp 2, pipeline 2, interleaved, weights kept": Case(
        "llama 4 layers", data=2, pipeline=2, schedule="interleaved", sharding="fsdp", keep_gathered=True
    ),
    "fsdp 2, pipeline 2, tensor 2, tied, completep": Case(
        "llama completep", data=2, pipeline=2, tensor=2, sharding="fsdp"
    ),
    "fsdp 2, pipeline 2, zero bubble": Case(data=2, pipeline=2, schedule="zero_bubble", sharding="fsdp"),
    "fsdp 4, context 2, gathered in the graph": Case(
        data=2, context=2, sharding="fsdp", in_graph=True, recompute="full"
    ),
    "hsdp 2 x 2, gathered in the graph, tied": Case(
        "llama tied", data=4, sharding="fsdp", shard_degree=2, in_graph=True
    ),
    "fsdp 2, dropout, weights kept": Case(
        "gpt dropout", data=2, sharding="fsdp", recompute="selective", keep_gathered=True
    ),
    "pipeline 2, context 2, tensor 2, tied": Case("llama tied", pipeline=2, context=2, tensor=2),
    "native reductions, tensor 4, KV replicated, overlapped in chunks": Case(
        tensor=4, native=True, overlap_chunks=2
    ),
    "native reductions, tensor 2, context 2, data 2": Case(tensor=2, context=2, data=2, native=True),
    "native reductions, no sequence parallelism": Case(
        tensor=2, data=2, sequence_parallel=False, sharding="none", native=True, recompute="selective"
    ),
    "selective activation checkpointing, overlapped in chunks": Case(
        tensor=2, recompute="selective", overlap_chunks=4
    ),
    "full activation checkpointing of one layer, selective of another": Case(
        tensor=2, recompute="full 1 + selective"
    ),
    "full activation checkpointing": Case(tensor=2, data=2, recompute="full"),
    "full activation checkpointing, of the first stage of pipeline 2": Case(
        pipeline=2, recompute=["full", "none"]
    ),
    "full activation checkpointing, context 2, gpt": Case("gpt", context=2, recompute="full"),
    "selective activation checkpointing, context 2": Case(context=2, recompute="selective"),
    "expert 2, as many data ranks": Case("mixtral", data=2, expert=2),
    "expert 2, rows sent again in backward": Case("mixtral", data=2, expert=2, eager=False),
    "expert 8 of data 4, context 2": Case("mixtral", data=4, context=2, expert=8),
    "expert 2, tensor 2, half of the data ranks": Case(
        "qwen3_moe", data=4, tensor=2, expert=2, recompute="selective"
    ),
    "expert 2, pipeline 2, full activation checkpointing": Case(
        "mixtral", data=2, pipeline=2, expert=2, balance="global", recompute="full"
    ),
    "pipeline 3, whose first stage has no experts, deepseek_v3, balance over the step, orpo": Case(
        "deepseek_v3", pipeline=3, balance="global", objective="orpo"
    ),
    "tensor 4, KV replicated, dbrx": Case("dbrx", tensor=4),
    "expert 2, tensor 2, context 2, documents, gpt_oss": Case(
        "gpt_oss", tensor=2, context=2, expert=2, documents=True
    ),
    "pipeline 2, gpt_oss": Case("gpt_oss", pipeline=2),
    "expert 2, fsdp 4": Case("mixtral", data=4, expert=2, sharding="fsdp"),
    "expert 4, hsdp 2 x 4, capacity": Case(
        "mixtral", data=8, expert=4, sharding="fsdp", shard_degree=4, capacity=1.0
    ),
    "experts, tensor 2, no sequence parallelism, no sharding": Case(
        "mixtral", data=2, tensor=2, sequence_parallel=False, sharding="none", expert=2
    ),
    "expert 2, tensor 2, data 2, deepseek_v3, bias, orpo": Case(
        "deepseek_v3", tensor=2, data=2, expert=2, balance="bias", objective="orpo"
    ),
    "expert 2, context 2, pipeline 2, documents, full activation checkpointing, deepseek_v3, bias": Case(
        "deepseek_v3", context=2, pipeline=2, expert=2, documents=True, recompute="full", balance="bias"
    ),
    "expert 4, hsdp 2 x 2, tensor 2, no sequence parallelism, deepseek_v3, bias": Case(
        "deepseek_v3",
        tensor=2,
        data=4,
        expert=4,
        sequence_parallel=False,
        sharding="fsdp",
        shard_degree=2,
        recompute="selective",
        balance="bias",
        native=True,
    ),
    "muon, QK-clip, tensor 4, KV replicated, data 2": Case(tensor=4, data=2, optimizer="muon", qk_clip=2.0),
    "muon, QK-clip, hsdp 2 x 2, context 2, full activation checkpointing": Case(
        data=2, context=2, sharding="fsdp", shard_degree=2, optimizer="muon", recompute="full", qk_clip=2.0
    ),
    "muon, QK-clip, pipeline 2, interleaved, tied, no sharding": Case(
        "gpt 4 layers",
        data=2,
        pipeline=2,
        schedule="interleaved",
        sharding="none",
        optimizer="muon",
        qk_clip=2.0,
    ),
    "muon, QK-clip, pipeline 2, zero bubble, data 2": Case(
        pipeline=2, data=2, schedule="zero_bubble", optimizer="muon", qk_clip=2.0
    ),
    "muon by head, QK-clip, expert 2, tensor 2, fsdp 4, deepseek_v3, bias": Case(
        "deepseek_v3",
        tensor=2,
        data=4,
        expert=2,
        sharding="fsdp",
        balance="bias",
        optimizer="muon",
        muon_heads=True,
        qk_clip=1.0,
    ),
    "muon, QK-clip, fsdp 2, pipeline 2, tensor 2, tied, gathered in the graph, completep": Case(
        "llama completep",
        data=2,
        pipeline=2,
        tensor=2,
        sharding="fsdp",
        in_graph=True,
        optimizer="muon",
        qk_clip=0.5,
    ),
    "tensor 2, pipeline 2, fsdp 2, balance over the step, sft, multi-token": Case(
        "multi-token",
        tensor=2,
        pipeline=2,
        data=2,
        sharding="fsdp",
        balance="global",
        objective="sft",
        documents=True,
    ),
    "tensor 2, context 2, expert 2, no sequence parallelism, multi-token": Case(
        "multi-token",
        tensor=2,
        context=2,
        expert=2,
        sequence_parallel=False,
        sharding="fsdp",
        recompute="selective",
    ),
    "pipeline 2, context 2, data 2, full activation checkpointing, documents, multi-token": Case(
        "multi-token", pipeline=2, context=2, data=2, recompute="full", documents=True, balance="bias"
    ),
    "dropout, tensor 2": Case("gpt dropout", tensor=2, recompute="selective"),
    "dropout, tensor 2, no sequence parallelism": Case("gpt dropout", tensor=2, sequence_parallel=False),
    "dropout, context 2": Case("gpt dropout", context=2),
    "dropout, pipeline 2, full activation checkpointing": Case("gpt dropout", pipeline=2, recompute="full"),
    "dropout, tensor 2, data 2, fsdp": Case("gpt dropout", tensor=2, data=2, sharding="fsdp"),
}

# One of each kind of parallelism, trained for many steps.
LONGER = (
    "tensor 2, data 2, tied, granite",
    "context 2, gpt",
    "fsdp 2, pipeline 2, tied",
    "expert 2, as many data ranks",
    "hsdp 2 x 4, sft",
    "tensor 4, KV replicated, lora, overlapped in chunks",
    "tensor 2, data 2, orpo, packed",
    "muon, QK-clip, tensor 4, KV replicated, data 2",
    "muon, QK-clip, hsdp 2 x 2, context 2, full activation checkpointing",
    "muon, QK-clip, pipeline 2, zero bubble, data 2",
)


@pytest.mark.parametrize("name", CASES)
def test_matches_one_process(name, pool):
    case, steps = CASES[name], MANY_STEPS if name in LONGER else STEPS
    assert differences(run(case, pool, steps=steps), one_process(case.reference, steps)) == []


def test_load_of_experts_does_not_count_the_padding_of_pairs():
    case = Case("deepseek_v3", balance="global", objective="orpo")
    model = case.profile().model
    loads = torch.tensor(one_process(case).router).view(-1, model.num_experts + EXTRA)[:, : model.num_experts]
    tokens = sum(int((batch(step, "orpo", padded=True)[:, :-1] != PADDING).sum()) for step in range(STEPS))
    assert loads.sum() == tokens * model.num_experts_per_tok * model.num_expert_layers


@pytest.mark.parametrize(
    "case",
    [
        Case(tensor=2, context=2, precision="bf16"),
        Case(tensor=4, precision="bf16"),
        Case("gpt", pipeline=2, tensor=2, precision="bf16"),
        Case(data=2, sharding="fsdp", precision="bf16"),
        Case("mixtral", data=2, expert=2, precision="bf16"),
    ],
    ids=["tensor 2, context 2", "tensor 4", "pipeline 2, tensor 2, gpt", "fsdp 2", "expert 2"],
)
def test_bf16_losses_match_one_process(case, pool):
    assert run(case, pool).losses == pytest.approx(one_process(case.reference).losses, rel=2e-2)
