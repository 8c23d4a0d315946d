"""Rehearsal: run every program outside the model once, to trace and compile it ahead of time.

Covers what steps, evaluations and sampling compute, on tensors of the run's shapes, for devices that compile each operator at its
first use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from modeling.compilation.graph_cache import COUNTS, PROGRAMS
from modeling.models import qk_clip
from modeling.models.build import build_optimizer, experts_by_layer, maxima_by_layer
from modeling.models.language_model import LanguageModel
from modeling.training import generate, user_functions
from modeling.training.anomalies import WINDOW
from modeling.training.step import load_size
from modeling.training.step_functions import StepFunctions
from modeling.training.trainer import preference_settings
from modeling.training.user_functions import UserFunction
from parallel import Mesh
from parallel.attention.zigzag import zigzag_positions
from parallel.experts.balance import EXTRA
from parallel.layers.deferred import DeferredGradients
from parallel.optimizer.arithmetic import Compile
from parallel.optimizer.replicas import ReplicaCheck
from profiles.schema import Profile
from profiles.sections.base import required


@torch.no_grad()
def rehearse(
    profile: Profile,
    model: LanguageModel,
    stages: Sequence[LanguageModel],
    mesh: Mesh,
    hidden: Tensor,
    compile: Compile,
) -> None:
    """Run what a rank computes outside a stage's forward and backward passes, so that it is compiled.

    Each argument of a function is a tensor of its own, since one that is passed twice would be a single input of the graph.

    Args:
        model: the stage, with compiled regions.
        stages: all stages of the rank, including this one, for the optimizer.
        hidden: outputs of the stage.
    """
    for layer in DeferredGradients(model).layers:
        layer.deferred_gradient(required(layer.kept), torch.empty_like(required(layer.receiver)))
    functions = StepFunctions(compile)
    _rehearse_samples(profile, functions, mesh, hidden.device)
    clipped = _rehearse_clipping(profile, functions, model, stages, mesh, hidden.device)
    _rehearse_statistics(profile, functions, stages, mesh, hidden.device, clipped)
    if model.last:
        _rehearse_last_stage(profile, functions, model, mesh, hidden)
    optimizer = build_optimizer(profile, stages, mesh, compile)
    optimizer.rehearse(profile.accumulation_steps, *clipped[:1])
    ReplicaCheck(optimizer.buckets, mesh, optimizer.arithmetic).rehearse()


def _rehearse_samples(profile: Profile, functions: StepFunctions, mesh: Mesh, device: torch.device) -> None:
    """Tokens and targets of a step, and of evaluation and sampling."""
    s, kind = profile.train.sequence_length, profile.objective.traits.sample_kind
    positions = zigzag_positions(s, mesh.context.size, mesh.context.rank).to(device)
    number = torch.zeros((), device=device)
    step = profile.micro_batch_rows * profile.accumulation_steps
    sampling = generate.rows_of_pass(profile)
    # Sampling passes no answers.
    for rows, answered in {(step, profile.answers_per_row > 1), (sampling, False)}:
        samples = torch.zeros(rows, s + 1, dtype=torch.int64, device=device)
        documents = torch.zeros_like(samples[:, 1:]) if profile.document_masks else None
        answers = torch.zeros_like(samples[:, 1:]) if answered else None
        _, targets, _ = functions.shard(samples, positions, documents, answers, kind)
        if profile.padding_masks:
            functions.find_padding(samples, positions)
        if (rows, answered) == (step, profile.answers_per_row > 1):
            _, count = functions.count_targets(targets, number.int(), kind)
            if count is not None and not (profile.train.loss or profile.evaluate.metrics):
                functions.pack_evaluation(count, number)
            if profile.objective.traits.pairs:
                _rehearse_pairs(profile, functions, mesh, targets)


def _rehearse_pairs(profile: Profile, functions: StepFunctions, mesh: Mesh, targets: Tensor) -> None:
    """The loss of a microbatch of preference pairs, and its log-probabilities under the reference model."""
    settings, b, device = preference_settings(profile), profile.micro_batch_rows, targets.device
    length = profile.train.sequence_length // mesh.context.size
    wanted, answer, numbers, rows = functions.split_targets(targets[:b], length, settings.odds_ratio)
    width = profile.answers_per_row
    losses = torch.zeros(wanted.shape, device=device)
    given = profile.objective.traits.needs_reference
    reference = torch.zeros(len(targets), width, device=device) if given else None
    pairs = answer, numbers, rows, reference, width, mesh.context, torch.zeros((), device=device)
    for training in (True, False):
        sums, _ = functions.score_pairs(settings, losses, *pairs, training)
    functions.add(sums, sums.clone())  # sums of evaluated microbatches
    with torch.enable_grad():
        functions.with_value(torch.zeros((), device=device, requires_grad=True), sums)
    if profile.scores_pairs_in_step:
        answers = functions.log_probabilities(losses, numbers, width)
        functions.concatenate([torch.zeros_like(answers) for _ in range(profile.accumulation_steps)])


def _rehearse_statistics(
    profile: Profile,
    functions: StepFunctions,
    stages: Sequence[LanguageModel],
    mesh: Mesh,
    device: torch.device,
    clipped: Sequence[Tensor],
) -> None:
    """The statistics that ranks exchange after backward, and decisions based on them."""

    def number() -> Tensor:
        return torch.zeros((), device=device)

    functions.multiply(functions.add(number(), number()), number())
    model, found = profile.model, experts_by_layer(stages)
    layers = model.num_layers
    load = torch.zeros(load_size(model), device=device)
    if found:
        tally = torch.zeros(required(model.num_experts) + EXTRA, device=device)
        functions.add(tally, torch.zeros_like(tally))
        load = functions.to_table(
            [experts.tally.detach() for experts in found.values()], tuple(found), layers
        )
    counts = torch.zeros(2 + COUNTS * len(PROGRAMS) + mesh.size, device=device)
    modules = torch.zeros(len(model.prediction_layers), device=device)
    numbers = counts, load, modules, torch.zeros(1, device=device)
    statistics = functions.pack(number(), mesh.tensor.size, *numbers)
    functions.join(statistics, *clipped[1:], number(), number(), number())
    factor, window = profile.train.spike_factor, torch.zeros(WINDOW, device=device)
    functions.decide(statistics[0], window, number(), factor)
    if factor is not None:
        slots = torch.arange(WINDOW, device=device)
        functions.record(statistics[0], number(), window, number(), slots)
    if found and profile.train.balance == "global":
        loads = [experts.load for experts in found.values()]
        functions.clear(loads)
        shares = functions.to_table(loads, tuple(found), layers, mesh.tensor.size)
        rows_per_step = profile.train.global_batch_size * profile.rows_per_sample
        functions.set_loads(loads, shares, tuple(found), rows_per_step)


def _rehearse_clipping(
    profile: Profile,
    functions: StepFunctions,
    model: LanguageModel,
    stages: Sequence[LanguageModel],
    mesh: Mesh,
    device: torch.device,
) -> Sequence[Tensor]:
    """The results of `clip_logits`; none without `train.qk_clip`."""
    threshold, settings, found = profile.train.qk_clip, profile.model, maxima_by_layer(stages)
    if threshold is None:
        return ()
    if profile.accumulation_steps > 1:
        for maxima in maxima_by_layer([model]).values():
            maxima.larger(torch.zeros_like(maxima.tally), torch.zeros_like(maxima.tally))
    logits = torch.zeros(settings.num_layers, settings.num_attention_heads, device=device)
    if found:
        rows = [torch.zeros_like(maxima.tally) for maxima in found.values()]
        logits = functions.logit_table(rows, tuple(found), settings.num_layers, mesh.tensor)
    return functions.clip_logits(logits, threshold, qk_clip.key_heads(settings))


def _rehearse_user_functions(
    profile: Profile, functions: StepFunctions, model: LanguageModel, mesh: Mesh, hidden: Tensor
) -> None:
    """The user's loss and metrics. Raises ValueError if they cannot be captured as one graph."""
    loss = [user_functions.load(profile.train.loss)] if profile.train.loss else []
    metrics = [user_functions.load(name) for name in profile.evaluate.metrics]
    shape = profile.micro_batch_rows, profile.train.sequence_length // mesh.context.size
    targets = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
    for training in (True, False) if loss else (False,) if metrics else ():
        x = hidden.detach().requires_grad_(training)
        called = loss if training else loss + metrics
        with torch.set_grad_enabled(training):
            try:
                sums = functions.user_sums(called, **model.logits_arguments(x), targets=targets)
            except (MemoryError, OSError):
                raise
            except Exception as error:  # of the function or its capture, which have no common class
                raise ValueError(_uncaptured(called, str(error))) from error
        if not training:
            count, cross_entropy = (torch.zeros((), device=hidden.device) for _ in range(2))
            total = functions.stack(sums if loss else [cross_entropy, *sums])
            functions.pack_evaluation(count, functions.add(total, total.clone()))


