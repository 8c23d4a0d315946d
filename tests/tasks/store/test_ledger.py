"""The data ledger records what runs were trained on, and so which data is new to the next round."""

import json

import pytest

from modeling.data.corpus import Corpus
from profiles.errors import ProfileError
from profiles.resolve import check
from tasks.continual.data import new_data
from tasks.continual.series import Promoted
from tasks.step import Context
from tasks.steps import dataset
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import ledger
from tests.tasks.source_files import files, lines, profile
from tests.tasks.tokenization.tokenizers import DOCUMENTS


def documents_of(corpus, store) -> int:
    entries = json.loads((store.artifacts.path(corpus) / "corpus.json").read_text())["train"]
    return sum(entry["documents"] for entry in entries)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_new_data_is_what_no_ancestor_was_trained_on(store, tmp_path, deduplicate):
    folder = tmp_path / "source"
    folder.mkdir()
    wanted = profile(files(folder), validation_fraction=0, deduplicate=deduplicate)
    (folder / "a.jsonl").write_bytes(lines(DOCUMENTS[:60]))
    tokenizer = TokenizerStep().run(Context(wanted, store))
    first = DatasetStep(tokenizer).run(Context(wanted, store))
    ledger.record(store, "base", "1" * 32, first)
    base = Promoted("base", "1" * 32, 0, tokenizer.key, first.key)
    assert new_data(store, base, first, 16) is None

    (folder / "b.jsonl").write_bytes(lines(DOCUMENTS[50:100]))
    second = new_data(store, base, DatasetStep(tokenizer).run(Context(wanted, store)), 16)
    repeated = 10 if deduplicate else 0  # documents of b that are also in a
    assert documents_of(second, store) == 50 - repeated
    ledger.record(store, "next", "2" * 32, second, parent="1" * 32)
    ledger.record(store, "rejected", "3" * 32, second, parent="1" * 32)  # a sibling, not an ancestor
    assert ledger.trained_on(store, "2" * 32) > ledger.trained_on(store, "1" * 32)
    assert [entry.run for entry in ledger.lineage(store, "2" * 32)] == ["next", "base"]

    (folder / "c.jsonl").write_bytes(lines(DOCUMENTS[100:140]))
    everything = DatasetStep(tokenizer).run(Context(wanted, store))
    third = new_data(store, Promoted("next", "2" * 32, 1, tokenizer.key, first.key), everything, 16)
    assert documents_of(third, store) == 40
    assert documents_of(new_data(store, base, everything, 16), store) == 90 - repeated


def test_sources_of_held_out_text_do_not_depend_on_the_new_data(store, tmp_path):
    for name in "one", "other":
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(lines(DOCUMENTS[:50]))
    wanted = profile(files(tmp_path / "one"), files(tmp_path / "other"), validation_fraction=0.3)
    tokenizer = TokenizerStep().run(Context(wanted, store))
    first = DatasetStep(tokenizer).run(Context(wanted, store))
    ledger.record(store, "base", "1" * 32, first)
    (tmp_path / "one/b.jsonl").write_bytes(lines(DOCUMENTS[50:100]))
    everything = DatasetStep(tokenizer).run(Context(wanted, store))
    second = new_data(store, Promoted("base", "1" * 32, 0, tokenizer.key, first.key), everything, 16)
    held_out, expected = (
        Corpus.open(store.artifacts.path(found), "validation").sources for found in (second, first)
    )
    assert held_out == expected


def test_a_missing_or_invalid_entry_is_an_error(store):
    with pytest.raises(ValueError, match="no entry for run 4444"):
        ledger.trained_on(store, "4444")
    assert ledger.trained_on(store, None) == frozenset()
    store.backend.write("ledger/5555.json", b"{}")
    with pytest.raises(ValueError, match=r"5555\.json: corrupted \(not a ledger entry"):
        ledger.trained_on(store, "5555")


def test_epochs_become_steps_when_the_corpus_is_known(store, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(DOCUMENTS))
    wanted = profile(files(tmp_path / "a.jsonl"), validation_fraction=0.1)
    train = wanted.train.model_copy(update={"steps": None, "epochs": 2, "warmup_steps": 3})
    wanted = wanted.model_copy(update={"train": train})
    check(wanted)
    corpus = DatasetStep(TokenizerStep().run(Context(wanted, store))).run(Context(wanted, store))
    resolved = dataset.with_steps(wanted, corpus).train
    windows = (corpus.summary["tokens"] - 1) // 16
    assert resolved.epochs is None
    batch = resolved.global_batch_size
    assert (resolved.steps - 1) * batch < 2 * windows <= resolved.steps * batch
    late = wanted.model_copy(update={"train": train.model_copy(update={"warmup_steps": 10**6})})
    with pytest.raises(ProfileError, match=r"train\.warmup_steps = 1000000: .*train\.steps"):
        dataset.with_steps(late, corpus)
