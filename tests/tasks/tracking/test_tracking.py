"""Real trackers without network: W&B offline, MLflow on SQLite, Trackio's database; user classes."""

import json
import logging
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from profiles import resolve
from profiles.errors import ProfileError
from tasks.launchers.conformance import wait
from tasks.tracking import process, worker
from tasks.tracking.process import labels_of, tracking
from tasks.tracking.protocol import TrackedRun
from tasks.tracking.trackers import MlflowTracker
from tests.profiles.pair import PAIR
from tests.tasks.tracking import wandb_files

pytestmark = pytest.mark.slow

TAG = "loss/loss"


class Run:
    """A run folder whose metrics are written by the test, with its trackers."""

    def __init__(self, store: Path, *trackers: str) -> None:
        names = ",".join(trackers)
        overrides = [f"tracking.trackers=[{names}]", "tracking.project=shared", "tracking.tags=[ablation]"]
        self.profile = resolve.load(PAIR, overrides, "tiny")
        self.folder = store / "runs/tiny"
        self.folder.mkdir(parents=True)
        self.metrics = self.folder / "metrics.jsonl"
        (self.folder / "profile.yaml").write_text(resolve.dump(self.profile))
        (self.folder / "report.html").write_text("<p>a report</p>")

    def write(self, *steps: int, seconds: float = 0.5, back_to: int | None = None) -> None:
        """Add rows, whose loss is twice their step; `back_to` drops later ones, as a resumed attempt does."""
        rows = [{"step": step, "loss": 2.0 * step, "step_seconds": seconds, "mfu": None} for step in steps]
        if back_to is not None:
            kept = [line for line in self.lines() if json.loads(line)["step"] <= back_to]
            fresh = self.folder / "metrics.fresh"
            fresh.write_text("".join(f"{line}\n" for line in kept))
            fresh.replace(self.metrics)
        with self.metrics.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def lines(self) -> list[str]:
        return self.metrics.read_text().splitlines()

    def track(self):
        return tracking(self.profile, self.folder, labels_of(self.profile, "tiny", "first@20"))


@pytest.mark.parametrize(
    ("source", "name"),
    [("tiny", "tiny"), ("profiles/mine.yaml", "mine"), ("store/runs/first/profile.yaml", "first")],
)
def test_label_is_the_name_of_the_profile_also_of_a_forks_parent(source, name):
    assert labels_of(resolve.load("tiny"), source, None)["profile"] == name


def interrupted(run: Run) -> None:
    with run.track():
        run.write(1, 2, 3)
        raise KeyboardInterrupt


def wandb_values(store: Path) -> tuple[list, set, set]:
    files = sorted(store.rglob("run-*.wandb"))
    rows = [row for file in files for row in wandb_files.history(file) if TAG in row]
    messages = [record for file in files for record in wandb_files.records(file)]
    runs = [message.run for message in messages if message.HasField("run")]
    assert len({run.run_id for run in runs}) == 1  # resumed, not started again
    artifacts = {message.artifact.type for message in messages if message.HasField("artifact")}
    labels = {label for run in runs for label in run.tags}
    return [(int(row["step"]), float(row[TAG])) for row in rows], labels, artifacts


def mlflow_values(store: Path) -> tuple[list, set, set]:
    with closing(sqlite3.connect(store / "mlflow.db")) as database:
        ((run, status),) = database.execute("select run_uuid, status from runs")
        assert status == "FINISHED"
        assert ("train.steps", "300") in database.execute("select key, value from params").fetchall()
        rows = database.execute(
            "select step, value from metrics where key = ? order by step", [TAG]
        ).fetchall()
        labels = {f"{key}:{value}" for key, value in database.execute("select key, value from tags")}
    kept = {path.parent.name for path in (store / "mlruns").rglob("*.*") if run in path.parts}
    return rows, labels | {"ablation"} if "ablation:true" in labels else labels, kept


def trackio_values(store: Path) -> tuple[list, set, set]:
    database = store / "trackio/shared.db"
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select step, metrics, run_name from metrics order by step").fetchall()
        ((text,),) = connection.execute("select config from configs")
        kinds = {kind for (kind,) in connection.execute("select type from artifacts")}
    config = json.loads(text)
    assert len({name for _, _, name in rows}) == 1
    labels = {f"{key}:{config[key]}" for key in ("profile", "parent", "cluster")} | set(config["tags"])
    return [(step, json.loads(values)[TAG]) for step, values, _ in rows], labels, kinds


