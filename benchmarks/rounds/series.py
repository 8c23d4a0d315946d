"""A continual series in this process: data, ledger, replay and trainer, without flows and jobs.

Each model is trained from the weights of another one with a new optimizer, as a round is, and evaluated on all held-out sets.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness.training import BATCH, LENGTH, train, write_profile
from benchmarks.rounds import languages
from modeling.data.records import open_samples
from modeling.training.evaluate import evaluate_sets
from modeling.training.sample import sample_rows
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel.checkpoint import checkpoint
from profiles import resolve
from profiles.schema import Profile, Source
from tasks import keys
from tasks.continual import gates, generated, held_out, replay, series, stand_in
from tasks.continual.data import new_data
from tasks.continual.series import Promoted
from tasks.step import Context
from tasks.steps.dataset import DatasetStep, read_file
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import ledger
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

VOCABULARY = 400
SAMPLED = 512  # most rows of generated text
SMALLER = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
)  # a proxy


class Reptile(NamedTuple):
    """Meta-experience replay's step: every few steps, go back part of the way (arXiv 2508.01908)."""

    every: int
    rate: float  # of the way that is kept


@dataclass(frozen=True)
class Model:
    """A trained model: its weights, and its loss and tokens on each held-out set of the data."""

    weights: Path
    sets: Mapping[str, Mapping[str, float]]

    def losses(self, origin: str) -> dict[str, float]:
        """Loss on old and new text."""
        return gates.losses(self.sets, origin)


