"""How well does a ladder forecast? `python -m benchmarks.ladder --seed 0`: rungs and a target of tiny's family, in this process.

Eight rungs of three widths forecast a target with eight times the compute of the largest one, before the target is trained.
Prints rungs, forecast, interval, outcome. The model has a vocabulary of 1,024, the data is Python's documentation, read once or
less by the rungs and about twice by the target. Minutes a seed on one core.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from modeling.data.corpus import Corpus, Samples
from modeling.data.records import open_samples
from modeling.scaling.fit import Observation
from modeling.scaling.forecast import forecast
from modeling.scaling.rungs import rungs_of, target_of
from modeling.training.evaluate import Evaluation, evaluate_split
from modeling.training.learning_rate import learning_rate
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from profiles.schema import Profile
from profiles.sections.ladder import Ladder
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store

VOCABULARY, SEQUENCE, BATCH, STEPS = 1024, 128, 8, 1150
VALIDATION_BATCHES = 32  # of the target's, the same for every run
WIDTHS = {24: [3, 6, 12], 48: [0.9, 1.8, 3.0], 72: [0.45, 0.85]}
OVERRIDES = [
    "model.hidden_size=96", "model.intermediate_size=256", "model.num_hidden_layers=3", "model.num_attention_heads=4",
    "model.num_key_value_heads=1", "model.head_dim=24", f"model.vocab_size={VOCABULARY}",
    f"tokenizer.vocabulary_size={VOCABULARY}", "model.parametrization=completep", "model.base_hidden_size=96",
    "model.base_num_hidden_layers=3", "parallel.tensor=1", "cluster.devices_per_node=1", "cluster.threads=1",
    "compile.enabled=false", "train.precision=float32", f"train.sequence_length={SEQUENCE}",
    f"train.global_batch_size={BATCH}", f"train.micro_batch_size={BATCH}", f"train.steps={STEPS}", "train.warmup_steps=60",
    "train.learning_rate=6e-3", "train.minimum_learning_rate=6e-4",
]  # fmt: skip


def describe(seed: int) -> Ladder:
    """The ladder of one seed."""
    rungs = [{"hidden_size": width, "tokens_per_parameter": lengths} for width, lengths in WIDTHS.items()]
    return Ladder.model_validate(
        {
            "name": f"benchmark-{seed}",
            "target": "tiny",
            "overrides": [*OVERRIDES, f"train.seed={seed}"],
            "rung_overrides": ["train.micro_batch_size=1"],
            "rungs": rungs,
            "batch_exponent": 0.5,
        }
    )


def dataset_of(profile: Profile, store: Store) -> Path:
    """The folder of the data set, made if the store lacks it."""
    context = Context(profile, store)
    return store.artifacts.path(DatasetStep(TokenizerStep().run(context)).run(context))


def held_out(profile: Profile, dataset: Path) -> Evaluation:
    """Train in this process; the losses on the first held-out windows."""
    train = profile.train.model_copy(update={"micro_batch_size": profile.train.global_batch_size})
    profile = profile.model_copy(update={"train": train})
    samples = open_samples(profile, dataset, "train")
    sequence, size = train.sequence_length, train.global_batch_size
    validation = Samples(Corpus.open(dataset, "validation"), sequence, None)
    with Trainer(profile) as trainer:
        import torch

        optimizer = make_optimizer(trainer)
        for step in range(1, train.steps + 1):
            optimizer.begin_step(1)
            batch = torch.from_numpy(samples.batch((step - 1) * size, size))
            trainer.forward_backward(batch, 1 / (size * sequence))
            optimizer.step(learning_rate(train, step))
        return evaluate_split(trainer, validation, VALIDATION_BATCHES * BATCH // size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, action="append", required=True)
    parser.add_argument("--store", default="./store")
    options = parser.parse_args()
    for seed in options.seed:
        ladder = describe(seed)
        target = target_of(ladder)
        rungs = rungs_of(ladder, target)
        dataset = dataset_of(target.profile, Store(options.store))
        begun, observations = time.monotonic(), []
        for rung in rungs:
            loss = held_out(rung.profile, dataset).loss
            observations.append(Observation(rung.n, rung.tokens, loss))
            train = rung.profile.train
            print(
                f"  {rung.name:<24} {rung.flops:.3g} FLOPs, {train.steps} × {train.global_batch_size}: {loss:.4f}",
                flush=True,
            )
        found = forecast(observations, target.n, target.tokens, seed)
        low, high = found["interval"]
        print(
            f"seed {seed}: forecast {found['loss']:.4f}, 90% interval {low:.4f} to {high:.4f},",
            end=" ",
            flush=True,
        )
        print(f"{found['extrapolation']:.1f} × the largest rung, noise {found['noise']:.2%}", flush=True)
        outcome = held_out(target.profile, dataset).loss
        inside = "inside" if low <= outcome <= high else "outside"
        error = found["loss"] / outcome - 1
        seconds = time.monotonic() - begun
        print(
            f"seed {seed}: outcome {outcome:.4f}, {inside}; error {error:+.2%}; {seconds:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