VALUES = {"wandb": wandb_values, "mlflow": mlflow_values, "trackio": trackio_values}


@pytest.mark.parametrize("tracker", VALUES)
def test_resumed_run_is_one_tracker_run_with_every_step_once(tmp_path, monkeypatch, tracker):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = Run(tmp_path, tracker)
    with pytest.raises(KeyboardInterrupt):
        interrupted(run)
    with run.track() as ending:
        run.write(4, 5)
        ending.files.append((run.folder / "report.html", "report"))
    values, labels, artifacts = VALUES[tracker](tmp_path)
    assert values == [(step, 2.0 * step) for step in range(1, 6)]
    assert {"profile:tiny", "parent:first@20", "cluster:local 1 x 2 cpu", "ablation"} <= labels
    assert {"profile", "report"} <= artifacts


def test_mlflow_run_is_created_once_though_its_creation_is_not_answered_and_its_parameters_are_rejected(
    tmp_path, monkeypatch
):
    from mlflow.tracking import MlflowClient

    class Client(MlflowClient):
        def create_run(self, *arguments, **options):
            super().create_run(*arguments, **options)
            raise ConnectionError("no answer")

        def log_batch(self, run, metrics=(), params=()):
            if params:
                raise ValueError("too long")
            super().log_batch(run, metrics=metrics)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr("mlflow.tracking.MlflowClient", Client)
    monkeypatch.setattr(worker, "RETRY_SECONDS", (0.0,))
    errors, end = [], worker.EndMessage()

    def report(error):
        errors.append(str(error))
        if len(errors) > 2:
            end.received.set()  # ends the retries

    sender = worker.Sender(MlflowTracker(), end, report)
    of_run = {"name": "tiny", "project": "shared", "folder": tmp_path, "config": {"train.steps": 300}}
    run = TrackedRun(**of_run, labels={}, tags=(), identifier="new", resumes=False, report=sender.report)
    opened = sender.start(run)
    assert sender.send([{"step": 1, "loss": 2.0}])
    assert errors == ["no answer", "too long"]
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert database.execute("select run_uuid from metrics").fetchall() == [(opened,)]
        assert database.execute("select run_uuid from runs").fetchall() == [(opened,)]


RECORDING = """
import json, os, pathlib, time

class Recording:
    def start(self, run):
        self.file = pathlib.Path("calls.jsonl").open("a", buffering=1)
        self.write("start", run.identifier if run.resumes else "new", run.config["train.steps"], run.labels)
        return "mine"
    def write(self, *call):
        self.file.write(json.dumps(call) + "\\n")
    def log(self, step, metrics):
        self.write("log", step, metrics["time/step_seconds"])
    def flush(self):
        pass
    def artifact(self, path, kind):
        self.write("artifact", kind, path.name)
    def finish(self, state):
        self.write("finish", state)

class Evaluations(Recording):
    def log(self, step, metrics):
        if "loss/loss" not in metrics:
            self.write("evaluated", step, metrics)

class Failing(Recording):
    def log(self, step, metrics):
        raise ConnectionError("no route to http://me:p@ss/word@tracker/api")

class Hanging(Recording):
    def flush(self):
        time.sleep(600)
"""


@pytest.fixture
def tracker_calls(tmp_path, monkeypatch):
    """Working folder with the user's module my_trackers; returns a function that reads its classes' calls."""
    (tmp_path / "my_trackers.py").write_text(RECORDING)
    monkeypatch.chdir(tmp_path)

    def calls(kind: str) -> list:
        lines = (tmp_path / "calls.jsonl").read_text().splitlines() if Path("calls.jsonl").exists() else []
        return [call[1:] for call in map(json.loads, lines) if call[0] == kind]

    return calls


def test_only_steps_after_a_resumed_checkpoint_are_sent_again(tracker_calls, tmp_path):
    run = Run(tmp_path, "my_trackers:Recording")
    with run.track():
        run.write(1, 2, 3, 4)
        wait(lambda: len(tracker_calls("log")) == 4, 120)
        run.write(3, 4, 5, seconds=0.7, back_to=2)
    sent = [1, 0.5], [2, 0.5], [3, 0.5], [4, 0.5], [3, 0.7], [4, 0.7], [5, 0.7]
    assert tracker_calls("log") == list(sent)
    assert tracker_calls("finish") == [["finished"]]
    assert tracker_calls("start")[0][:2] == ["new", 300]


