"""The data of a continual series' rounds."""

import json
import logging
import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from modeling.data.corpus import Corpus, Samples
from modeling.data.records import open_samples
from modeling.training.learning_rate import learning_rate
from profiles import resolve
from profiles.errors import ProfileError
from profiles.resolve import load
from profiles.schema import Continual, Source
from tasks.continual import generated, replay, schedule, stand_in
from tasks.continual.data import new_data
from tasks.continual.held_out import HeldOut
from tasks.continual.proxy_data import ProxyData
from tasks.continual.restore import restore, restore_held_out
from tasks.continual.series import (
    Promoted,
    last_alert,
    latest_step,
    record_not_promoted,
    start_step,
)
from tasks.step import Context
from tasks.steps.dataset import DatasetStep, read_file
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store
from tests.profiles.pair import PAIR
from tests.tasks.source_files import files, lines, profile
from tests.tasks.tokenization.tokenizers import DOCUMENTS


def publish(
    store: Store, key: str, shards: dict[str, int], blend: list[tuple[float, int]] | None
) -> Artifact:
    """Publish a dataset: tokens of each shard by key, and weight and number of shards of each source."""
    contents = {
        "format": 1,
        "vocabulary_size": 300,
        "eos": 0,
        "sequence_length": 16,
        "train": [{"path": f"/{name}", "tokens": tokens} for name, tokens in shards.items()],
        "validation": [],
        "blend": blend and [{"weight": weight, "shards": count} for weight, count in blend],
    }
    with store.artifacts.publish(ArtifactId("dataset", key)) as folder:
        (folder / "corpus.json").write_text(json.dumps(contents))
        (folder / "shards.json").write_text(json.dumps([*shards]))
    return store.artifacts.expect(ArtifactId("dataset", key))


def test_round_whose_promoted_model_has_no_checkpoint_is_rejected(store):
    with pytest.raises(
        ProfileError, match=r"name = nightly: the promoted model has no checkpoint in .*nightly/checkpoints"
    ):
        latest_step(store, Promoted("nightly", "one", 0, "tokenizer", "dataset"))


def test_alert_of_a_round_that_was_not_promoted_is_recorded(store):
    assert last_alert(store, "nightly-round-3") == ""
    record_not_promoted(store, "nightly-round-3", "digest")
    assert last_alert(store, "nightly-round-3") == "digest"


def test_round_of_a_trunk_is_constant_then_decays_and_continues_before_the_decay(store):
    new = publish(store, "new", {"a": 16 * 90 + 1}, None)
    new = replace(new, summary={"tokens": 16 * 90 + 1})
    settings = ("continual.schedule=trunk", "train.epochs=1", "train.steps=null", "train.sequence_length=16")
    batches = ("train.global_batch_size=4", "checkpoint.every=10")
    trunk = schedule.of_round(load(PAIR, [*settings, *batches, "train.schedule=constant"]), new, 0.1)
    # 100 samples are 25 steps, and 27 with a checkpoint at the end of three equal intervals.
    assert (trunk.train.steps, trunk.train.constant_steps, trunk.train.warmup_steps) == (27 + 5, 27, 0)
    assert (trunk.checkpoint.every, trunk.checkpoint.keep_every) == (9, 27)
    rates = [learning_rate(trunk.train, step) for step in range(1, 33)]
    assert {*rates[:27]} == {trunk.train.learning_rate}
    assert rates[26] > rates[27] > rates[31] == pytest.approx(trunk.train.minimum_learning_rate)

    promoted = Promoted("nightly-round-1", "one", 1, "tokenizer", "dataset")
    profile = trunk.model_copy(update={"name": promoted.run})
    runs.open_run(store, profile, promoted.identity, "flow run", {})
    run = store.run_folder(promoted.run)
    for step in (18, 27, 32):
        run.write(f"checkpoints/step_{step}/complete.json", json.dumps({"step": step}).encode())
    assert start_step(store, promoted, trunk=True) == 27
    assert start_step(store, promoted, trunk=False) == 32
    decayed = profile.model_copy(update={"train": profile.train.model_copy(update={"constant_steps": 0})})
    run.write("profile.yaml", resolve.dump(decayed).encode())
    with pytest.raises(
        ProfileError, match="from before its learning rate decays, and it has none; train the first"
    ):
        start_step(store, promoted, trunk=True)
    for key, value in (("learning_rate", "0.5"), ("optimizer", "muon")):
        other = load(PAIR, ["continual.schedule=trunk", f"train.{key}={value}"])
        with pytest.raises(
            ProfileError, match=rf"train\.{key} = {value}: is not that of nightly-round-1, whose"
        ):
            schedule.check_trunk(other, profile)


