"""Chain of stages in one flow run: start from the previous export, caching, stop at a missed gate."""

import contextlib
import json
import logging
import random
import re
import shutil
from pathlib import Path

import pytest
import yaml

from flows.chained_runs import chained_runs
from flows.cli.main import main
from flows.start_checks import RunCommand
from profiles.errors import ProfileError
from tasks.store.runs import RunExists
from tasks.tokenization.chat_templates import CHATML
from tests.flows.micro import ended, losses, settings, shown
from tests.forked_jobs import forked_jobs

DONE = ["train", "evaluate", "export"]


def write_stages(folder: Path, micro: Path) -> list[str]:
    """Write profiles of LoRA SFT and of DPO, which continue from the profile `micro`; returns their paths."""
    chance = random.Random(1)
    names = ["".join(chance.choices("abcdefgh", k=3)) for _ in range(60)]
    records = [
        {"prompt": name, "completion": f" {name}{name}", "chosen": f" {name}{name}", "rejected": " hh"}
        for name in names
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = {"kind": "files", "path": str(folder / "records.jsonl")}
    common = {"data": {"sources": [source], "validation_fraction": 0.3}, "evaluate": {"every": 0}}
    tuned = {
        "sft": {
            "objective": {"kind": "sft", "template": "chatml"},
            "lora": {"rank": 4},
            "train": {"learning_rate": 0.03},
        },
        "dpo": {"objective": {"kind": "dpo"}, "train": {"micro_batch_size": 2, "learning_rate": 0.001}},
    }
    paths = []
    for name, sections in tuned.items():
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump({"extends": str(micro), **common, **sections}))
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def stages(profile, tmp_path_factory):
    return [str(profile), *write_stages(tmp_path_factory.mktemp("stages"), profile)]


@pytest.fixture(scope="module")
def run(prefect_server, stages):
    """Run the chain in-process: `run(store, *overrides)` returns results, and step outcomes by run."""
    from flows.chain import chain

    def call(store: Path, *overrides: str) -> tuple[list[dict], dict[str, list[str]]]:
        with forked_jobs():
            results = chain(stages, list(overrides), "", str(store))
        kinds = ("plan", "resolve", "report")
        done = {
            each["run"]: [
                step["step"] for step in each["steps"] if step["how"] == "done" and step["step"] not in kinds
            ]
            for each in results
        }
        return results, done

    return call


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """A store with a finished chain, and what it returned."""
    store = tmp_path_factory.mktemp("chain") / "store"
    return store, *run(store)


