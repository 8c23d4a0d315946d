"""The data ledger records what runs were trained on, and so which data is new to the next round."""

import json
import shutil
from dataclasses import replace

import pytest

from modeling.data.corpus import Corpus
from profiles.errors import ProfileError
from profiles.resolve import check
from tasks.continual import replay
from tasks.continual.data import new_data
from tasks.continual.held_out import HeldOut, check_disjoint, check_fraction, held_out_by_hash
from tasks.continual.series import Promoted, ancestors_of, held_out_sets, set_promoted
from tasks.step import Context
from tasks.steps import dataset
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import ledger, runs
from tasks.store.garbage import find_garbage
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
    assert new_data(store, base, first, 16, HeldOut(), ()) is None

    (folder / "b.jsonl").write_bytes(lines(DOCUMENTS[50:100]))
    second = new_data(store, base, DatasetStep(tokenizer).run(Context(wanted, store)), 16, HeldOut(), ())
    repeated = 10 if deduplicate else 0  # documents of b that are also in a
    assert documents_of(second, store) == 50 - repeated
    ledger.record(store, "next", "2" * 32, second, parent="1" * 32)
    ledger.record(store, "rejected", "3" * 32, second, parent="1" * 32)  # a sibling, not an ancestor
    assert ledger.trained_on(store, "2" * 32) > ledger.trained_on(store, "1" * 32)
    assert [entry.run for entry in ledger.lineage(store, "2" * 32)] == ["next", "base"]

    (folder / "c.jsonl").write_bytes(lines(DOCUMENTS[100:140]))
    everything = DatasetStep(tokenizer).run(Context(wanted, store))
    later = Promoted("next", "2" * 32, 1, tokenizer.key, first.key)
    third = new_data(store, later, everything, 16, HeldOut(), ())
    assert documents_of(third, store) == 40
    assert documents_of(new_data(store, base, everything, 16, HeldOut(), ()), store) == 90 - repeated