def test_new_data_is_drawn_by_the_weights_of_its_sources(store):
    old = publish(store, "old", {"a": 40, "b": 40, "c": 40}, None)
    ledger.record(store, "nightly", "one", old)
    promoted = Promoted("nightly", "one", 0, "tokenizer", old.key)
    everything = {"a": 40, "a2": 50, "a3": 50, "b": 40, "b2": 16, "c": 40, "c2": 30}
    blend = [(3, 3), (2, 2), (1, 2)]
    new = new_data(store, promoted, publish(store, "blended", everything, blend), 16, HeldOut(), ())
    corpus = Corpus.open(store.artifacts.path(new), "train")
    # Source 1 waits for more than the 16 tokens of b2, which would be no sample.
    assert [tuple(stream) for stream in corpus.streams] == [(3, 0, 100, 0), (1, 100, 30, 2)]
    assert json.loads((store.artifacts.path(new) / "shards.json").read_text()) == ["a2", "a3", "c2"]

    new = new_data(store, promoted, publish(store, "plain", everything, None), 16, HeldOut(), ())
    assert Corpus.open(store.artifacts.path(new), "train").streams == [(1, 0, 146, 0)]

    sources = "[{kind: python-docs, weight: 3}, {kind: files, path: a, weight: 1}]"
    changes = ("data.schedule=[{step: 280, weights: [0, 1]}]", "train.epochs=1", "train.steps=null")
    round_profile = schedule.with_shortened_schedule(load(PAIR, [f"data.sources={sources}", *changes]), new)
    assert round_profile.data.schedule == []