def test_chain_trains_each_stage_from_the_previous_export_and_evaluates_before_and_after(finished):
    store, (_, sft, dpo), done = finished
    assert done["sft"] == ["tokenizer", "checkpoint", "dataset", *DONE]
    assert "reference" in done["dpo"]
    for run in ("sft", "dpo"):  # the tokenizer of the second is that of the first one's export
        assert (store / "runs" / run / "export/chat_template.jinja").read_text() == CHATML
    assert sft["validation_loss"] < sft["before"]["validation_loss"]
    # DPO begins with the weights of the reference model: all margins are 0.
    assert dpo["before"]["validation_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert dpo["before"]["metrics"].keys() == {"accuracy", "margin", "kl"}
    report = json.loads((store / "runs/sft/report.json").read_text())
    prompts = [sample["prompt"] for sample in report["samples"]]
    assert [sample["prompt"] for sample in report["samples_before"]] == prompts != []
    page = (store / "runs/sft/report.html").read_text()
    assert "<p>Before</p>" in page
    assert 'only-narrow">Before<' in page  # where samples are below each other
    assert f"{sft['before']['validation_loss']:.4f}" in page
    rows = [json.loads(line) for line in (store / "runs/sft/metrics.jsonl").read_text().splitlines()]
    assert (rows[0]["step"], rows[0]["validation_loss"]) == (0, sft["before"]["validation_loss"])
    assert "All 6 steps are done" in shown("micro > sft > dpo")["run"]


def test_a_finished_chain_is_cached_and_a_missed_gate_stops_it(
    run, finished, stages, prefect_server, tmp_path, monkeypatch, caplog, capsys
):
    from tasks.chain_gate import GateMissed

    store = shutil.copytree(finished[0], tmp_path / "store")
    caplog.set_level(logging.INFO, "tasks.chain_gate")
    results, done = run(store)
    gates = [record.getMessage() for record in caplog.records if record.name == "tasks.chain_gate"]
    assert len(gates) == 2
    assert re.fullmatch(r"run sft met its gate: validation loss [\d.]+ \(before training: [\d.]+\)", gates[0])
    assert done == {"micro": [], "sft": [], "dpo": []}
    assert [each["before"] for each in results] == [each["before"] for each in finished[1]]
    shutil.rmtree(store / "runs/dpo")
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    missed = settings(f"{stages[1]}:evaluate.gate=[validation_rise <= 9, perplexity <= 1.5]")
    with forked_jobs():
        assert main(["chain", *stages, *missed, "--store", str(store)]) == 1
    *_, message = capsys.readouterr().err.splitlines()
    reason = r"run sft missed its gate: perplexity [\d.]+ \(required: <= 1.5\); the chain stops here"
    assert re.fullmatch(rf"trainshed: {reason}", message)
    assert ended("micro > sft > dpo") == ("GateMissed", message.removeprefix("trainshed: "))
    assert not (store / "runs/dpo").exists()
    (store / "runs/sft/before.json").write_text(
        json.dumps({"validation_loss": 0.5, "perplexity": 1.6, "metrics": {}})
    )
    with pytest.raises(GateMissed, match=r"validation loss rose from 0.5000 to"):
        run(store)


def test_a_stage_is_not_cached_if_the_previous_one_was_trained_again(run, finished, stages, tmp_path):
    store = shutil.copytree(finished[0], tmp_path / "store")
    shutil.rmtree(store / "runs/micro")
    with pytest.raises(RunExists, match=r"sft: .* other settings \(another checkpoint\)"):
        run(store, f"{stages[0]}:train.seed=7")


def interrupt(store: Path, name: str) -> dict[int, float]:
    """Undo what a finished run of a store did after step 2; returns its losses."""
    before = losses(store / f"runs/{name}")
    for path in (store / f"runs/{name}/checkpoints").glob("step_*"):
        if path.name != "step_2":
            shutil.rmtree(path)
    shutil.rmtree(store / "artifacts/training")
    return before


def test_reference_in_each_step_equals_the_precomputed_one_and_resumes_with_identical_losses(
    run, finished, stages, tmp_path
):
    store = shutil.copytree(finished[0], tmp_path / "store")
    before = losses(store / "runs/dpo")
    for folder in ("runs/dpo", "artifacts/evaluation"):
        shutil.rmtree(store / folder)
    in_each_step = f"{stages[2]}:objective.precompute_reference=false"
    results, done = run(store, in_each_step)
    assert done["dpo"] == DONE
    assert losses(store / "runs/dpo") == pytest.approx(before, rel=1e-5)
    assert results[2]["validation_loss"] == pytest.approx(finished[1][2]["validation_loss"], rel=1e-5)
    before = interrupt(store, "dpo")
    run(store, in_each_step)
    assert losses(store / "runs/dpo") == before
    assert "resum" in (store / "runs/dpo/logs/train.log").read_text()


def test_an_interrupted_lora_run_resumes_with_identical_losses(run, finished, tmp_path, monkeypatch):
    store = shutil.copytree(finished[0], tmp_path / "store")
    before = interrupt(store, "sft")
    _, done = run(store)
    assert losses(store / "runs/sft") == before
    assert "resum" in (store / "runs/sft/logs/train.log").read_text()
    assert done["sft"] == ["train"]


def test_a_chain_that_cannot_work_is_rejected_before_it_starts(stages, tmp_path, capsys):
    micro, sft, _ = stages
    chained = chained_runs(stages, [f"{sft}:train.steps=3"], "night")
    assert [each.name for each in chained] == ["night-micro", "night-sft", "night-dpo"]
    assert [each.profile.train.steps for each in chained] == [6, 3, 6]
    assert [each.profile.init.from_ for each in chained] == [None, "run:night-micro", "run:night-sft"]
    with pytest.raises(ProfileError, match="has a different model from"):
        chained_runs([micro, sft], [f"{sft}:model.hidden_size=64"])
    with pytest.raises(ProfileError, match="occurs twice"):
        chained_runs([micro, micro])
    with pytest.raises(
        ProfileError, match="tiny-dpo is not a profile of the chain; nearest valid: tiny, tiny-sft"
    ):
        chained_runs(["tiny", "tiny-sft"], ["tiny-dpo:train.steps=3"])
    for gate, reason in (
        (f"{sft}:evaluate.gate=[acuracy >= 1]", "acuracy is not a result of the evaluation"),
        (
            f"{micro}:evaluate.gate=[validation_rise <= 1]",
            "validation_rise needs the loss of the initial weights",
        ),
    ):
        assert main(["chain", micro, sft, "--store", str(tmp_path), "--set", gate]) == 2
        condition = gate.partition("=[")[2].rstrip("]")
        assert f"gate.0 = {condition}: {reason}" in capsys.readouterr().err
    with contextlib.suppress(FileNotFoundError):
        assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(("name", "other"), [(None, "second"), ("night", "night-2")])
def test_a_chain_in_conflict_with_a_run_suggests_chains(name, other):
    command = RunCommand("tiny", ["train.seed=2"], name, "./store", ["tiny", "tiny-sft"])
    conflict = RunExists("tiny", ["train.seed is 1 there, 2 here"], 6, forkable=True)
    same = "trainshed chain tiny tiny-sft --set train.seed=2"
    named = f" --name {name}" if name else ""
    assert [words for _, words in command.alternatives(conflict, "tiny")] == [
        f"{same} --name {other}",
        f"{same}{named} --replace",
    ]


def test_suggested_forks_have_another_name_and_the_settings_that_differ():
    command = RunCommand("tiny/profile.yaml", ["train.seed=2"], "colder", "./store", fork="tiny@200")
    conflict = RunExists("colder", ["train.seed is 1 there, 2 here"], 300, forkable=True)
    assert command.alternatives(conflict, "colder") == [
        ("fork under another name", "trainshed fork tiny@200 colder-2 --set train.seed=2")
    ]
    # A fork starts from the run's profile, whose train.steps are not those of the profile that the user named.
    command = RunCommand("tiny", ["train.seed=2"], None, "./store")
    conflict = RunExists("tiny", [], 6, forkable=True, settings=["train.seed=2", "train.steps=900"])
    conflict.commands = command.alternatives(conflict, "tiny")
    assert "    trainshed fork tiny@6 tiny-2 --set train.steps=900 --set train.seed=2\n" in str(conflict)
