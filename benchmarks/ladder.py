"""Measure how well a ladder forecasts: `python -m benchmarks.ladder --seed 0 --seed 1`

Eight rungs of three widths forecast a target with more than eight times the compute of the largest one, before the target is
trained, all in this process. The models are of tiny's family with one layer. The data is synthetic and never repeats: a Markov
chain of words, whose logits are a sum of components whose sizes fall as a power of their index. The expected loss of the best
possible model is known: it is the chain's entropy. `naive` is the error if the best rung's loss were the forecast. Each seed
takes about a minute of CPU time.
"""

from __future__ import annotations

import time
from functools import lru_cache

import numpy as np

from benchmarks.harness import rungs
from benchmarks.harness.results import Results
from benchmarks.harness.rungs import SEQUENCE, VOCABULARY
from benchmarks.harness.timing import make_parser
from benchmarks.harness.training import train_and_evaluate
from modeling.scaling.fit import Observation
from modeling.scaling.forecast import forecast
from modeling.scaling.planned_run import rungs_of, target_of
from profiles.experiments import Ladder

STRENGTH = 2.0  # standard deviation of the chain's logits
DECAY = 0.5  # component i of the logits has the size i^-DECAY
VALIDATION, VALIDATION_SEED = 2048, 10**6  # held-out windows, the same for every run
BLOCK = 256  # windows that are drawn together


@lru_cache
def _chain() -> np.ndarray:
    """Cumulative probabilities (words, next words) of the chain, the same for every seed."""
    chance = np.random.default_rng(0)
    before, after = chance.standard_normal((2, VOCABULARY, VOCABULARY))
    sizes = np.arange(1, VOCABULARY + 1) ** -DECAY
    logits = STRENGTH * (before * (sizes / np.linalg.norm(sizes))) @ after.T
    chances = np.exp(logits - logits.max(1, keepdims=True))
    shares: np.ndarray = chances / chances.sum(1, keepdims=True)
    return shares.cumsum(1)


class ChainSamples:
    """Windows of the chain; window i is a function of (seed, i)."""

    def __init__(self, seed: int, windows: int = 1 << 40) -> None:
        self.seed, self.windows = seed, windows
        self._block = lru_cache(2)(self._draw)

    def _draw(self, number: int) -> np.ndarray:
        table = _chain()
        offsets = np.arange(VOCABULARY)
        flat = (table / table[:, -1:] + offsets[:, None]).ravel()  # increasing: one search for all rows
        chance = np.random.default_rng([self.seed, number])
        words = np.empty((BLOCK, SEQUENCE + 9), np.int64)
        words[:, 0] = chance.integers(0, VOCABULARY, BLOCK)
        for t in range(1, words.shape[1]):
            row = words[:, t - 1]
            found = np.searchsorted(flat, row + chance.random(BLOCK), side="right") - row * VOCABULARY
            words[:, t] = found.clip(0, VOCABULARY - 1)
        return words[:, 8:]  # the first words are drawn from no context

    def batch(self, first: int, count: int) -> np.ndarray:
        """Windows [first, first + count), each of one token more than the sequence length."""
        numbers = range(first, first + count)
        return np.stack([self._block(number // BLOCK)[number % BLOCK] for number in numbers])


def entropy() -> float:
    """Expected loss of the best possible model on the held-out windows, in nats."""
    chances = np.diff(_chain(), axis=1, prepend=0)
    entropies = -(chances * np.log(chances + 1e-300)).sum(1)
    return float(entropies[ChainSamples(VALIDATION_SEED).batch(0, VALIDATION)[:, :-1]].mean())


def describe(seed: int) -> Ladder:
    """The ladder of one seed."""
    return rungs.ladder(f"benchmark-{seed}", f"train.seed={seed}")


def measure(seed: int, results: Results) -> tuple[bool, bool]:
    """Forecast and train a seed's target; returns whether error ≤ 1%, and whether the interval holds."""
    ladder = describe(seed)
    target = target_of(ladder)
    samples, validation = ChainSamples(seed), ChainSamples(VALIDATION_SEED, VALIDATION)
    begun, observations = time.process_time(), []
    for rung in rungs_of(ladder, target):
        loss = train_and_evaluate(rung.profile, samples, validation).loss
        observations.append(Observation(rung.n, rung.tokens, loss))
        text = f"  {rung.name:<24} {rung.flops:.3g} FLOPs, {rung.profile.train.steps} steps: {loss:.4f}"
        results.add(rung.name, text, seed=seed, loss=loss)
    found = forecast(observations, target.n, target.tokens, seed)
    low, high = found["interval"]
    beyond = f"{found['extrapolation']:.1f} × the largest rung, noise {found['noise']:.2%}"
    text = f"seed {seed}: forecast {found['loss']:.4f}, 90% interval {low:.4f} to {high:.4f}, {beyond}"
    results.add("forecast", text, seed=seed, loss=found["loss"], interval=[low, high])
    outcome = train_and_evaluate(target.profile, samples, validation).loss
    error, naive = (loss / outcome - 1 for loss in (found["loss"], min(point.loss for point in observations)))
    inside = low <= outcome <= high
    text = (
        f"seed {seed}: outcome {outcome:.4f}, {'inside' if inside else 'outside'}; error {error:+.2%}, naive {naive:+.2%}; "
        f"{time.process_time() - begun:.0f} s of CPU time"
    )
    results.add("outcome", text, seed=seed, loss=outcome, error=error, naive=naive)
    return abs(error) <= 0.01, inside


def main() -> None:
    parser = make_parser(__doc__, out="ladder")
    parser.add_argument("--seed", type=int, action="append", required=True, help="repeatable")
    options = parser.parse_args()
    print(f"entropy of the source: {entropy():.4f} nats a word", flush=True)
    results = Results(options.out)
    close, inside = zip(*(measure(seed, results) for seed in options.seed), strict=True)
    print(f"{sum(close)} of {len(close)} within 1%, {sum(inside)} inside the interval")


if __name__ == "__main__":
    main()