class Series:
    """A store with a folder of texts, and the model that is promoted last."""

    name = "languages"

    def __init__(self, folder: Path) -> None:
        self.folder, self.texts = folder, folder / "texts"
        self.texts.mkdir(parents=True)
        (folder / "old").mkdir()
        self.file, self.store = folder / f"{self.name}.yaml", Store(str(folder / "store"))
        write_profile(self.file, [self.texts / "*.jsonl"], VOCABULARY, steps=400, minimum_learning_rate=1e-4)
        self.promoted = Promoted("", "", 0, "", "")

    def profile(self, *overrides: str) -> Profile:
        """The profile of a run."""
        return resolve.load(str(self.file), overrides)

    def begin(self, documents: int) -> Artifact:
        """Make the first run's data, of the old language, with a tokenizer of both; returns its dataset."""
        both = self.folder / "both"
        both.mkdir()
        for language in (languages.OLD, languages.NEW):
            languages.write_texts(both / f"{language}.jsonl", language, 60, 90 + language)
        sources = f"data.sources=[{{kind: files, path: {both}/*.jsonl}}]"
        self.tokenizer = TokenizerStep().run(Context(self.profile(sources), self.store))
        languages.write_texts(self.texts / "00.jsonl", languages.OLD, documents, 1)
        first = self.all_texts()
        identity = keys.digest([self.name, 0])
        self.promoted = Promoted(self.name, identity, 0, self.tokenizer.key, first.key)
        ledger.record(self.store, self.name, identity, first)
        return first

    def add(self, number: int, documents: int, language: int = languages.NEW) -> Artifact:
        """Add texts; returns the dataset of what is new, which holds out text as a round does."""
        languages.write_texts(self.texts / f"{number:02d}.jsonl", language, documents, 1 + number)
        old = series.held_out_sets(self.store, self.name, self.promoted)
        by_hash = held_out.held_out_by_hash(self.profile().data)
        new = new_data(self.store, self.promoted, self.all_texts(), LENGTH, old, by_hash)
        if new is None:
            raise RuntimeError("there is no new data")
        return new

    def with_replay(
        self, new: Artifact, share: float, steps: int, known: replay.History | None = None
    ) -> Artifact:
        """Dataset of a round that replays its history, or other data that is given."""
        if known is None:
            known = replay.history(self.store, self.promoted, new, LENGTH)
        return replay.with_replay(self.store, new, known, share, steps * BATCH, lambda drawn: None)

    def stand_in(self, documents: int) -> replay.History:
        """Other texts of the old language, as a stand-in source."""
        languages.write_texts(self.folder / "old/a.jsonl", languages.OLD, documents, 77)
        source = Source(kind="files", path=str(self.folder / "old/*.jsonl"))
        profile = self.profile()
        settings = profile.continual.model_copy(update={"stand_in": [source]})
        context = Context(profile.model_copy(update={"continual": settings}), self.store)
        made = stand_in.make(context, self.tokenizer)
        if made is None:
            raise RuntimeError("there is no stand-in source")
        return stand_in.history(self.store, made, LENGTH)

    def sampled(self, new: Artifact, model: Model, windows: int) -> replay.History:
        """Text that is sampled from a model."""
        rows, contents = generated.row_count(windows, LENGTH, SAMPLED * LENGTH), read_file(self.store, new)
        with Trainer(self.profile("train.micro_batch_size=128", "train.global_batch_size=128")) as trainer:
            checkpoint.load(model.weights, make_optimizer(trainer), weights_only=True)
            found = sample_rows(trainer, 0, rows, contents["eos"] or 0).numpy().astype(np.int32)
        digest = keys.digest(str(model.weights))
        made = generated.publish_rows(self.store, keys.generated(digest, LENGTH, 0, rows), found, contents)
        return generated.history(digest, [made], LENGTH)

    def promote(self, dataset: Artifact) -> None:
        """Record a round on a dataset, whose successor continues."""
        number = self.promoted.next_round
        name, identity = f"{self.name}-round-{number}", keys.digest([self.name, number])
        ledger.record(self.store, name, identity, dataset, parent=self.promoted.identity)
        self.promoted = replace(
            self.promoted, run=name, identity=identity, round=number, held_out=dataset.key
        )

    def train(
        self,
        name: str,
        dataset: Artifact,
        steps: int,
        start: Model | None = None,
        *overrides: str,
        held_out: Artifact | None = None,
        reptile: Reptile | None = None,
    ) -> Model:
        """Train a model, from the weights of another one if given, and evaluate it on held-out sets."""
        profile = self.profile(f"train.steps={steps}", *overrides)
        samples = open_samples(profile, self.store.artifacts.path(dataset), "train")
        folder = self.folder / "models" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        with Trainer(profile) as trainer:
            optimizer = make_optimizer(trainer)
            if start is not None:
                checkpoint.load(start.weights, optimizer, weights_only=True)
            before = _weights(optimizer)
            for step in train(trainer, optimizer, samples):
                if reptile is not None and step % reptile.every == 0:
                    _go_back(optimizer, before, reptile.rate)
                    before = _weights(optimizer)
            checkpoint.save(folder, optimizer, {"step": steps})
            return Model(folder, self._evaluate(trainer, held_out or dataset))

    def evaluate(self, model: Model, dataset: Artifact, *overrides: str) -> Model:
        """The same model, evaluated on the held-out sets of a dataset."""
        with Trainer(self.profile(*overrides)) as trainer:
            checkpoint.load(model.weights, make_optimizer(trainer), weights_only=True)
            return Model(model.weights, self._evaluate(trainer, dataset))

    def _evaluate(self, trainer: Trainer, dataset: Artifact) -> Mapping[str, Mapping[str, float]]:
        corpus = self.store.artifacts.path(dataset)
        return evaluate_sets(trainer, open_samples(trainer.profile, corpus, "validation")).sets

    def all_texts(self) -> Artifact:
        """Dataset of all texts, for one run over them."""
        return DatasetStep(self.tokenizer).run(Context(self.profile(), self.store))


def _weights(optimizer: Any) -> list[torch.Tensor]:
    """Copies of the optimizer's weights."""
    return [bucket.master.clone() for bucket in optimizer.buckets]


@torch.no_grad()
def _go_back(optimizer: Any, before: list[torch.Tensor], rate: float) -> None:
    """Keep only part of the way from earlier weights."""
    for bucket, earlier in zip(optimizer.buckets, before, strict=True):
        bucket.master.copy_(torch.lerp(earlier, bucket.master, rate))
    optimizer.gather_parameters()
