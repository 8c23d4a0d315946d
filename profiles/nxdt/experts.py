"""Mixture of experts: `model.moe` and the expert-parallel keys."""

from __future__ import annotations

from typing import Any

from profiles.nxdt.translation import Effect, Translation

MOE = "model.moe"
DEGREE = "distributed_strategy.expert_model_parallel_size"
SHUFFLE = "distributed_strategy.token_shuffle_group_size"
SINKHORN = ("router_activation", "sinkhorn_iterations", "sinkhorn_tol")
FAMILIES = {"llama": "mixtral"}  # architecture without experts: the same with experts


def stated(translation: Translation) -> dict[str, Any]:
    """The expert counts that the config states, under our names; empty without experts."""
    if not translation.has_section(MOE):
        return {}
    return {
        "num_experts": translation.integer(f"{MOE}.num_experts", 1),
        "num_experts_per_tok": translation.integer(f"{MOE}.top_k", 1),
    }


def translate(translation: Translation, hugging_face: bool) -> None:
    """Set the experts' keys, and the architecture with experts."""
    degree = translation.integer(DEGREE, 1)
    if not translation.has_section(MOE):
        translation.report(
            DEGREE, Effect.HARMLESS if degree == 1 else Effect.DIFFERS, "the model has no experts"
        )
        translation.report(SHUFFLE, Effect.HARMLESS, "the model has no experts")
        return
    translation.translate(DEGREE, {"parallel.expert": degree})
    family: Any = translation.ours.get("model.architecture")
    for name, ours in (("num_experts", "num_experts"), ("top_k", "num_experts_per_tok")):
        values = {"model.architecture": FAMILIES.get(family, family)} if name == "num_experts" else {}
        translation.translate(f"{MOE}.{name}", {**values, f"model.{ours}": stated(translation)[ours]})
    _router(translation)
    _balance(translation, hugging_face)
    capacity = _capacity(translation, hugging_face)
    for name, value, reason in (
        ("frequency", 1, "Trainshed's mixtral has experts in every layer"),
        ("dropout", 0, "Trainshed's experts have no dropout"),
    ):
        right = translation.get(f"{MOE}.{name}", value) == value
        note = "the same here" if right else f"has no equivalent: {reason}"
        translation.report(f"{MOE}.{name}", Effect.HARMLESS if right else Effect.ERROR, note)
    if translation.integer(SHUFFLE, 1) > 1 and capacity is not None:
        note = "has no equivalent: tokens are not shuffled between ranks, which decides which of them are dropped"
        translation.report(SHUFFLE, Effect.ERROR, note)
    translation.report(SHUFFLE, Effect.HARMLESS, "no tokens are shuffled")


def _router(translation: Translation) -> None:
    """Top-k of the softmax; Sinkhorn routing is rejected, and its keys have no effect without it."""
    algorithm = translation.get(f"{MOE}.routing_algorithm", "top_k")
    if algorithm == "top_k":
        translation.report(f"{MOE}.routing_algorithm", Effect.HARMLESS, "the same here")
        for name in SINKHORN:
            note = "only read by the Sinkhorn router; the top-k router's scores are a softmax"
            translation.report(f"{MOE}.{name}", Effect.HARMLESS, note)
    else:
        note = (
            "has no equivalent: it chooses experts using all tokens of a batch, later ones included, so that generation, token "
            "by token, routes differently from training; Trainshed has top_k, with balance losses"
        )
        translation.report(f"{MOE}.routing_algorithm", Effect.ERROR, note)
        for name in SINKHORN:
            translation.report(f"{MOE}.{name}", Effect.HARMLESS, "see model.moe.routing_algorithm")
    key = f"{MOE}.normalize_top_k_affinities"
    right = translation.flag(key, stated(translation)["num_experts_per_tok"] > 1)
    note = "has no equivalent: the weights of a token's experts sum to 1 in mixtral"
    translation.report(key, Effect.HARMLESS if right else Effect.ERROR, "the same here" if right else note)


def _balance(translation: Translation, hugging_face: bool) -> None:
    """Hugging Face's balance loss over a rank's microbatch, added only if router logits are output."""
    logits, key = f"{MOE}.output_router_logits", f"{MOE}.router_aux_loss_coef"
    coefficient = float(translation.number(key, 0.02 if hugging_face else 0.0))
    on = translation.flag(logits, hugging_face) and coefficient > 0
    values: dict[str, Any] = {"train.balance": "batch" if on else "none"}
    translation.translate(
        logits, values, "the balance loss is that of a microbatch on a rank" if on else "no balance loss"
    )
    translation.translate(key, {**values, **({"train.balance_coefficient": coefficient} if on else {})})


def _capacity(translation: Translation, hugging_face: bool) -> float | None:
    """Set the capacity factor; None: dropless, also if the capacity is enough for all tokens."""
    experts, chosen = stated(translation).values()
    key, dropless = f"{MOE}.capacity_factor", translation.flag(f"{MOE}.dropless", False)
    full = experts / chosen
    factor = translation.number(key, 1.0 if hugging_face else full)
    capacity = None if dropless or not factor or factor >= full else float(factor)
    note = f"from {full:g} on an expert can take all tokens" if factor >= full and not dropless else ""
    translation.translate(key, {"train.capacity_factor": capacity}, "dropless" if dropless else note)
    translation.translate(f"{MOE}.dropless", {"train.capacity_factor": capacity})
    return capacity