def test_round_replays_each_earlier_window_once_and_restores_missing_shards(store, tmp_path, caplog):
    folder = tmp_path / "source"
    folder.mkdir()
    wanted = profile(files(folder), validation_fraction=0)
    (folder / "a.jsonl").write_bytes(lines(DOCUMENTS[:60]))
    tokenizer = TokenizerStep().run(Context(wanted, store))
    context = Context(wanted, store)
    first = DatasetStep(tokenizer).run(context)
    base = Promoted("tiny", "1" * 32, 0, tokenizer.key, first.key)
    inputs = {"tokenizer": tokenizer.key, "dataset": first.key, "checkpoint": None}
    runs.open_run(store, wanted, base.identity, "flow run", inputs)
    store.run_folder("tiny").write("lock.json", context.inputs.lockfile.to_bytes())
    ledger.record(store, "tiny", base.identity, first)

    (folder / "b.jsonl").write_bytes(lines(DOCUMENTS[60:90]))
    now = Context(wanted, store)
    new = new_data(store, base, DatasetStep(tokenizer).run(now), 16, HeldOut(), ())
    known = replay.history(store, base, new, 16)
    windows = known.streams[0].windows

    def mixed(share: float, samples: int, known=known):
        restoring = partial(restore, now, tokenizer)
        return replay.with_replay(store, new, known, share, samples, restoring)

    round_one = mixed(0.25, 400)
    assert json.loads((store.artifacts.path(round_one) / "shards.json").read_text()) == ledger_of(new, store)
    samples = Samples(Corpus.open(store.artifacts.path(round_one), "train"), 16, seed=7)
    boundary = new.summary["tokens"]
    starts = [start for start in samples.window_starts(np.arange(400)).tolist() if start >= boundary]
    assert len(starts) == 100 < windows
    earlier = Samples(Corpus.open(store.artifacts.path(first), "train"), 16, seed=7)
    text = {tuple(row) for row in earlier.batch(0, windows).tolist()}
    rows = samples.batch(0, 400)[samples.window_starts(np.arange(400)) >= boundary].tolist()
    assert {tuple(row) for row in rows} <= text
    # Not the order in which the first run reads it.
    assert rows[:5] != earlier.batch(0, 5).tolist()

    # The next round continues there, and replays the data of the round before too.
    ledger.record(store, "tiny-round-1", "2" * 32, round_one, parent=base.identity)
    after = replay.history(store, replace(base, run="tiny-round-1", identity="2" * 32), new, 16)
    assert [(stream.run, stream.begin) for stream in after.streams] == [("tiny-round-1", 0), ("tiny", 100)]
    # Of a round that ended early, or skipped samples of steps that were rolled back, what it has read counts.
    run = store.run_folder("tiny-round-1")
    for left_out, read in (([], 200), ([[0, 40], [196, 200]], 244)):
        marker = json.dumps({"step": 50, "left_out": left_out})
        run.write("checkpoints/step_50/complete.json", marker.encode())
        assert replay.samples_read(run, steps=50, batch=4) == read
        ledger.record_samples(store, "2" * 32, read)
        shorter = replay.history(store, replace(base, run=run.name, identity="2" * 32), new, 16)
        assert [stream.begin for stream in shorter.streams] == [0, read // 4]
    third = Samples(Corpus.open(store.artifacts.path(mixed(0.5, 2 * windows, after)), "train"), 16, seed=7)
    again = [start for start in third.window_starts(np.arange(windows)).tolist() if start >= boundary]
    assert len(set(again)) == len(again)

    store.run_folder("tiny").move_aside()  # replaced, but still in the store
    shard = store.artifacts.path(Artifact(ArtifactId("tokens", first_shard(first, store))))
    for expected in ("tokenizing them again", None):
        shutil.rmtree(shard)
        if expected is None:
            (folder / "a.jsonl").unlink()
            with pytest.raises(
                ProfileError, match=r"continual.replay: .*tiny read.*a\.jsonl.*restore the source"
            ):
                mixed(0.3, 400)
            continue
        caplog.set_level(logging.INFO)
        mixed(0.2, 400)
        assert expected in caplog.text
        assert shard.exists()
        shutil.rmtree(shard)  # held-out text is in the same shards
        entries = json.loads((store.artifacts.path(new) / "corpus.json").read_text())["validation"]
        entries += [{"path": f"tokens/{shard.name}/validation", "tokens": 9}]
        restore_held_out(now, tokenizer, "2" * 32, entries)
        assert shard.exists()
        with pytest.raises(ProfileError, match=r"shards that tiny-round-1 read.*\(nowhere\)"):
            restore_held_out(now, tokenizer, "2" * 32, [{"path": "tokens/nowhere/validation", "tokens": 9}])


def test_proxies_are_reused_only_for_similar_data_of_the_same_series(store):
    old = publish(store, "old", {"a": 40}, None)
    ledger.record(store, "nightly", "one", old)
    ledger.record(store, "nightly-round-1", "two", old, parent="one")
    ledger.record(store, "replaced", "three", old)
    known = ProxyData("one", "tokenizer", "new", "history", "round-1", {"wiki": 0.7, "code": 0.3}, 1000, 5000)
    later = replace(known, base="two", new="other", new_tokens=1900, history_tokens=6000)
    assert known.why_not(store, later) is None
    for changes, reason in (
        ({"tokenizer": "another"}, "the series has started anew"),
        ({"base": "three"}, "the series has started anew"),
        ({"sources": {"wiki": 0.7, "law": 0.3}}, r"other sources \(code, law\)"),
        ({"sources": {"wiki": 0.5, "code": 0.5}}, "source wiki is 50% of the new data, and was 70%"),
        ({"new_tokens": 2001}, "the new data has 2,001 tokens, and had 1,000"),
        ({"history_tokens": 2000}, "the history has 2,000 tokens, and had 5,000"),
    ):
        assert re.search(reason, known.why_not(store, replace(later, **changes)) or "")


def test_rounds_of_records_replay_each_earlier_sample_once(store, tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    texts = profile(files(folder))
    (folder / "texts.jsonl").write_bytes(lines(DOCUMENTS[:60]))
    tokenizer = TokenizerStep().run(Context(texts, store))
    (folder / "texts.jsonl").unlink()

    def write(name: str, numbers: range) -> None:
        found = [{"prompt": f"{i}? ", "completion": f"it is {i}" + " so" * (i % 7)} for i in numbers]
        (folder / name).write_text("".join(f"{json.dumps(each)}\n" for each in found))

    records = ["objective.kind=sft", "train.sequence_length=64", "data.validation_fraction=0.2"]
    wanted = load("tiny", [f"data.sources={json.dumps([files(folder)])}", *records])
    write("a.jsonl", range(200))
    first = DatasetStep(tokenizer).run(Context(wanted, store))
    base = Promoted("tiny", "1" * 32, 0, tokenizer.key, first.key)
    ledger.record(store, base.run, base.identity, first)
    write("b.jsonl", range(200, 400))
    everything = DatasetStep(tokenizer).run(Context(wanted, store))
    old = HeldOut.from_sources("first", read_file(store, first), {"records"})
    new = new_data(store, base, everything, 64, old, {"records"}, wanted)

    def opened(dataset: Artifact, split: str = "train", **options):
        return open_samples(wanted, store.artifacts.path(dataset), split, **options)

    # Packed by set, so that each set's loss is of its own records.
    sets = opened(new, "validation").by_source()
    assert [*sets] == ["first/records", "round-1/records"]
    sizes = [int(part.sizes(0, part.windows).sum()) for part in sets.values()]
    entries = read_file(store, new)["validation"]
    assert sizes == [entry["documents"] for entry in entries]
    assert opened(new).windows == new.summary["samples"]
    known = replay.history(store, base, new, 64)
    (stream,) = known.streams
    assert stream.windows == first.summary["samples"]
    drawn: list = []
    count = 2 * stream.windows
    mixed = replay.with_replay(store, new, known, 0.5, count, drawn.extend)
    assert [entry for _, entry in drawn] == read_file(store, first)["train"]
    earlier = {tuple(row) for row in opened(first).batch(0, stream.windows).tolist()}
    fresh = {tuple(row) for row in opened(new).batch(0, new.summary["samples"]).tolist()}
    rows = [tuple(row) for row in opened(mixed).batch(0, count).tolist()]
    replayed = [row for row in rows if row not in fresh]
    assert sorted(replayed) == sorted(earlier)
    assert len(rows) == 2 * len(replayed)
    ledger.record(store, "tiny-round-1", "2" * 32, mixed, parent=base.identity)
    after = replay.history(store, replace(base, run="tiny-round-1", identity="2" * 32), new, 64)
    windows = [(stream.windows, stream.begin) for stream in after.streams]
    assert windows == [(new.summary["samples"], 0), (stream.windows, stream.windows)]
    again = replay.with_replay(store, new, after, 0.9, 200, drawn.extend)
    rows = [tuple(row) for row in opened(again).batch(0, 200).tolist()]
    assert {*rows} <= earlier | fresh
    assert len(earlier & {*rows}) > 1 < len(fresh & {*rows})


def test_stand_in_sources_are_pinned_and_replayed_like_history(store, tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(lines(DOCUMENTS[:60]))
    settings = Continual(stand_in=[Source(kind="files", path=str(tmp_path / "old"))])
    wanted = profile(files(tmp_path / "new"), validation_fraction=0.2)
    wanted = wanted.model_copy(update={"continual": settings})
    context = Context(wanted, store)
    tokenizer = TokenizerStep().run(context)
    new = DatasetStep(tokenizer).run(context)
    made = stand_in.make(context, tokenizer)
    known = stand_in.history(store, made, 16)
    mixed = replay.with_replay(store, new, known + known, 0.5, 100, lambda drawn: None)
    assert replay.share_of(store, mixed) == 0.5
    assert mixed.summary["replayed_samples"] == 50
    (tmp_path / "old/b.jsonl").write_bytes(lines(DOCUMENTS[60:]))
    gone = {name: str(tmp_path / "gone/runs/base/export") for name in ("source", "from_")}
    models = {"tokenizer": "source", "init": "from_"}
    later = {each: getattr(wanted, each).model_copy(update={key: gone[key]}) for each, key in models.items()}
    assert stand_in.make(Context(wanted.model_copy(update=later), store), tokenizer) == made
    missing = Continual(stand_in=[Source(kind="files", path=str(tmp_path / "nowhere"))])
    with pytest.raises(ProfileError, match=r"continual\.stand_in\.0\.path"):
        stand_in.make(Context(wanted.model_copy(update={"continual": missing}), store), tokenizer)


def ledger_of(artifact: Artifact, store: Store) -> list[str]:
    return json.loads((store.artifacts.path(artifact) / "shards.json").read_text())


def first_shard(artifact: Artifact, store: Store) -> str:
    corpus = json.loads((store.artifacts.path(artifact) / "corpus.json").read_text())
    return corpus["train"][0]["path"].split("/")[1]


def test_generated_rows_are_documents_in_shards_of_a_power_of_two(store):
    assert [generated.row_count(needed, 16, most) for needed, most in ((8, None), (8, 64), (0, None))] == [
        16,
        4,
        2,
    ]
    assert generated.shards(8192 + 5) == [(0, 4096), (4096, 4096), (8192, 5)]
    rows = np.array([[5, 0, 6, 7], [8, 9, 9, 0]])
    assert generated.document_lengths(rows, 0).tolist() == [2, 2, 4]
    assert generated.document_lengths(rows, None).tolist() == [4, 4]
    made = [Artifact(ArtifactId("tokens", key), summary={"tokens": 64, "documents": 1}) for key in "ab"]
    known = generated.history("model", made, 16)
    (stream,) = known.streams
    assert (stream.windows, stream.left, len(known.parts[0].shards)) == (7, 7, 2)
    assert not known.without_generated().streams
