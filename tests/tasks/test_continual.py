"""The data of a continual series' rounds."""

import json

import pytest

from modeling.data.corpus import Corpus
from profiles.errors import ProfileError
from profiles.resolve import load
from tasks.continual.data import new_data
from tasks.continual.schedule import with_shortened_schedule
from tasks.continual.series import Promoted, latest_step
from tasks.store import ledger
from tasks.store.artifacts import Artifact
from tasks.store.store import Store
from tests.profiles.pair import PAIR


def publish(
    store: Store, key: str, shards: dict[str, int], blend: list[tuple[float, int]] | None
) -> Artifact:
    """Publish a dataset: tokens of each shard by key, and weight and number of shards of each source."""
    contents = {
        "format": 1,
        "vocabulary_size": 300,
        "eos": 0,
        "train": [{"path": f"/{name}", "tokens": tokens} for name, tokens in shards.items()],
        "validation": [],
        "blend": blend and [{"weight": weight, "shards": count} for weight, count in blend],
    }
    with store.artifacts.publish("dataset", key) as folder:
        (folder / "corpus.json").write_text(json.dumps(contents))
        (folder / "shards.json").write_text(json.dumps([*shards]))
    return store.artifacts.expect("dataset", key)


def test_round_whose_promoted_model_has_no_checkpoint_is_rejected(store):
    with pytest.raises(
        ProfileError, match=r"name = nightly: the promoted model has no checkpoint in .*nightly/checkpoints"
    ):
        latest_step(store, Promoted("nightly", "one", 0, "tokenizer", "dataset"))


def test_new_data_is_drawn_by_the_weights_of_its_sources(store):
    old = publish(store, "old", {"a": 40, "b": 40, "c": 40}, None)
    ledger.record(store, "nightly", "one", old)
    promoted = Promoted("nightly", "one", 0, "tokenizer", old.key)
    everything = {"a": 40, "a2": 50, "a3": 50, "b": 40, "b2": 16, "c": 40, "c2": 30}
    blend = [(3, 3), (2, 2), (1, 2)]
    new = new_data(store, promoted, publish(store, "blended", everything, blend), 16)
    corpus = Corpus.open(store.artifacts.path(new), "train")
    # Source 1 waits for more than the 16 tokens of b2, which would be no sample.
    assert [tuple(stream) for stream in corpus.streams] == [(3, 0, 100, 0), (1, 100, 30, 2)]
    assert json.loads((store.artifacts.path(new) / "shards.json").read_text()) == ["a2", "a3", "c2"]

    new = new_data(store, promoted, publish(store, "plain", everything, None), 16)
    assert Corpus.open(store.artifacts.path(new), "train").streams == [(1, 0, 146, 0)]

    sources = "[{kind: python-docs, weight: 3}, {kind: files, path: a, weight: 1}]"
    changes = ("data.schedule=[{step: 280, weights: [0, 1]}]", "train.epochs=1", "train.steps=null")
    round_profile = with_shortened_schedule(load(PAIR, [f"data.sources={sources}", *changes]), new)
    assert round_profile.data.schedule == []
