"""Mixture of experts: `model.moe` and the expert-parallel keys."""

from __future__ import annotations

from typing import Any

from profiles.nxdt.translation import Effect, Translation

MOE = "model.moe"
DEGREE = "distributed_strategy.expert_model_parallel_size"
SHUFFLE = "distributed_strategy.token_shuffle_group_size"
SINKHORN = ("router_activation", "sinkhorn_iterations", "sinkhorn_tol")
FAMILIES = {"llama": "mixtral"}  # architecture without experts: the same with experts


def stated(found: Translation) -> dict[str, Any]:
    """The expert counts that the config states, under our names; empty without experts."""
    if not found.has_section(MOE):
        return {}
    return {
        "num_experts": found.integer(f"{MOE}.num_experts", 1),
        "num_experts_per_tok": found.integer(f"{MOE}.top_k", 1),
    }


def translate(found: Translation, hugging_face: bool) -> None:
    """Set the experts' keys, and the architecture with experts."""
    degree = found.integer(DEGREE, 1)
    if not found.has_section(MOE):
        found.report(DEGREE, Effect.HARMLESS if degree == 1 else Effect.DIFFERS, "the model has no experts")
        found.report(SHUFFLE, Effect.HARMLESS, "the model has no experts")
        return
    found.translate(DEGREE, {"parallel.expert": degree})
    family: Any = found.ours.get("model.architecture")
    for name, ours in (("num_experts", "num_experts"), ("top_k", "num_experts_per_tok")):
        values = {"model.architecture": FAMILIES.get(family, family)} if name == "num_experts" else {}
        found.translate(f"{MOE}.{name}", {**values, f"model.{ours}": stated(found)[ours]})
    _router(found)
    _balance(found, hugging_face)
    capacity = _capacity(found, hugging_face)
    for name, value, reason in (
        ("frequency", 1, "Trainshed's mixtral has experts in every layer"),
        ("dropout", 0, "Trainshed's experts have no dropout"),
    ):
        right = found.get(f"{MOE}.{name}", value) == value
        note = "the same here" if right else f"has no equivalent: {reason}"
        found.report(f"{MOE}.{name}", Effect.HARMLESS if right else Effect.ERROR, note)
    if found.integer(SHUFFLE, 1) > 1 and capacity is not None:
        note = "has no equivalent: tokens are not shuffled between ranks, which decides which of them are dropped"
        found.report(SHUFFLE, Effect.ERROR, note)
    found.report(SHUFFLE, Effect.HARMLESS, "no tokens are shuffled")


def _router(found: Translation) -> None:
    """Top-k of the softmax; Sinkhorn routing is rejected, and its keys have no effect without it."""
    algorithm = found.get(f"{MOE}.routing_algorithm", "top_k")
    if algorithm == "top_k":
        found.report(f"{MOE}.routing_algorithm", Effect.HARMLESS, "the same here")
        for name in SINKHORN:
            note = "only read by the Sinkhorn router; the top-k router's scores are a softmax"
            found.report(f"{MOE}.{name}", Effect.HARMLESS, note)
    else:
        note = (
            "has no equivalent: it chooses experts using all tokens of a batch, later ones included, so that generation, token "
            "by token, routes differently from training; Trainshed has top_k, with balance losses"
        )
        found.report(f"{MOE}.routing_algorithm", Effect.ERROR, note)
        for name in SINKHORN:
            found.report(f"{MOE}.{name}", Effect.HARMLESS, "see model.moe.routing_algorithm")
    key = f"{MOE}.normalize_top_k_affinities"
    right = found.flag(key, stated(found)["num_experts_per_tok"] > 1)
    note = "has no equivalent: the weights of a token's experts sum to 1 in mixtral"
    found.report(key, Effect.HARMLESS if right else Effect.ERROR, "the same here" if right else note)


def _balance(found: Translation, hugging_face: bool) -> None:
    """Hugging Face's balance loss over a rank's microbatch, added only if router logits are output."""
    logits, key = f"{MOE}.output_router_logits", f"{MOE}.router_aux_loss_coef"
    coefficient = float(found.number(key, 0.02 if hugging_face else 0.0))
    on = found.flag(logits, hugging_face) and coefficient > 0
    values: dict[str, Any] = {"train.balance": "batch" if on else "none"}
    found.translate(
        logits, values, "the balance loss is that of a microbatch on a rank" if on else "no balance loss"
    )
    found.translate(key, {**values, **({"train.balance_coefficient": coefficient} if on else {})})


def _capacity(found: Translation, hugging_face: bool) -> float | None:
    """Set the capacity factor; None: dropless, also if the capacity is enough for all tokens."""
    experts, chosen = stated(found).values()
    key, dropless = f"{MOE}.capacity_factor", found.flag(f"{MOE}.dropless", False)
    full = experts / chosen
    factor = found.number(key, 1.0 if hugging_face else full)
    capacity = None if dropless or not factor or factor >= full else float(factor)
    note = f"from {full:g} on an expert can take all tokens" if factor >= full and not dropless else ""
    found.translate(key, {"train.capacity_factor": capacity}, "dropless" if dropless else note)
    found.translate(f"{MOE}.dropless", {"train.capacity_factor": capacity})
    return capacity
