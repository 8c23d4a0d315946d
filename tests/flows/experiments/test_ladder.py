"""Ladders: micro rungs through the real flow, caching, forecasts in the store and the target's report."""

import json
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from flows.cli.main import main
from flows.experiments.side_by_side import run_side_by_side
from flows.runner.interruption import pause
from flows.runner.step_task import Background
from modeling.scaling import forecast as scaling
from profiles.resolve import load
from tasks.step import Context
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tests.flows.micro import exported
from tests.forked_jobs import forked_jobs

RUNGS = [{"hidden_size": 8, "tokens_per_parameter": [0.04, 0.08]}, {"hidden_size": 16, "tokens_per_parameter": [0.04, 0.08]},
         {"hidden_size": 24, "tokens_per_parameter": [0.08]}]  # fmt: skip
OVERRIDES = [
    "model.parametrization=completep",
    "model.base_hidden_size=16",
    "model.base_num_hidden_layers=1",
    "train.optimizer=muon",
    "checkpoint.every=0",
    "evaluate.by_source=true",
]


def write_ladder(folder: Path, profile: Path, **changes: object) -> Path:
    """A ladder of five rungs of the profile `micro`."""
    path = folder / "steps.yaml"
    settings = {"target": str(profile), "overrides": OVERRIDES, "rungs": RUNGS, "devices": 2, **changes}
    path.write_text(yaml.safe_dump(settings))
    return path


def trained(store: Path) -> dict[str, int]:
    """When each run of a store wrote its last metrics."""
    return {path.parent.name: path.stat().st_mtime_ns for path in store.glob("runs/*/metrics.jsonl")}


def without(document: dict, key: str) -> dict:
    return {name: value for name, value in document.items() if name != key}


@pytest.fixture(scope="module")
def ladder(prefect_server):
    """Run the flow in this process, its ranks forked: `ladder(file, store, target=False)`."""
    from flows.experiments.ladder import ladder

    def call(file: Path, store: Path, target: bool = False) -> dict:
        with forked_jobs():
            return ladder(str(file), str(store), target)

    return call


