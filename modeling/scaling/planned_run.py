"""Planned runs of an experiment or a chain; smaller or shorter runs of a target's family.

Those are a ladder's rungs, a mixture's proxies (proxies.py), and of a share file a small model in place of the promoted one with
its rounds, each as long in proportion to the small model's training as the series' round is to the target's.

A small run keeps the target's head size, ratio of query to KV heads, MLP ratio, vocabulary, sequence length, and the shares of
warm-up and plateaus in the schedule. Its batch is the target's, or with `batch_exponent` γ grows as D^γ (the critical batch size
grows with data and hardly with model size: γ is about 0.5, arXiv 2410.21676), and its learning rate as the square root of the
batch (Adam's rule: arXiv 2205.10287). How learning rate and initial weights depend on size is the model's parametrization
(modeling/models).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from modeling.models.flops import flops_per_token
from profiles import resolve
from profiles.errors import ProfileError
from profiles.experiments import Experiment, Ladder, ProxySize, RungSize, Share, SmallRuns
from profiles.schema import Profile

PLAIN = ("train.epochs=null", "data.schedule=[]")  # rounds ignore the schedule of the sources
MULTIPLE = 8  # a small run's MLP width is a multiple of this


@dataclass(frozen=True)
class PlannedRun:
    """A run that an experiment or a chain may start.

    Attributes:
        source: name or path of the profile that resolves to `profile` with the overrides.
        fork: RUN@STEP from whose checkpoint it continues; empty: none.
    """

    source: str
    profile: Profile
    overrides: tuple[str, ...]
    fork: str = ""

    @classmethod
    def load(cls, source: str, overrides: Sequence[str], name: str | None = None, fork: str = "") -> Self:
        """Resolve and check a run. Raises ProfileError for an invalid one."""
        profile = resolve.load(source, overrides, name)
        resolve.check(profile)
        return cls(source, profile, tuple(overrides), fork)

    @property
    def name(self) -> str:
        return self.profile.name

    @property
    def n(self) -> float:
        """Multiply-adds per token of a forward pass."""
        return flops_per_token(self.profile) / 6

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return self.profile.train.last_step * self.profile.step_tokens

    @property
    def first_step(self) -> int:
        """The step from which it starts."""
        return int(self.fork.rpartition("@")[2]) if self.fork else 0

    @property
    def share(self) -> float:
        """The share of its steps that it trains itself."""
        return 1 - self.first_step / self.profile.train.last_step

    @property
    def flops(self) -> float:
        """Training FLOPs, without those of the run from which it starts."""
        return 6 * self.n * self.tokens * self.share


def target_of(experiment: Experiment) -> PlannedRun:
    """The target. Raises ProfileError if its profile is invalid, or small runs cannot forecast it."""
    target, kind = experiment.target, type(experiment).__name__.lower()
    run = PlannedRun.load(target, experiment.overrides)
    profile = run.profile
    if profile.train.steps is None:
        reason = f"is missing; a {kind} needs the target's length in steps, not epochs"
        raise ProfileError("train.steps", None, reason)
    if profile.fine_tunes or profile.init.from_ is not None:
        reason = f"is not a pretraining run from scratch, as a {kind} requires"
        raise ProfileError("target", target, reason)
    if profile.model.num_experts is not None:
        raise ProfileError("target", target, f"has experts, whose sizes a {kind} does not vary")
    return run


def small_run(
    experiment: SmallRuns,
    target: PlannedRun,
    size: tuple[int, int],
    length: float,
    name: str,
    topology: Sequence[str] = (),
    changes: Sequence[str] = (),
) -> PlannedRun:
    """A run of the target's family. Raises ProfileError if its size is impossible.

    Args:
        size: width and depth.
        length: training tokens divided by N.
        topology: overrides that do not change the mathematics.
        changes: further overrides, applied last.
    """
    train = target.profile.train
    hidden, layers = size
    sizes = {"hidden_size": hidden, **_shapes(target.profile, hidden), "num_hidden_layers": layers}
    overrides = [*experiment.overrides, *topology]
    overrides += [f"model.{key}={value}" for key, value in sizes.items()]
    first = resolve.load(experiment.target, [*overrides, "parallel.pipeline_cuts=null"], name)
    tokens = length * flops_per_token(first) / 6
    unit = first.train.micro_batch_size * max(1, first.data_parallel)
    growth = (tokens / target.tokens) ** experiment.batch_exponent
    batch = train.global_batch_size
    if experiment.batch_exponent:
        batch = max(1, round(batch * growth / unit)) * unit
    steps = max(1, round(tokens / (batch * train.sequence_length)))
    share, rate = steps / train.last_step, math.sqrt(batch / train.global_batch_size)
    settings = {
        "steps": steps,
        "global_batch_size": batch,
        "learning_rate": train.learning_rate * rate,
        "minimum_learning_rate": train.minimum_learning_rate * rate,
        **_phases(train, share, steps),
    }
    overrides += ["parallel.pipeline_cuts=null", "evaluate.every=0"]
    overrides += [f"train.{key}={value!r}" for key, value in settings.items()]
    overrides.append(f"data.schedule={json.dumps(_mixture(target.profile, share, steps))}")
    overrides.append(f"checkpoint.every={math.ceil(target.profile.checkpoint.every * share)}")
    overrides += changes
    return PlannedRun.load(experiment.target, overrides, name)


def proxy_run(
    experiment: SmallRuns,
    target: PlannedRun,
    size: ProxySize,
    length: float,
    name: str,
    topology: Sequence[str] = (),
    changes: Sequence[str] = (),
) -> PlannedRun:
    """`small_run` of a proxy; an impossible width is an error of the experiment's `proxy`."""
    try:
        return small_run(experiment, target, _shape(size, target), length, name, topology, changes)
    except ProfileError as error:
        raise error.within("proxy") if error.key == "hidden_size" else error from None