def test_each_round_holds_out_documents_of_each_source_for_ever(store, tmp_path):
    for name in "one", "other":
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(lines(DOCUMENTS[:50]))
    wanted = profile(files(tmp_path / "one"), files(tmp_path / "other"), validation_fraction=0.3)
    tokenizer = TokenizerStep().run(Context(wanted, store))
    first = DatasetStep(tokenizer).run(Context(wanted, store))
    (tmp_path / "old").mkdir()
    (tmp_path / "old/a.jsonl").write_bytes(lines(DOCUMENTS[100:150]))
    older = profile(files(tmp_path / "old"), files(tmp_path / "one"), validation_fraction=0.3)
    ancestor = DatasetStep(tokenizer).run(Context(older, store))
    # The first run has read the data of its parent again, which started from the weights of another run.
    for run, each, data, identity, parent in (
        ("ancestor", older, ancestor, "8" * 32, None),
        ("parent", wanted, first, "9" * 32, "8" * 32),
        ("base", wanted, first, "1" * 32, "9" * 32),
    ):
        runs.open_run(store, each.model_copy(update={"name": run}), identity, "flow run", {})
        ledger.record(store, run, identity, data, parent, "")
    base = Promoted("base", "1" * 32, 0, tokenizer.key, first.key)
    by_hash = held_out_by_hash(wanted.data)
    assert by_hash == {"one", "other"}

    def new(promoted, number):
        everything = DatasetStep(tokenizer).run(Context(wanted, store))
        found = new_data(store, promoted, everything, 16, held_out_sets(store, "base", promoted), by_hash)
        ledger.record(store, f"base-round-{number}", f"{number + 1}" * 32, found, promoted.identity)
        names = list(Corpus.open(store.artifacts.path(found), "validation").sources)
        contents = dataset.read_file(store, found)
        assert all(each["by_hash"] for each in contents["sources"])
        check_disjoint(store, contents, new_by_hash=False)  # as if their contents had to be compared
        after = replace(promoted, identity=f"{number + 1}" * 32, round=number, held_out=found.key)
        return names, contents, after

    (tmp_path / "one/b.jsonl").write_bytes(lines(DOCUMENTS[50:100]))
    names, _, promoted = new(base, 1)
    assert names == ["first/one", "first/other", "run:ancestor/old", "round-1/one"]
    # Documents that are listed again in another file, also by another source, are held out there too.
    (tmp_path / "other/c.jsonl").write_bytes(lines(DOCUMENTS[20:90]))
    names, contents, _ = new(promoted, 2)
    assert names == ["first/one", "first/other", "run:ancestor/old", "round-1/one", "round-2/other"]
    (history,) = [run for run in replay.history(store, base, first, 16).streams if run.run == "ancestor"]
    assert [run.run for run in replay.history(store, base, first, 16).streams] == ["base", "ancestor"]
    assert (history.shards, history.windows) == (1, (history.tokens - 1) // 16)  # without what base read too

    # Garbage collection keeps what a series descends from. A dataset that is gone is reported like unknown weights.
    set_promoted(store, "base", base)
    store.remove("runs/ancestor")
    assert f"artifacts/dataset/{ancestor.key}" not in {each.name for each in find_garbage(store)[0]}
    entry = store.work_dir / f"ledger/{base.identity}.json"
    recorded = entry.read_bytes()
    entry.write_bytes(b"{}")
    with pytest.raises(ValueError, match=f"{entry.name}: corrupted"):  # the ancestor is unknown
        find_garbage(store)
    entry.unlink()  # or not restored yet
    garbage, notes = find_garbage(store)
    assert f"artifacts/dataset/{ancestor.key}" not in {each.name for each in garbage}
    assert f"no entry for run {base.identity}: all artifacts of kind dataset, tokens are kept" in "\n".join(
        notes
    )
    entry.parent.rename(entry.parent.with_name("elsewhere"))
    entry.parent.symlink_to("not mounted")
    with pytest.raises(ValueError, match=r"ledger: links to .*not mounted, which is missing"):
        find_garbage(store)
    entry.parent.unlink()
    entry.parent.with_name("elsewhere").rename(entry.parent)
    entry.write_bytes(recorded)
    assert ancestors_of(store, base).unknown is None
    for weights, unknown in (("org/model", "org/model"), (None, "ancestor")):  # its profile is gone
        ledger.record(store, "ancestor", "8" * 32, ancestor, weights=weights)
        assert ancestors_of(store, base).unknown == unknown
    ledger.record(store, "ancestor", "8" * 32, ancestor, weights="")
    shutil.rmtree(store.artifacts.path(ancestor))
    assert ancestors_of(store, base).unknown == "ancestor"
    with store.artifacts.publish(DatasetStep.id("round")) as folder:  # which still replays it
        (folder / "corpus.json").write_text(json.dumps({"replay": {"streams": [{"identity": "8" * 32}]}}))
        (folder / "shards.json").write_text("[]")
    replayed = store.artifacts.expect(DatasetStep.id("round"))
    ledger.record(store, "base-round-3", "4" * 32, replayed, base.identity)
    assert ancestors_of(store, replace(base, identity="4" * 32)).unknown is None
    assert held_out_sets(store, "base", base).names == ["first/one", "first/other"]
    assert [run.run for run in replay.history(store, base, first, 16).streams] == ["base"]

    # A source whose documents are not held out by their hash is compared by content.
    wanted = profile(files(tmp_path / "one", use="train"), files(tmp_path / "other"), validation_fraction=0.3)
    trained = dataset.read_file(store, DatasetStep(tokenizer).run(Context(wanted, store)))["train"]
    with pytest.raises(
        ProfileError, match=r"data\.sources: .* lists \d+ documents that the series holds out"
    ):
        check_disjoint(store, {**contents, "train": trained}, new_by_hash=False)
    wanted = wanted.model_copy(
        update={"name": "base", "data": wanted.data.model_copy(update={"validation_fraction": 0.2})}
    )
    with pytest.raises(
        ProfileError, match=r"data\.validation_fraction = 0\.2: the series base holds out 0\.3"
    ):
        check_fraction(store, wanted)


def test_a_missing_or_invalid_entry_is_an_error(store):
    with pytest.raises(ValueError, match="no entry for run 4444"):
        ledger.trained_on(store, "4444")
    assert ledger.trained_on(store, None) == frozenset()
    entry = {"run": "a", "identity": "5555", "parent": None, "dataset": "d", "shards": ["s"]}
    for damaged in ({}, entry | {"parent": ["4444"]}, entry | {"shards": [["s"]]}):
        store.backend.write("ledger/5555.json", json.dumps(damaged).encode())
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