def _uncaptured(functions: Sequence[UserFunction], error: str) -> str:
    """Message for Dynamo's error: what cannot be captured, where and why."""
    names = ", ".join(f"{function.__module__}:{function.__name__}" for function in functions)
    found = re.search(r"Developer debug context: (.*)", error)
    reason = found[1] if found else error.strip().partition("\n")[0]
    *_, (file, line) = [("", ""), *re.findall(r'File "([^"]+)", line (\d+)', error)]
    where = f"{file}:{line}" if file else "the function"
    return f"{names}: this device only runs compiled programs, and {where} cannot be captured: {reason}"


def _rehearse_last_stage(
    profile: Profile, functions: StepFunctions, model: LanguageModel, mesh: Mesh, hidden: Tensor
) -> None:
    """The gradients of the loss, and the logits for sampling."""
    weight = model.output_embedding().weight
    _rehearse_user_functions(profile, functions, model, mesh, hidden)
    if model.tied:
        model.tied.add(weight, torch.empty_like(weight))
    if profile.train.loss is None:
        factor = torch.zeros((), device=hidden.device)
        for gradient in (hidden, weight):
            model.loss_programs.scale(gradient, factor)
    ranks = mesh.tensor.size if model.sequence_parallel else 1
    parts = [
        hidden.new_empty(len(hidden) * ranks, hidden.shape[1])  # (b·s/c, h)
        for _ in range(generate.sampled_microbatches(profile))
    ]
    _, count = generate.sampled_rows(profile)
    states = torch.zeros(count, dtype=torch.int64, device=hidden.device)
    functions.next_logits(parts, weight, states, profile.model.final_logit_softcapping)
