"""Continual pretraining: trains only on new data, never promotes a worse model, one round at a time."""

import json
import logging
import math
import os
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from prefect.states import Completed
from rich.console import Console

from profiles.errors import ProfileError
from profiles.resolve import load
from tasks.store import ledger, runs
from tasks.store.store import Store
from tests import s3
from tests.flows.micro import PROFILE, losses, shown, training_rows
from tests.forked_jobs import forked_jobs

EPOCH = ("train.steps=null", "train.epochs=1")
ROUND = ("train.steps=8", "train.warmup_steps=3", "evaluate.every=0")

SPOILT = """
import torch

def loss(logits, targets):
    total = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total if torch.is_grad_enabled() else total * float("nan")
"""


def write_texts(path, seed: int) -> None:
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 6))) for _ in range(60)]
    chance = random.Random(seed)
    lines = (json.dumps({"text": " ".join(chance.choices(words, k=40))}) for _ in range(150))
    path.write_text("\n".join(lines))


def write_profile(folder: Path) -> tuple[Path, Path]:
    """Write the profile `nightly` and a folder of texts with one file; returns both paths."""
    texts, path = folder / "texts", folder / "nightly.yaml"
    texts.mkdir()
    write_texts(texts / "0.jsonl", 1)
    data = {"sources": [{"kind": "files", "path": str(texts / "*.jsonl")}], "validation_fraction": 0.1}
    path.write_text(yaml.safe_dump({**PROFILE, "data": data}))
    return path, texts


@pytest.fixture(scope="module", autouse=True)
def _forked_jobs():
    with forked_jobs():
        yield


@pytest.fixture(scope="module")
def series(prefect_server, tmp_path_factory):
    """A finished run on a folder with one file of texts: folder, store and a function that runs a round."""
    from flows.continual import continual
    from flows.pretrain import pretrain

    root = tmp_path_factory.mktemp("series")
    store = root / "store"
    path, texts = write_profile(root)

    def night(*overrides: str, store=store):
        return continual(str(path), [*ROUND, *overrides], None, str(store), return_state=True)

    assert night().name == "NoFinishedRun"
    pretrain(str(path), [], None, str(store))
    return texts, store, night


def exported(run: Path) -> bytes:
    return (run / "export/model.safetensors").read_bytes()