def test_a_ladder_forecasts_its_target_before_it_starts(ladder, profile, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    store = tmp_path / "store"
    made = TokenizerStep().run(Context(load(str(profile)), Store(str(tmp_path / "other"))))
    shutil.copytree(Store(str(tmp_path / "other")).artifacts.path(made), store / "runs/base/export")
    # A run reads this tokenizer in the store; its forecast is found nevertheless.
    overrides = [*OVERRIDES, "tokenizer.source=run:base", "tokenizer.vocabulary_size=null"]
    first = ladder(write_ladder(tmp_path, profile, overrides=overrides), store)
    names = [rung["name"] for rung in first["rungs"]]
    assert names == [
        "steps-h8-l1-t0.04", "steps-h8-l1-t0.08", "steps-h16-l1-t0.04", "steps-h16-l1-t0.08", "steps-h24-l1-t0.08",
    ]  # fmt: skip
    low, high = first["interval"]
    assert 0 < low < first["loss"] < high
    assert first["metrics"].keys() | first["metrics_without_forecast"].keys() == {"validation_loss/texts"}
    assert "Loss by training compute" in Path(first["page"]).read_text()
    begun = trained(store)
    assert sorted(begun) == sorted(names)
    # In Prefect's UI; a terminal does not show it a second time.
    said = [record.name for record in caplog.records if "forecast of micro: loss" in record.getMessage()]
    assert said == ["prefect.flow_runs"]

    # An additional rung is trained alone, and makes another forecast beside the first; earlier versions stored no warnings.
    compute = scaling.forecast
    monkeypatch.setattr(scaling, "forecast", lambda *given: without(compute(*given), "warnings"))
    more = [*RUNGS, {"hidden_size": 24, "num_hidden_layers": 2, "tokens_per_parameter": [0.08]}]
    second = ladder(write_ladder(tmp_path, profile, rungs=more, overrides=overrides), store, target=True)
    added = trained(store)
    assert {name: added[name] for name in names} == begun
    assert added.keys() - begun.keys() == {"steps-h24-l2-t0.08", "micro"}
    assert second["key"] != first["key"]
    forecast = store / "artifacts/forecast" / second["key"] / "forecast.json"
    assert forecast.stat().st_mtime_ns < added["micro"]

    # The target's report compares the latest forecast with its held-out loss.
    outcome = second["outcome"]
    facts = json.loads((store / "runs/micro/report.json").read_text())["forecast"]
    assert facts == outcome
    assert facts["key"] == second["key"]
    assert "Forecast and outcome" in (store / "runs/micro/report.html").read_text()

    # The trained weights need no multipliers: transformers computes the same loss.
    rung = store / "runs" / names[-1]
    dataset = next((store / "artifacts/dataset").iterdir())
    measured = next(row for row in second["rungs"] if row["name"] == names[-1])["loss"]
    assert exported(rung / "export", dataset, 32)[0] == pytest.approx(measured, rel=1e-5)


@pytest.fixture(scope="module")
def three_runs():
    """An experiment of three runs of which one, or two with `devices`, are trained at a time."""
    profile, experiment = load("tiny"), SimpleNamespace(name="ladder", devices=None)
    return experiment, [
        SimpleNamespace(name=name, flops=flops, profile=profile, overrides=(), source="tiny", fork="")
        for name, flops in (("small", 1), ("medium", 2), ("large", 3))
    ]


def test_no_run_starts_after_another_has_failed(three_runs):
    def train(run, store):
        begun.append(run.name)
        raise ValueError(f"{run.name} failed")

    begun = []
    with pytest.raises(ValueError, match="large failed"):
        run_side_by_side(*three_runs, "store", train)
    assert begun == ["large"]


def test_a_stop_interrupts_the_runs_in_progress_and_starts_no_other(three_runs):
    def train(run, store):
        try:
            begun.append(run.name)
            if len(begun) == 2:  # as Ctrl-C, when the flow has started both and waits
                threading.Timer(
                    0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
                ).start()
            compiling.result() if run.name == "medium" else pause(20)
        except BaseException as stop:
            ended.append((run.name, type(stop)))
            raise

    begun, ended, stopped = [], [], threading.Event()
    _, runs = three_runs
    step = SimpleNamespace(run=lambda: stopped.wait(20) or ended.append(("compiling", None)))
    compiling = Background(step, lambda state: None)
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(
            SimpleNamespace(name="ladder", devices=2 * runs[0].profile.world_size), runs, "store", train
        )
    stopped.set()
    assert sorted(begun) == ["large", "medium"]
    assert sorted(ended) == [("large", KeyboardInterrupt), ("medium", KeyboardInterrupt)]


def test_an_outcome_has_the_metrics_that_were_forecast(tmp_path):
    from tasks.experiments import forecasts
    from tasks.reporting import run_report

    forecast = {
        "key": "k",
        "written": "now",
        "target": {"tokens": 100},
        "loss": 3.0,
        "interval": [2.9, 3.1],
        "share": 0.9,
        "extrapolation": 8.0,
    }
    accuracy = {"value": 0.5, "interval": [0.4, 0.6], "backtest_error": 0.01}
    found = forecasts.outcome(
        {**forecast, "metrics": {"accuracy": accuracy}}, 100, 3.05, {"accuracy": 0.7, "other": 1.0}
    )
    assert found["within"]
    assert found["metrics"] == {"accuracy": {**accuracy, "outcome": 0.7, "within": False}}
    assert ">accuracy<" in run_report.forecast_against_outcome(found)
    assert forecasts.outcome(forecast, 100, 3.05)["metrics"] == {}  # of an earlier version
    assert forecasts.outcome(forecast, 200, 2.8) is None  # of a run that was extended
    row = {"step": 6, "time": 1.0, "validation_loss": 3.05, "lm_eval/endings/acc": 0.5}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    assert forecasts.metrics_of(tmp_path, {"other": 1.0}, 6) == {"lm_eval/endings/acc": 0.5, "other": 1.0}


def test_no_forecast_is_recorded_for_a_run_that_has_started(tmp_path):
    from tasks.experiments import forecasts
    from tasks.store.store import Store

    store = Store(str(tmp_path / "store"))
    run = store.run_folder("late")
    run.prepare("identity")
    (run.path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    assert forecasts.record(store, None, run) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rung": []}, "rung = []: there is no such key at the top level; nearest valid: rungs"),
        ({"zzz": 1}, "level; docs/training/ladder.md lists all; nearest valid: name, description, target, "),
        (
            {"rungs": [{"hidden_size": 12, "tokens_per_parameter": [1]}]},
            "rungs.0.hidden_size = 12: is not a multiple of 8",
        ),
        ({"rungs": [{"hidden_size": 8, "tokens_per_parameter": [0.04, 0.04]}]}, "is listed twice"),
        (
            {"devices": 1, "rung_overrides": ["cluster.devices_per_node=2", "train.micro_batch_size=2"]},
            "devices = 1: is less than the 2 of one run",
        ),
        ({"maximum_flops": 1e3}, "maximum_flops = 1000.0: is exceeded: the runs take"),
        ({"maximum_price": 10.0}, "maximum_price = 10.0: cannot be checked"),
        ({"overrides": ["train.steps=null", "train.epochs=1"]}, "train.steps: is missing; a ladder needs"),
        ({"target": "tiny-moe", "overrides": []}, "target = tiny-moe: has experts"),
    ],
)
def test_a_bad_ladder_is_rejected_before_any_work(profile, tmp_path, capsys, changes, says):
    assert main(["ladder", "plan", str(write_ladder(tmp_path, profile, **changes))]) == 2
    assert says in capsys.readouterr().err


def test_the_plan_lists_every_rung_and_the_total(profile, tmp_path, capsys, monkeypatch):
    assert main(["ladder", "plan", str(write_ladder(tmp_path, profile)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rung["steps"] for rung in found["rungs"]] == [1, 2, 2, 5, 8]
    assert found["total"]["flops"] == sum(rung["flops"] for rung in found["rungs"])
    assert found["target"]["run"] == "micro"
    assert {rung["learning_rate"] for rung in found["rungs"]} == {found["target"]["learning_rate"]}
    automatic = ["train.recompute=auto"]
    changed = write_ladder(tmp_path, profile, batch_exponent=0.5, overrides=automatic)
    assert main(["ladder", "plan", str(changed)]) == 0
    assert "\nh24-l1-t0.08 " in capsys.readouterr().out

    # Rungs are trained also where the target cannot be planned: its device is elsewhere.
    elsewhere = [*automatic, "cluster.device=cuda"]
    changed = write_ladder(tmp_path, profile, overrides=elsewhere, rung_overrides=["cluster.device=cpu"])
    monkeypatch.setattr("flows.cli.experiments.run_flow", lambda *given: 0)
    assert main(["ladder", "run", str(changed)]) == 0, capsys.readouterr().err
    assert main(["ladder", "run", str(changed), "--target"]) == 2
    assert "cuda" in capsys.readouterr().err
