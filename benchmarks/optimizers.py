"""Measure in how many tokens Muon reaches AdamW's loss: `python -m benchmarks.optimizers --seed 0`

Both optimizers train the ladder of harness/rungs.py, eight rungs of three widths, on real text: that of the Python
installation, as bytes, none of which repeats. Learning rates are tuned on the smallest rung, with a seed of their own;
`model.parametrization: completep` carries them over to other widths.

The laws of both ladders forecast, with an interval, the ratio of tokens of the two at the target's loss. Only then AdamW trains
the target, and Muon models of its size for several shares of its tokens, each with its own schedule; the ratio is interpolated
between their losses. The ratio counts tokens, not seconds. Each seed takes about four minutes of CPU time.

With `--rates`, learning rates are given instead of tuned, and with `--part outcome`, only the target is trained, in two thirds of
that time: further seeds of an outcome whose forecast is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np

from benchmarks.harness import rungs as shapes
from benchmarks.harness.results import Results
from benchmarks.harness.text import documents
from benchmarks.harness.timing import make_parser
from benchmarks.harness.training import train_and_evaluate
from modeling.scaling.fit import Fit, Observation, fit, run_noise
from modeling.scaling.law import Law
from modeling.scaling.planned_run import PlannedRun, rungs_of, target_of
from profiles.experiments import Ladder

Optimizer = Literal["adamw", "muon"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "muon")
MEGABYTES, HELD_OUT = 3, 32  # one in HELD_OUT documents is held out
VALIDATION = 2048  # windows
RATES = tuple(5e-4 * 2**power for power in range(9))
TUNING_SEED = 10**6
SHARES = (0.2, 0.35, 0.5, 0.7, 1.0)  # of the target's tokens, for which Muon trains its model
BYTES = ["model.vocab_size=256", "tokenizer.vocabulary_size=256"]


class Text:
    """Windows of a text's bytes; none has a byte of another, except its last."""

    def __init__(self, text: np.ndarray, seed: int, windows: int | None = None) -> None:
        self._text = text
        self._order = np.random.default_rng(seed).permutation((len(text) - 1) // shapes.SEQUENCE)[:windows]
        self.windows = len(self._order)

    def batch(self, first: int, count: int) -> np.ndarray:
        """Windows [first, first + count), each of one token more than the sequence length."""
        assert first + count <= self.windows, "a window would repeat"
        starts = self._order[first : first + count] * shapes.SEQUENCE
        rows: np.ndarray = self._text[starts[:, None] + np.arange(shapes.SEQUENCE + 1)]
        return rows.astype(np.int64)


@cache
def texts() -> tuple[np.ndarray, np.ndarray]:
    """Bytes for training, and held out."""
    found = [*documents(MEGABYTES)]
    held_out = found[::HELD_OUT]
    del found[::HELD_OUT]
    train, validation = (np.frombuffer("\n".join(part).encode(), np.uint8) for part in (found, held_out))
    return train, validation


def describe(optimizer: Optimizer, rate: float, seed: int, share: float = 1.0) -> Ladder:
    """The ladder of an optimizer, whose target trains for a share of the tokens."""
    warmup = round(share * shapes.STEPS / 20)
    settings = {"optimizer": optimizer, "steps": round(share * shapes.STEPS), "warmup_steps": warmup, "seed": seed,
                "learning_rate": rate, "minimum_learning_rate": rate / 20}  # fmt: skip
    given = (f"train.{key}={value}" for key, value in settings.items())
    return shapes.ladder(f"{optimizer}-{seed}", *BYTES, *given)


def loss_of(run: PlannedRun, results: Results) -> float:
    """Train a run; its loss on held-out text, in nats per byte."""
    text, validation = texts()
    train = run.profile.train
    loss = train_and_evaluate(run.profile, Text(text, train.seed), Text(validation, 0, VALIDATION)).loss
    settings = train.model_dump(include={"optimizer", "seed", "steps", "learning_rate"})
    results.add(run.name, **settings, loss=loss)
    return loss


def tune(optimizer: Optimizer, results: Results) -> float:
    """The rate of the lowest loss of the smallest rung."""
    losses: dict[float, float] = {}
    for rate in RATES:
        ladder = describe(optimizer, rate, TUNING_SEED)
        losses[rate] = loss_of(rungs_of(ladder, target_of(ladder))[0], results)
    return min(losses, key=lambda rate: losses[rate])


def tokens_to(loss: float, law: Law, n: float) -> float:
    """Tokens after which a model reaches a loss by a law; infinite if it never does."""
    unit_n, unit_d = law.scale
    rest = loss - law.irreducible - law.size * (n / unit_n) ** -law.alpha
    return unit_d * (law.data / rest) ** (1 / law.beta) if rest > 0 else math.inf


def forecast(adamw: Fit, muon: Fit, target: PlannedRun, seed: int) -> tuple[float, float, float]:
    """Forecast the ratio of tokens at the target's loss, with the interval of 90%."""
    n, d = target.n, target.tokens
    chance = np.random.default_rng(seed)
    noises = np.exp(math.hypot(adamw.noise, muon.noise) * run_noise(chance, len(adamw.draws)))
    drawn = zip(adamw.draws, muon.draws, noises, strict=True)
    ratios = [tokens_to(float(one.loss(n, d)) * noise, other, n) / d for one, other, noise in drawn]
    low, high = np.quantile(ratios, (0.05, 0.95), method="nearest")
    return tokens_to(float(adamw.law.loss(n, d)), muon.law, n) / d, float(low), float(high)


def reached(loss: float, losses: Sequence[float]) -> float:
    """The share of SHARES at which Muon reaches a loss; 0 or infinite if outside of them."""
    if not losses[-1] <= loss <= losses[0]:
        return 0.0 if loss > losses[0] else math.inf
    return math.exp(np.interp(-loss, [-each for each in losses], np.log(SHARES)))


def measure_forecast(seed: int, rates: dict[Optimizer, float], results: Results) -> tuple[float, float]:
    """Train both ladders with one seed and forecast the ratio; returns its interval."""
    fits = []
    for optimizer in OPTIMIZERS:
        ladder = describe(optimizer, rates[optimizer], seed)
        rungs = rungs_of(ladder, target_of(ladder))
        losses = [loss_of(rung, results) for rung in rungs]
        points = zip(rungs, losses, strict=True)
        fits.append(fit([Observation(rung.n, rung.tokens, loss) for rung, loss in points], seed))
    target = target_of(describe("adamw", rates["adamw"], seed))
    adamw, muon = fits
    ratio, low, high = forecast(adamw, muon, target, seed)
    text = f"seed {seed}: forecast {ratio:.2f} of AdamW's tokens, 90% interval {low:.2f} to {high:.2f}"
    results.add("forecast", text, seed=seed, ratio=ratio, interval=[low, high])
    return low, high


def measure_outcome(seed: int, rates: dict[Optimizer, float], results: Results) -> float:
    """Train the target with one seed; returns the ratio."""
    begun = time.process_time()
    loss = loss_of(target_of(describe("adamw", rates["adamw"], seed)), results)
    found = [loss_of(target_of(describe("muon", rates["muon"], seed, share)), results) for share in SHARES]
    outcome = reached(loss, found)
    curve = ", ".join(f"{share:g}: {each:.4f}" for share, each in zip(SHARES, found, strict=True))
    cost = f"{time.process_time() - begun:.0f} s of CPU time"
    text = f"seed {seed}: AdamW {loss:.4f}; Muon {curve}; outcome {outcome:.2f}; {cost}"
    results.add("outcome", text, seed=seed, ratio=outcome)
    return outcome


def main() -> None:
    parser = make_parser(__doc__, out="optimizers")
    parser.add_argument("--seed", type=int, action="append", required=True, help="repeatable")
    parser.add(
        "--rates RATE", "learning rates of AdamW and Muon, instead of tuning them", type=float, nargs=2
    )
    parser.add_argument("--part", choices=("outcome",), help="only train the target, without a forecast")
    options = parser.parse_args()
    results = Results(options.out)
    given = options.rates or [tune(optimizer, results) for optimizer in OPTIMIZERS]
    rates = dict(zip(OPTIMIZERS, given, strict=True))
    outcomes, inside = [], 0
    for seed in options.seed:
        low, high = (math.nan, math.nan) if options.part else measure_forecast(seed, rates, results)
        outcomes.append(measure_outcome(seed, rates, results))
        inside += low <= outcomes[-1] <= high
    last = "" if options.part else f"; {inside} of {len(outcomes)} inside the interval"
    print(f"Muon needs {min(outcomes):.2f} to {max(outcomes):.2f} of AdamW's tokens{last}")


if __name__ == "__main__":
    main()