def test_late_evaluations_are_sent_once_to_the_same_run(tracker_calls, tmp_path):
    run = Run(tmp_path, "my_trackers:Evaluations")
    file = run.folder / "evaluations.jsonl"
    run.metrics.write_text('{"step": 0, "validation_loss": 5.5}\n')  # of the initial weights
    with run.track():
        run.write(1, 2)
        with run.metrics.open("a") as metrics:
            metrics.write('{"step": 2, "validation_loss": 4.5}\n')
        wait(lambda: len(tracker_calls("evaluated")) == 2, 120)
        file.write_text('{"step": 2, "validation_loss": 3.5}\n')
    file.write_text(file.read_text() + '{"step": 1, "lm_eval/arc/acc": 0.25}\n')
    report = run.folder / "report.json"
    report.write_text('{"evaluation": {}}')  # reports of early versions have no step
    process.catch_up(run.folder)
    assert tracker_calls("finish")[-1] == ["stopped"]  # its report is of fewer steps than it trains now
    train = run.profile.train.model_copy(update={"steps": 2})
    (run.folder / "profile.yaml").write_text(resolve.dump(run.profile.model_copy(update={"train": train})))
    report.write_text('{"evaluation": {"step": 2}}')
    process.catch_up(run.folder)
    assert tracker_calls("evaluated") == [
        [0, {"loss/validation_loss": 5.5}],
        [2, {"loss/validation_loss": 4.5}],
        [2, {"loss/validation_loss": 3.5}],
        [1, {"lm_eval/arc/acc": 0.25}],
    ]
    assert [start[0] for start in tracker_calls("start")] == ["new", "mine", "mine"]
    assert tracker_calls("finish")[-1] == ["finished"]


@pytest.mark.parametrize("kind", ["Failing", "Hanging"])
def test_failing_or_hanging_tracker_is_one_warning(tracker_calls, tmp_path, monkeypatch, caplog, kind):
    monkeypatch.setattr(process, "FINISH_SECONDS", 3.0 if kind == "Hanging" else 60.0)
    run = Run(tmp_path, f"my_trackers:{kind}")
    with caplog.at_level(logging.WARNING), run.track():
        run.write(*range(1, 400))
        wait(lambda: tracker_calls("start"), 120)
    (warning,) = [record.message for record in caplog.records]
    reason = {
        "Failing": "ConnectionError: no route to http://…@tracker/api",
        "Hanging": "did not finish within 3 s",
    }
    assert warning.startswith(f"tracker my_trackers:{kind}: {reason[kind]}; the run continues")


def test_no_tracker_is_imported_or_started_unless_named(tmp_path):
    run = Run(tmp_path)
    with run.track():
        run.write(1)
    assert not (run.folder / "trackers").exists()
    code = "import sys, tasks.tracking.worker, tasks.tracking.process; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"wandb", "mlflow", "trackio", "torch"} & set(imported.stdout.split())


def require_valid(tracker: str) -> None:
    profile = resolve.load("tiny", [f"tracking.trackers=[{tracker}]"])
    resolve.check(profile)
    resolve.check_start(profile)


def test_invalid_trackers_are_rejected_with_choices(tracker_calls, monkeypatch, tmp_path):
    constraints = tmp_path / "constraints.txt"  # of the environment that `make install` has created
    constraints.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    install = f"{tmp_path}/bin/pip install -c {constraints} -e '.[wandb]'"
    for value, reason in {
        "wandbb": "tracking.trackers.0 = wandbb: is not a tracker; nearest valid: wandb",
        "my_trackers:Recordin": "my_trackers.py has no Recordin; nearest valid: my_trackers:Recording",
        "no_such:Tracker": "there is no module no_such",
        "a b": "neither wandb, mlflow, trackio nor of the form module:Class",
        "wandb": f"is not installed; install it with: {install}",
    }.items():
        monkeypatch.setattr("profiles.rules.trackers.find_spec", lambda name: None)
        with pytest.raises(ProfileError, match=re.escape(reason)):
            require_valid(value)