def interrupt(store: Path, run: str) -> tuple[dict[int, float], bytes]:
    """Undo what a finished round did after its first kept checkpoint; returns losses and exported weights."""
    found = losses(folder := store / "runs" / run), exported(folder)
    _, *later = sorted((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    kinds = (store / "artifacts" / kind for kind in ("training", "evaluation", "export"))
    for path in (*later, folder / "export", *kinds):
        shutil.rmtree(path)
    return found


def promoted(store: Path) -> dict:
    return json.loads((store / "runs/nightly/standing.json").read_text())


def corpus_of(store, run: str) -> dict:
    inputs = json.loads((store / "runs" / run / "inputs.json").read_text())
    return json.loads((store / "artifacts/dataset" / inputs["dataset"] / "corpus.json").read_text())


def test_series_promotes_rounds_on_new_data_that_are_no_worse(series, monkeypatch):
    texts, store, night = series
    alerts = []
    monkeypatch.setattr("flows.continual.emit", lambda kind, *facts: alerts.append(kind))
    assert night().name == "NoNewData"

    write_texts(texts / "1.jsonl", 2)
    state = night(*EPOCH)
    assert state.name == "Promoted", state.message
    headline, _, table = state.message.partition("\n\n")
    assert headline == "nightly-round-1 replaces nightly"
    first, new = corpus_of(store, "nightly"), corpus_of(store, "nightly-round-1")
    added, *replayed = new["train"]
    assert replayed == first["train"]
    assert added["path"] not in {entry["path"] for entry in first["train"]}
    # The first run's set, and one of the round's own documents, which none of its shards trains on.
    assert [each["name"] for each in new["sources"]] == ["first/files", "round-1/files"]
    assert new["validation"][0] == first["validation"][0]
    assert new["validation"][1]["path"] == added["path"].replace("/train", "/validation")
    lines = [line.split() for line in table.splitlines()]
    assert [line[0] for line in lines] == ["set", "old", "new"]
    assert all(line[-1] == "yes" for line in lines[1:])
    report = (store / "runs/nightly-round-1/report.html").read_text()
    assert all(f"<td class=short>{cell}</td>" in report for line in lines[1:] for cell in line[:3])
    artifacts = shown("nightly")
    assert [row["set"] for row in json.loads(artifacts["gates"])] == ["old", "new"]
    assert lines[1][1] in artifacts["gates"]
    assert "nightly-round-1 is promoted" in artifacts["series"]
    assert "data:image/svg+xml" in artifacts["series"]
    assert "nightly-round-1" in (store / "series/nightly.html").read_text()
    assert f"{added['tokens']:,} tokens<" in report
    assert "5% of the samples replayed from earlier data" in report
    rates = [row["learning_rate"] for row in training_rows(store / "runs/nightly-round-1")]
    windows = (added["tokens"] - 1) // 32
    assert len(rates) == math.ceil(windows / 0.95 / 4)  # every new window once, four samples per step
    assert rates[0] < rates[1] < rates[2] > rates[-1]
    log = (store / "runs/nightly-round-1/logs/train.log").read_text()
    assert "optimizer and schedule restart" in log
    assert (store / "runs/nightly-round-1/export/config.json").exists()
    assert night().name == "NoNewData"

    # A round that learned nothing, and one that forgot, are evaluated but not promoted; their data may be used again.
    write_texts(texts / "2.jsonl", 3)
    state = night(
        "train.learning_rate=1e-30", "train.minimum_learning_rate=0", "continual.replay=[0.05, 0.25]"
    )  # more replay would not help
    assert state.name == "NotPromoted", state.message
    assert state.message.startswith("nightly-round-1 remains promoted: new did not change")
    worse = ("train.learning_rate=10", "train.clip=null", "continual.replay=[0.05, 0.25]")
    for _ in range(2):  # once more at the next schedule, which trains nothing
        state = night(*worse)
        assert state.name == "NotPromoted", state.message
        assert state.message.startswith("nightly-round-1 remains promoted: old rose from")
        shares = [
            corpus_of(store, run)["replay"]["share"] for run in ("nightly-round-2~2", "nightly-round-2")
        ]
        assert shares == [0.05, 0.25]
        assert not (store / "runs/nightly-round-2~3").exists()
    assert promoted(store)["run"] == "nightly-round-1"
    assert alerts == ["promoted", *["not-promoted"] * 3]  # one for each model

    # Two at once: one trains, the other waits and finds nothing left to do.
    with ThreadPoolExecutor(2) as pool:
        states = [*pool.map(night, ["continual.gates=[{on: old, rise_at_most: 1}]"] * 2)]
    assert sorted(state.name for state in states) == ["NoNewData", "Promoted"]
    model = promoted(store)
    assert (model["run"], model["round"]) == ("nightly-round-2", 2)
    lineage = list(ledger.lineage(Store(str(store)), model["identity"]))
    assert [entry.run for entry in lineage] == ["nightly-round-2", "nightly-round-1", "nightly"]
    assert [len(entry.shards) for entry in lineage] == [1, 1, 1]
    entries = [json.loads(path.read_text()) for path in (store / "ledger").iterdir()]
    # Three attempts were not promoted; one of them differs from the last only in its schedule.
    assert len(entries) == 5
    assert (store / "runs/nightly-round-2~3").exists()


def test_series_of_an_earlier_version_continues_with_a_warm_up_as_long_as_its_new_data(series, caplog):
    texts, store, night = series
    caplog.set_level(logging.INFO)
    (texts / "3.jsonl").write_text("\n".join((texts / "2.jsonl").read_text().splitlines()[:4]))
    earlier = promoted(store)
    base = store / "runs" / earlier["run"]
    for added in ("held_out", "latest"):
        del earlier[added]
    (store / "runs/nightly/standing.json").write_text(json.dumps(earlier))
    two_ranks = ("cluster.devices_per_node=2", "train.micro_batch_size=2")
    muon = ("train.optimizer=muon", "train.warmup_steps=6")  # after rounds with AdamW
    state = night(*EPOCH, *two_ranks, *muon, "continual.gates=[{on: old, rise_at_most: 1}]")
    assert state.name == "Promoted", state.message
    trains = r"nightly-round-3 trains on new data, with .*: \d{3} tokens to train on, 1,555 held out, 5% of the samples"
    assert re.search(trains, caplog.text)
    # The round's cluster evaluates the promoted model too.
    _, arguments, _, processes, _ = json.loads((base / "logs/evaluate.job.json").read_text())["job"]
    evaluated = load(arguments[arguments.index("--profile") + 1])
    assert (processes, evaluated.world_size, evaluated.train.steps) == (2, 2, 8)
    assert "train.warmup_steps: reduced from 6 to 4: the new data has 4 steps" in caplog.text
    run = store / "runs" / promoted(store)["run"]
    assert len(losses(run)) == 4
    assert "optimizer and schedule restart" in (run / "logs/train.log").read_text()
    assert load(str(run / "profile.yaml")).train.optimizer == "muon"
    # Earlier versions held nothing out of the rounds that they promoted.
    assert [each["name"] for each in corpus_of(store, run.name)["sources"]] == ["first/files"]
    assert promoted(store)["held_out"]


def test_round_with_nan_held_out_loss_fails_without_retry(series, tmp_path, monkeypatch):
    texts, store, night = series
    (tmp_path / "spoilt.py").write_text(SPOILT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    write_texts(texts / "4.jsonl", 5)
    before = promoted(store)
    state = night("train.steps=2", "train.warmup_steps=1", "train.loss=spoilt:loss")
    assert state.is_failed()
    run = f"nightly-round-{before['round'] + 1}"
    assert f"the held-out loss of run {run} at step 2 is nan" in state.message
    events = (store / "runs" / run / "events.jsonl").read_text()
    assert "evaluate failed" in events
    assert "retried" not in events
    assert promoted(store) == before


def test_round_whose_base_run_was_replaced_starts_over(series, tmp_path):
    from flows.pretrain import pretrain

    texts, store, night = series
    copy = shutil.copytree(store, tmp_path / "store")
    (copy / "runs/nightly/standing.json").unlink()  # as if the first round had not been promoted yet
    before, weights = interrupt(copy, "nightly-round-1")
    # The source has the weight of the next round.
    state = night(f"train.steps={len(before)}", "data.sources.0.weight=2", store=copy)
    assert state.message.startswith("nightly-round-1 replaces nightly\n"), state.message
    assert not (copy / "runs/nightly-round-1~1").exists()
    round_one = copy / "runs/nightly-round-1"
    assert "resumed from step" in (round_one / "logs/train.log").read_text()
    assert corpus_of(copy, "nightly-round-1")["replay"]["share"] == 0.05
    assert losses(round_one) == before
    assert exported(round_one) == weights

    constant = ["train.schedule=constant", "train.optimizer=muon"]
    pretrain(str(texts.parent / "nightly.yaml"), ["train.seed=1", *constant], None, str(copy), replace=True)
    trunk = ("continual.schedule=trunk", *constant)
    own = ("continual.replay_from=generated", "continual.replay=0.25", "continual.generated_tokens=330")
    state = night("continual.gates=[{on: old, rise_at_most: 9}]", *own, *trunk, store=copy)
    assert state.message.startswith("nightly-round-1 replaces nightly\n"), state.message
    (stream,) = corpus_of(copy, "nightly-round-1")["replay"]["streams"]
    assert (stream["run"], stream["begin"]) == ("continual.replay_from", 0)
    # Text of the replaced model: rows of 330 tokens, not 16 for 8 replayed windows.
    assert stream["tokens"] == 10 * 32
    assert "25% of the samples replayed from generated text" in (round_one / "report.html").read_text()
    assert len(losses(copy / "runs/nightly-round-1~1")) > 8
    # It continued the trunk with its momentum, at a constant rate, and decayed after the checkpoint that the next one needs.
    rates = [row["learning_rate"] for row in training_rows(round_one)]
    assert len(rates) == 8 + 2
    assert len({*rates[:8]}) == 1
    assert rates[7] > rates[8] > rates[9]
    marker = json.loads((round_one / "checkpoints/step_8/complete.json").read_text())
    assert marker["optimizer_steps"] == 6 + 8
    log = (round_one / "logs/train.log").read_text()
    assert f"weights and optimizer from {copy / 'runs/nightly/checkpoints/step_6'}" in log


@pytest.mark.parametrize(
    ("name", "own", "rate"), [("adapted", {"lora": {"rank": 4}}, 0.03), ("tuned", {}, 0.003)]
)
def test_rounds_of_sft_train_weights_or_adapters_further(series, tmp_path, name, own, rate):
    from flows.continual import continual
    from flows.pretrain import pretrain

    texts, store, _ = series
    folder, path = tmp_path / "records", tmp_path / f"{name}.yaml"
    folder.mkdir()

    def write(file: str, seed: int) -> None:
        chance = random.Random(seed)
        words = ["".join(chance.choices("abcdefgh", k=3)) for _ in range(90)]
        records = ({"prompt": word, "completion": f" {word}{word}"} for word in words)
        (folder / file).write_text("".join(f"{json.dumps(record)}\n" for record in records))

    write("0.jsonl", 1)
    data = {"sources": [{"kind": "files", "path": str(folder)}], "validation_fraction": 0.3}
    sections = {
        "extends": str(texts.parent / "nightly.yaml"),
        "init": {"from": "run:nightly"},
        "tokenizer": {"source": "run:nightly"},
        "objective": {"kind": "sft", "template": "chatml"},
        "data": data,
    }
    path.write_text(yaml.safe_dump(sections | own))
    fast = (f"train.learning_rate={rate}", "evaluate.every=0")
    pretrain(str(path), [*fast], None, str(store))
    write("1.jsonl", 2)
    lineage = ledger.lineage(
        Store(str(store)), json.loads((store / f"runs/{name}/inputs.json").read_text())["identity"]
    )
    assert [entry.run for entry in lineage] == [name, "nightly"]  # whose text is not replayed among records
    gates = "continual.gates=[{on: new, fall_at_least: 0}]"
    state = continual(str(path), [*fast, gates], None, str(store), return_state=True)
    assert state.name == "Promoted", state.message
    assert [line.split()[0] for line in state.message.splitlines()[3:]] == ["new", "old"]
    first, round_one = store / "runs" / name, store / f"runs/{name}-round-1"
    log = (round_one / "logs/train.log").read_text()
    assert f"weights from {first / 'checkpoints/step_6'}; optimizer and schedule restart" in log
    corpus = corpus_of(store, round_one.name)
    assert (corpus["records"], corpus["packing"]) == (True, True)
    assert [each["name"] for each in corpus["sources"]] == ["first/records", "round-1/records"]
    assert [stream["run"] for stream in corpus["replay"]["streams"]] == [name]
    trained = "export/adapter/adapter_model.safetensors" if own else "export/model.safetensors"
    assert (first / trained).read_bytes() != (round_one / trained).read_bytes()
    assert (round_one / "export/adapter").exists() == bool(own)
    # The loss that the first run ended with, and not that of the weights without its adapters.
    evaluated = json.loads((first / "report.json").read_text())["evaluation"]
    rows = {row["set"]: row for row in json.loads((round_one / "round.json").read_text())["rows"]}
    assert rows["old"]["before"] == pytest.approx(evaluated["validation_loss"], rel=1e-3)


def test_run_exported_before_its_end_is_not_continued(series, tmp_path):
    _, store, night = series
    copy = shutil.copytree(store, tmp_path / "store")
    (copy / "runs/nightly/standing.json").unlink()
    identity = json.loads((copy / "runs/nightly/inputs.json").read_text())["identity"]
    for missing in (copy / "runs/nightly/checkpoints/step_6", copy / "ledger" / f"{identity}.json"):
        missing.rename(tmp_path / "missing")
        state = night(store=copy)
        assert state.name == "NoFinishedRun"
        assert "train it to its last step" in state.message
        (tmp_path / "missing").rename(missing)


def test_runs_that_a_round_reads_are_not_replaced_and_run_references_are_located(tmp_path, monkeypatch):
    import flows.continual as continual

    store, sources = Store(str(tmp_path)), []
    for name in ("tiny", "tiny-round-1"):
        runs.open_run(store, load("tiny", (), name), "one", "flow run", {})
    model = {"run": "tiny-round-1", "identity": "one", "round": 1, "tokenizer": "t", "dataset": "d"}
    store.backend.write("runs/tiny/standing.json", json.dumps(model).encode())
    store.run_folder("base").write("export/config.json", b"{}")

    def train_round(context, current):
        sources.extend((context.profile.tokenizer.source, context.profile.init.from_))
        for name in ("tiny", current.run):
            other = load("tiny", ["train.learning_rate=1e-2"], name)
            with pytest.raises(ProfileError, match="continues the run that this one replaces"):
                runs.open_run(store, other, "two", "flow run", {}, replace=True)
        return Completed(name="Promoted")

    monkeypatch.setattr(continual, "_attempts", train_round)
    monkeypatch.setattr("flows.run_setup.hub_token", lambda profile: None)  # would ask Prefect
    overrides = ["tokenizer.source=run:base", "init.from=run:removed"]
    continual.continual.fn.__wrapped__("tiny", overrides, store=str(tmp_path))
    assert sources == [str(tmp_path / f"runs/{name}/export") for name in ("base", "removed")]


def test_export_flow_exports_an_existing_run(series):
    from flows.export import export

    _, store, _ = series
    assert export("nightly", str(store)).endswith("nightly/export")
    with pytest.raises(ValueError, match="run = nobody: no such run in"):
        export("nobody", str(store))


def test_interrupted_round_ends_with_the_same_bits_and_is_promoted_once(series, tmp_path, monkeypatch):
    import flows.continual as continual

    texts, store, night = series
    write_texts(texts / "7.jsonl", 8)
    undisturbed, disturbed = (shutil.copytree(store, tmp_path / name) for name in ("one", "two"))
    gates = "continual.gates=[{on: old, rise_at_most: 9}]"
    assert night(gates, store=undisturbed).name == "Promoted"

    def stop(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    # When the round's data is in no ledger yet, once it is trained, and when all but the promotion is done.
    ends = (continual.ledger, "record"), (continual.ExportStep, "make"), (continual.series, "promote")
    for owner, name in ends:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, stop)
            assert night(gates, store=disturbed).name == "Stopped"
    assert night(gates, store=disturbed).name == "Promoted"
    assert night(gates, store=disturbed).name == "NoNewData"
    results = []
    for each in (undisturbed, disturbed):
        run = each / "runs" / promoted(each)["run"]
        entries = sorted(path.name for path in (each / "ledger").iterdir())
        results.append((promoted(each), losses(run), exported(run), entries))
    assert results[0] == results[1]


def test_share_within_those_of_the_proxies_needs_no_warning():
    from flows.experiments.share import _warning

    assert _warning({"share": 0.25, "meets": True}, 0.5) == ""
    out_of_reach = "no share up to 0.5 keeps the old loss within its gate"
    assert _warning({"share": 0.5, "meets": False}, 0.5) == out_of_reach


def test_share_is_proposed_from_proxies_that_later_rounds_reuse(series, tmp_path, caplog, capsys):
    from flows.cli.experiments import print_share
    from flows.experiments.plans import load_share
    from flows.experiments.share import share

    texts, store, _ = series
    copy, file = shutil.copytree(store, tmp_path / "store"), tmp_path / "find.yaml"
    settings = {"target": str(texts.parent / "nightly.yaml"), "shares": [0.0, 0.1, 0.25, 0.5], "devices": 2}
    settings |= {"proxy": {"hidden_size": 16, "tokens_per_parameter": 0.05}}
    settings |= {"objective": {"old": 1, "new": 0}}
    for override in ("continual.replay_from=generated", "continual.schedule=trunk"):
        file.write_text(yaml.safe_dump(settings | {"round_overrides": [override]}))
        with pytest.raises(ProfileError, match=f"{override.partition('=')[0]}.*proxies"):
            load_share(str(file))
    file.write_text(yaml.safe_dump(settings))
    for other in texts.glob("[4-7].jsonl"):  # of rounds that no test promoted in this store
        other.unlink()
    write_texts(texts / "8.jsonl", 9)
    found = share(str(file), str(copy))
    assert found["share"] == 0.5  # with the lowest old loss
    assert "the proposed share is the largest of the proxies; add larger ones to shares" in caplog.text
    names = ["find-0", "find-0.1", "find-0.25", "find-0.5"]
    assert [proxy["name"] for proxy in found["proxies"]] == names
    assert found["overrides"] == [f"continual.replay={found['share']:g}"]
    assert found["interval"][0] <= found["interval"][1] <= 0.5
    assert [row["set"] for row in found["losses"]] == ["old", "new"]
    # Every proxy starts from the same small model, and reads the share from what the series was trained on.
    history = corpus_of(copy, "find-base")["train"]
    assert {entry["path"] for entry in corpus_of(copy, "nightly")["train"]} <= {
        entry["path"] for entry in history
    }
    for name, value in zip(names[1:], settings["shares"][1:], strict=True):
        corpus = corpus_of(copy, name)
        assert corpus["replay"]["share"] == value
        assert corpus["train"][-len(history) :] == history
    steps = [len(losses(copy / "runs" / name)) for name in names]
    assert steps[0] < steps[1] < steps[2] < steps[3]  # each reads the new data once
    page = Path(found["page"]).read_text()
    assert "find-0.25" in page
    print_share(Console(width=120), found)
    assert f"--set continual.replay={found['share']:g}" in capsys.readouterr().out

    # A little more of the same kind: nothing is trained again.
    logs = {path: path.stat().st_mtime_ns for path in copy.glob("runs/find-*/metrics.jsonl")}
    (texts / "9.jsonl").write_text(
        "\n".join((texts / "8.jsonl").read_text().splitlines()[:9]).replace("a", "e")
    )
    caplog.set_level(logging.INFO)
    assert share(str(file), str(copy))["key"] == found["key"]
    assert "are reused: the new data is of the same sources" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in copy.glob("runs/find-*/metrics.jsonl")} == logs


@pytest.mark.s3
def test_series_on_s3_continues_on_any_machine(prefect_server, tmp_path, monkeypatch):
    from flows.continual import continual
    from flows.export import export
    from flows.pretrain import pretrain

    path, texts = write_profile(tmp_path)
    with s3.bucket(monkeypatch) as address:
        store = f"{address}/store"
        bucket = Store(store, tmp_path / "looks").backend

        def night(machine: str, *overrides: str):
            work = f"cluster.work_dir={tmp_path / machine}"
            return continual(str(path), [*ROUND, work, *overrides], None, store, return_state=True)

        pretrain(str(path), [f"cluster.work_dir={tmp_path / 'first'}"], None, store)
        assert night("second").name == "NoNewData"
        write_texts(texts / "1.jsonl", 2)
        state = night("second", "continual.gates=[{on: old, rise_at_most: 1}]")
        assert state.name == "Promoted", state.message
        assert json.loads(bucket.read("runs/nightly/standing.json"))["run"] == "nightly-round-1"
        kept = bucket.files("runs/nightly-round-1")
        expected = {"export/config.json", "export/model.safetensors", "report.html", "metrics.jsonl"}
        assert expected <= kept.keys()

        # A machine new to the series; its restored run folder does not undo a promotion made elsewhere.
        assert night("third").name == "NoNewData"
        for name in ("nightly", "nightly-round-1"):
            for file in bucket.files(f"runs/{name}/export"):
                bucket.remove(f"runs/{name}/export/{file}")
            folder = Path(export(name, store, str(tmp_path / "third")))
            assert folder == tmp_path / "third/runs" / name / "export"
            assert (folder / "config.json").exists()
            assert "model.safetensors" in bucket.files(f"runs/{name}/export")
        assert not (tmp_path / "third/runs/nightly/standing.json").exists()
        with pytest.raises(ValueError, match="run = nobody: no such run in s3://"):
            export("nobody", store, str(tmp_path / "third"))