def _shape(size: RungSize | ProxySize, target: PlannedRun) -> tuple[int, int]:
    """Width and depth, by default the target's depth."""
    return size.hidden_size, size.num_hidden_layers or target.profile.model.num_hidden_layers


def rungs_of(ladder: Ladder, target: PlannedRun) -> list[PlannedRun]:
    """The rungs in order of compute. Raises ProfileError with the rung's key if a size is impossible."""
    found: dict[str, PlannedRun] = {}
    for number, size in enumerate(ladder.rungs):
        hidden, layers = shape = _shape(size, target)
        for length in size.tokens_per_parameter:
            name = f"{ladder.name}-h{hidden}-l{layers}-t{length:g}"
            try:
                rung = small_run(ladder, target, shape, length, name, ladder.rung_overrides)
            except ProfileError as error:
                raise error.within(f"rungs.{number}") from None
            if rung.name in found:
                raise ProfileError(f"rungs.{number}", rung.name, "is listed twice")
            found[rung.name] = rung
    return sorted(found.values(), key=lambda rung: rung.flops)


def warnings_of(target: PlannedRun, rungs: Sequence[PlannedRun]) -> list[str]:
    """Warnings about settings that make a forecast from these rungs worse than necessary."""
    found = []
    if target.profile.model.parametrization == "standard":
        found.append(
            "model.parametrization is standard: the best learning rate changes with size; set it to mup or completep, with the "
            "size that train.learning_rate was tuned for"
        )
    largest = max((rung.flops for rung in rungs), default=0)
    if largest and target.flops > 100 * largest:
        found.append(f"the target has {target.flops / largest:,.0f} times the compute of the largest rung")
    return found


def base_of(described: Share, target: PlannedRun) -> PlannedRun:
    """The proxy in place of the promoted model, trained on the series' history."""
    length, name = described.proxy.tokens_per_parameter, f"{described.name}-base"
    return proxy_run(described, target, described.proxy, length, name, described.proxy_overrides, PLAIN)


def round_of(
    described: Share, target: PlannedRun, base: PlannedRun, run: Profile, share: float
) -> PlannedRun:
    """A proxy of a round.

    Args:
        run: the profile of the series' round with this share, with its steps.
    """
    planned = PlannedRun(target.source, run, ())
    length = base.tokens / base.n * planned.tokens / target.tokens
    name = f"{described.name}-{share:g}"
    overrides = [*described.round_overrides, *described.proxy_overrides]
    return proxy_run(described, planned, described.proxy, length, name, overrides, PLAIN)


def _mixture(target: Profile, share: float, steps: int) -> list[dict[str, Any]]:
    """The target's mixture changes at the same shares of the schedule; of several at one step, the last."""
    changes = {min(steps, max(1, round(each.step * share))): each.weights for each in target.data.schedule}
    return [{"step": step, "weights": weights} for step, weights in changes.items()]


def _phases(train: object, share: float, steps: int) -> dict[str, int]:
    """Steps of the schedule's phases in proportion to the target's, at most `steps` in all."""
    left, phases = steps, {}
    for name in ("warmup_steps", "constant_steps", "minimum_rate_steps"):
        given = getattr(train, name)
        phases[name] = min(left, max(round(given * share), 1 if given else 0))
        left -= phases[name]
    return phases


def _shapes(target: Profile, hidden: int) -> dict[str, int]:
    """Sizes of a model of this width in the target's proportions."""
    model = target.model
    per_head = model.hidden_size // model.num_attention_heads
    if hidden % per_head:
        below = hidden // per_head * per_head
        reason = f"is not a multiple of {per_head}, the target's width per head"
        raise ProfileError("hidden_size", hidden, reason, [n for n in (below, below + per_head) if n])
    heads = hidden // per_head
    kv_heads = max(1, heads * model.num_key_value_heads // model.num_attention_heads)
    if heads % kv_heads:
        group = model.num_attention_heads // model.num_key_value_heads
        step = per_head * group
        reason = f"makes {heads} query heads, not a multiple of {kv_heads} KV heads"
        below = hidden // step * step
        raise ProfileError("hidden_size", hidden, reason, [n for n in (below, below + step) if n])
    width = model.intermediate_size * hidden / model.hidden_size
    return {
        "intermediate_size": max(1, round(width / MULTIPLE)) * MULTIPLE,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": model.head_dim,
    }
