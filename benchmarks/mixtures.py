"""Compare proposed mixture weights with a grid search on synthetic sources: --seed 0

One source repeats a few sentences and is learned at once; one is a Markov chain and takes long; one consists of random words,
from which nothing can be learned, but which make up four fifths of the text. From twelve proxies, weights are proposed for the
mean of the three held-out losses. A run with these weights is compared with the best of a grid of mixtures. Everything runs in
this process; each seed takes ten minutes on one core.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from benchmarks.harness.training import train_and_evaluate, write_profile
from modeling.data.corpus import Corpus, Samples
from modeling.data.records import open_samples
from modeling.scaling import mixture as laws
from modeling.scaling.proxies import (
    Proxy,
    least_weight,
    mixture_target,
    proposed,
    proxies_of,
    training_sources,
)
from modeling.training.evaluate import Evaluation
from profiles.experiments import Mixture
from profiles.schema import Profile
from tasks.experiments.mixtures import shares_of, source_tokens
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store

VOCABULARY, STEPS, GRID = 320, 200, 0.2
DOCUMENTS = {"sentences": 300, "chain": 300, "random": 2400}
WORDS = 40  # of a document
VALIDATION = 256  # windows of the held-out split that are evaluated


def write_sources(folder: Path) -> list[Path]:
    """The texts of the three sources, the same for every seed."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnop", k=3)) for _ in range(150)]
    sentences = [" ".join(chance.choices(words, k=8)) for _ in range(6)]
    following = {word: chance.choices(words, k=3) for word in words}

    def chain() -> list[str]:
        found = [chance.choice(words)]
        while len(found) < WORDS:
            found.append(chance.choice(following[found[-1]]))
        return found

    make: dict[str, Callable[[], list[str]]] = {
        "sentences": lambda: chance.choices(sentences, k=WORDS // 8),
        "chain": chain,
        "random": lambda: chance.choices(words, k=WORDS),
    }
    paths = []
    for name, count in DOCUMENTS.items():
        paths.append(folder / f"{name}.jsonl")
        lines = (json.dumps({"text": f"{name}: {' '.join(make[name]())}"}) for _ in range(count))
        paths[-1].write_text("\n".join(lines))
    return paths


def describe(folder: Path, seed: int) -> Mixture:
    """The mixture for one seed; its proxies are as large as the target."""
    target = folder / "planted.yaml"
    write_profile(target, write_sources(folder), VOCABULARY, steps=STEPS, minimum_learning_rate=6e-4)
    return Mixture.model_validate(
        {
            "name": f"planted-{seed}",
            "target": str(target),
            "overrides": [f"train.seed={seed}"],
            "proxy": {"hidden_size": 64, "tokens_per_parameter": 1.0},
            "objective": dict.fromkeys(DOCUMENTS, 1.0),
        }
    )


def build_dataset(profile: Profile, store: Store) -> Path:
    """The folder of the profile's dataset, built unless it is in the store."""
    context = Context(profile, store)
    return store.artifacts.path(DatasetStep(TokenizerStep().run(context)).run(context))


def train_on_dataset(profile: Profile, dataset: Path) -> Evaluation:
    """Train on a dataset, with one microbatch per step, and evaluate on its held-out split."""
    train = profile.train.model_copy(update={"micro_batch_size": profile.train.global_batch_size})
    profile = profile.model_copy(update={"train": train})
    validation = Samples(Corpus.open(dataset, "validation"), train.sequence_length, None)
    batches = VALIDATION // train.global_batch_size
    return train_and_evaluate(profile, open_samples(profile, dataset, "train"), validation, batches)


def main() -> None:
    parser = make_parser(__doc__, out="mixtures")
    parser.add_argument("--seed", type=int, action="append", required=True, help="repeatable")
    options = parser.parse_args()
    for seed in options.seed:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), seed, Results(options.out))


def measure(folder: Path, seed: int, results: Results) -> None:
    """Propose weights for one seed, train with them, and compare with the grid."""
    mixture, store = describe(folder, seed), Store(str(folder / "store"))
    target = mixture_target(mixture)
    proxies = proxies_of(mixture, target)
    sources = training_sources(target.profile)
    begun = time.monotonic()
    dataset = build_dataset(proxies[0].run.profile, store)
    natural = shares_of(source_tokens(store, dataset.name, target.profile), sources)

    def train(proxy: Proxy) -> np.ndarray:
        profile = proxy.run.profile
        found = train_on_dataset(profile, build_dataset(profile, store)).sources
        losses = np.array([found[name] for name in sources])
        weights = " ".join(f"{weight:5.1%}" for weight in (proxy.weights or natural).values())
        text = (
            f"  {proxy.name:<20} {weights}: {' '.join(f'{x:.4f}' for x in losses)}, mean {losses.mean():.4f}"
        )
        results.add(proxy.name, text, seed=seed, weights=proxy.weights or natural, losses=losses.tolist())
        return losses

    losses = np.array([train(proxy) for proxy in proxies])
    weights = np.array([list((proxy.weights or natural).values()) for proxy in proxies])
    fitted = laws.fit(weights, losses, seed)
    least = least_weight(mixture, len(sources))
    chosen, _ = laws.propose(
        fitted, np.ones(len(sources)), np.full(len(sources), least), np.ones(len(sources))
    )
    low, high = np.quantile(fitted.outcomes(chosen, seed).mean(1), [0.05, 0.95])
    forecast = fitted.losses(chosen).mean()
    outcome = train(
        proposed(mixture, target, dict(zip(sources, chosen.tolist(), strict=True)), "proposed")
    ).mean()
    best = np.inf
    for row in itertools.product(np.arange(GRID / 2, 1, GRID), repeat=2):
        if sum(row) < 1:
            grid = dict(zip(sources, [*row, 1 - sum(row)], strict=True))
            best = min(best, train(proposed(mixture, target, grid, "grid")).mean())
    inside = "inside" if low <= outcome <= high else "outside"
    text = (
        f"seed {seed}: natural {losses[0].mean():.4f}, proposed {outcome:.4f}, best of the grid {best:.4f}: "
        f"{outcome / best - 1:+.2%}; forecast {forecast:.4f}, {low:.4f} to {high:.4f}, {inside}; "
        f"{time.monotonic() - begun:.0f} s"
    )
    results.add("outcome", text, seed=seed, natural=losses[0].mean(), proposed=outcome, best=best)


if __name__ == "__main__":
    main()
