"""The overview of a failed flow run shows the run folder that it worked in."""

import json
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import AwaitingRetry, State

from flows.experiments.branches import branches
from flows.experiments.ladder import ladder
from flows.experiments.mixture import mixture
from flows.experiments.share import share
from flows.export import export
from flows.final_states import final_states
from flows.hooks import EXPERIMENT_HOOKS, cancel_jobs, cancel_subflow_jobs, show_failure
from flows.pretrain import pretrain
from profiles import resolve
from profiles.errors import ProfileError
from tasks.launchers import Job
from tasks.launchers.local import LocalLauncher
from tasks.store import runs
from tasks.store.store import Store
from tests.flows.micro import logged, newest, shown

ROUND = ["train.steps=null", "train.epochs=1"]


@pytest.fixture
def store(profile, tmp_path):
    """A store with a finished run, and a round of eight steps that reached the third and saved the second."""
    store = tmp_path / "store"
    for name, steps, done in (("nightly", 6, 6), ("nightly-round-1", 8, 8), ("nightly-round-2", 8, 3)):
        folder = store / "runs" / name
        folder.mkdir(parents=True)
        run = resolve.load(str(profile), [f"train.steps={steps}"], name)
        (folder / "profile.yaml").write_text(resolve.dump(run))
        rows = ({"step": step, "loss": 9.0 - step} for step in range(1, done + 1))
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        marker = folder / f"checkpoints/step_{done - done % 2}/complete.json"
        marker.parent.mkdir(parents=True)
        marker.write_text("{}")
    return store


def failed(profile, store, works_in: str | None) -> str:
    """The overview of a failed flow run on the run `nightly`, after it recorded its id in a run folder."""

    @flow(name="failing", flow_run_name="fails", on_failure=[show_failure])
    def failing(profile: str, overrides: list[str], name: str | None, store: str) -> None:
        if works_in:
            with open(f"{store}/runs/{works_in}/flow-run", "w") as record:
                record.write(str(flow_run.id))
        raise RuntimeError("the disk is full")

    failing(str(profile), ROUND, "nightly", str(store), return_state=True)
    page = shown("fails")["run"]
    assert page.startswith("# Failed\n\n**What happened:** the disk is full")
    return page


def test_failed_round_is_shown_with_its_own_curve_logs_and_checkpoints(prefect_server, profile, store):
    (store / "runs/nightly/flow-run").write_text("another flow run")
    page = failed(profile, store, "nightly-round-2")
    assert "Step 3 of 8, loss 6.0000" in page
    assert "data:image" in page
    assert "resumes from step 2, its latest checkpoint" in page
    assert f"{store}/runs/nightly-round-2/logs" in page
    assert "trainshed tensorboard nightly-round-2" in page


def test_failure_before_the_run_folder_exists_shows_the_existing_run(prefect_server, profile, store):
    assert "All 6 steps are done" in failed(profile, store, None)


def test_failed_export_has_an_overview(prefect_server, store):
    with pytest.raises(ProfileError):
        export("nightly-round-1", str(store))
    page = shown("nightly-round-1")["run"]
    assert page.startswith("# Rejected")
    assert "**What to do next:** change `run`" in page
    assert "**Retry**" not in page
    assert "no such run in" in page
    assert "All 8 steps are done" in page


def test_cancellation_ends_the_compiles_of_a_flow_run_whose_process_is_gone(profile, tmp_path):
    """Beside links to themselves, which are no folders of its jobs."""
    store = Store(str(tmp_path / "store"))
    runs_folder = store.run_folder("micro").path.parent
    runs_folder.mkdir(parents=True)
    for link in (store.scratch_folder("graphs").with_name("loop"), runs_folder / "micro-round-1"):
        link.symlink_to(link)
    jobs = []
    for name, owner in ("graphs-ours", "ours"), ("graphs-theirs", "theirs"):
        work = store.scratch_folder(name)
        runs.record_flow_run(work, owner)
        jobs.append(LocalLauncher().submit(Job("compile-loss", "http.server", ("0",), work / "logs")))
    ours, theirs = jobs
    cancelled = SimpleNamespace(id="ours", parameters={"profile": str(profile), "store": store.uri})
    cancel_jobs(None, cancelled, None)
    launcher = LocalLauncher()
    try:
        assert not launcher.location(ours)
        assert launcher.location(theirs)
    finally:
        launcher.cancel(theirs, grace=0)


def test_cancellation_ends_the_jobs_of_unfinished_subflows_whose_process_is_gone(
    prefect_server, profile, tmp_path
):
    store = Store(str(tmp_path / "store"))
    jobs, parents = {}, []

    @flow
    def member(profile: str, overrides: list[str], name: str, store: str) -> None:
        folder = Store(store).run_folder(name).path
        (folder / "logs").mkdir(parents=True)
        (folder / "profile.yaml").write_text(resolve.dump(resolve.load(profile, overrides, name)))
        runs.record_flow_run(folder, str(flow_run.id))
        jobs[name] = LocalLauncher().submit(Job("train", "http.server", ("0",), folder / "logs"))
        if name != "finished":
            raise RuntimeError("its process ended")

    @flow(**EXPERIMENT_HOOKS)
    def experiment() -> None:
        parents.append(flow_run.id)
        for name in ("broken", "interrupted", "finished"):
            member(str(profile), ROUND, name, store.uri, return_state=True)

    launcher = LocalLauncher()
    try:
        experiment()
        (store.run_folder("broken").path / "profile.yaml").write_text("none")
        (hook,) = experiment.on_cancellation_hooks
        hook(experiment, SimpleNamespace(id=parents[0]), None)
        assert [name for name in jobs if launcher.location(jobs[name])] == ["broken", "finished"]
    finally:
        for job in jobs.values():
            launcher.cancel(job, grace=0)


@pytest.mark.parametrize(
    "experiment", [branches, ladder, mixture, share], ids=lambda experiment: experiment.name
)
def test_cancellation_of_an_experiment_cancels_the_jobs_of_its_runs(experiment):
    assert experiment.on_cancellation_hooks == [cancel_subflow_jobs]


def test_stop_during_a_called_flow_stops_the_caller(prefect_server):
    @flow(name="called")
    @final_states
    def called() -> None:
        raise KeyboardInterrupt

    @flow(name="caller")
    @final_states
    def caller() -> None:
        called()

    assert caller(return_state=True).name == "Stopped"


def retried(name: str) -> State:
    """The final state of a flow run of `pretrain` after Retry in Prefect's UI."""
    with get_client(sync_client=True) as client:
        run = newest(client, name)
        client.set_flow_run_state(run.id, AwaitingRetry())
        run = client.read_flow_run(run.id)
        return run_flow(pretrain, run, parameters=run.parameters, return_type="state")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=0", "train.steps = 0: "),  # rejected before there is a step
        ("train.micro_batch_size=4096", "train.global_batch_size = 4: "),
        ("data.sources=[{kind: files, path: /nowhere}]", "/nowhere"),  # by a step
    ],
    ids=lambda value: value.partition("=")[0],
)
def test_rejected_input_is_a_message_without_a_traceback(
    prefect_server, profile, tmp_path, override, message
):
    name = uuid4().hex
    state = pretrain(str(profile), [override], name, str(tmp_path / "store"), return_state=True)
    assert (state.name, state.is_failed()) == ("Rejected", True)
    assert message in state.message
    with pytest.raises(ProfileError) as rejected:
        state.result()
    assert state.message == str(rejected.value)
    assert retried(name).message == state.message
    lines = logged(name)
    assert sum(message in line for line in lines) == 2
    assert not any("Traceback" in line or "hook" in line for line in lines)
