"""Runner: a new step is one class and one line in a flow, cache and concurrency included."""

import errno
import json
import threading
import time
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.runner import THREADS, Runner, retries
from flows.runner.records import Failures
from profiles import resolve
from profiles.files import run_files
from tasks import keys
from tasks.failures import FatalError
from tasks.step import Context, Step
from tasks.steps import training
from tasks.steps.training import RetryBudget
from tasks.store import activities, runs
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.run_folder import RunFolder
from tasks.store.store import Store
from tests.flows.cli.test_up import ask
from tests.waiting import until


@dataclass
class ToyStep(Step):
    """Writes a number to a file, once the other step at its barrier is running too."""

    number: int
    barrier: threading.Barrier | None = None
    made: ClassVar[list[int]] = []

    kind = "toy"
    name = "toy"

    def key(self, context):
        return keys.digest({"step": self.kind, "number": self.number})

    def make(self, context, key):
        self.made.append(self.number)
        if self.barrier:
            self.barrier.wait(timeout=60)
        with context.store.artifacts.publish(self.id(key), {"number": self.number}) as folder:
            (folder / "number").write_text(str(self.number))
        return context.store.artifacts.expect(self.id(key))

    def describe(self, summary):
        return f"number {summary['number']}"


@dataclass
class EndlessStep(Step):
    """Runs until it is interrupted, and so are the others at its barrier."""

    barrier: threading.Barrier
    begun: threading.Event = field(default_factory=threading.Event)
    ended: list[str] = field(default_factory=list)

    kind = "endless"
    name = "endless"

    def key(self, context):
        return keys.digest([self.kind, id(self)])

    def make(self, context, key):
        self.begun.set()
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            self.barrier.wait(timeout=20)
            self.ended.append(type(error).__name__)
            raise


def _broken_barrier():
    barrier = threading.Barrier(2)
    barrier.abort()
    return barrier


@pytest.fixture
def context(prefect_server, tmp_path):
    ToyStep.made.clear()
    return Context(resolve.load("tiny"), Store(str(tmp_path / "store")))


def test_background_step_runs_concurrently_in_prefect_and_both_steps_are_cached(context, prefect_server):
    def until_both_are_shown():
        """While both wait at the barrier."""
        running = {"state": {"type": {"any_": ["RUNNING"]}}}
        filters = {"task_runs": running, "flow_runs": {"id": {"any_": flow_runs}}}
        until(lambda: len(ask(f"{prefect_server}/task_runs/filter", filters)) >= 2, 50, every=0.2)

    flow_runs = []

    @flow(task_runner=THREADS)
    def toys(barrier):
        flow_runs.append(flow_run.id)
        with Runner(context) as runner:
            first = runner.start(ToyStep(1, barrier))
            second = runner.run(ToyStep(2, barrier))
            return [first.result().summary, second.summary], runner.outcomes

    summaries, outcomes = toys(threading.Barrier(2, until_both_are_shown, timeout=60))
    assert summaries == [{"number": 1}, {"number": 2}]
    assert [(outcome.how, outcome.note) for outcome in outcomes] == [
        ("done", "number 1"),
        ("done", "number 2"),
    ]
    _, outcomes = toys(None)
    assert [outcome.how for outcome in outcomes] == ["cached", "cached"]
    assert sorted(ToyStep.made) == [1, 2]


def test_background_steps_are_interrupted_together_when_the_flow_fails(context):
    barrier = threading.Barrier(2)
    steps = EndlessStep(barrier), EndlessStep(barrier)

    @flow(task_runner=THREADS)
    def failing():
        with Runner(context) as runner:
            for step in steps:
                runner.start(step)
                step.begun.wait(60)
            raise ValueError("the flow fails")

    with pytest.raises(ValueError, match="the flow fails"):
        failing()
    assert [step.ended for step in steps] == [["Interrupted"], ["Interrupted"]]


def test_background_step_that_waits_for_its_retry_is_interrupted(context, monkeypatch):
    @flow(task_runner=THREADS)
    def interrupting():
        with Runner(context) as started:
            background = started.start(ToyStep(1, _broken_barrier()))
            until(lambda: background.task.retries)
            background.interrupt()
            return started.outcomes

    monkeypatch.setattr(retries, "DELAYS", {"retry_delay_seconds": 1})
    (outcome,) = interrupting()
    assert (outcome.how, ToyStep.made) == ("stopped", [1])


def test_flow_that_reads_a_run_keeps_artifacts_recorded_meanwhile(context, tmp_path):
    run = context.store.run_folder("tiny")
    run.write(run_files.ARTIFACTS, json.dumps({"export": ["old"], "toy": ["old"]}).encode())
    reader = Runner(replace(context, folder=tmp_path / "store/runs/tiny"), keeps_recorded=True)
    run.write(run_files.ARTIFACTS, json.dumps({"export": ["new"], "toy": ["new"]}).encode())
    reader.record_use(Artifact(ArtifactId("toy", "own")))
    assert json.loads(run.read(run_files.ARTIFACTS)) == {"export": ["new"], "toy": ["new", "own"]}


def test_failures_are_recorded_in_the_folder_that_is_opened_meanwhile(tmp_path):
    """A background step may fail at any moment."""
    failures, failed = Failures(None), Failed(message="out of memory")
    failures.record("graphs", "retried", failed)
    failures.open(tmp_path)
    failures.record("graphs", "failed", failed)
    events = map(json.loads, (tmp_path / run_files.EVENTS).read_text().splitlines())
    assert [event["event"] for event in events] == ["graphs retried", "graphs failed"]


def test_failed_step_is_retried_although_its_run_folder_cannot_be_read(context, tmp_path, monkeypatch):
    @dataclass
    class TrainStep(ToyStep):
        """Fails once, by an outage of the storage, which does not spend its retry budget."""

        name = "train"

        def may_retry(self, context):
            return RetryBudget(context.store.run_folder("run"), 0).spend

        def make(self, context, key):
            if not self.made:
                self.made.append(self.number)
                raise OSError(errno.EIO, "the first attempt fails")
            return super().make(context, key)

    @flow(task_runner=THREADS)
    def retrying():
        with Runner(replace(context, folder=tmp_path)) as started:
            return started.run(TrainStep(1)).summary

    def unreadable(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(RunFolder, "checkpoint_steps", unreadable)
    monkeypatch.setattr(runs, "last_training_row", unreadable)
    monkeypatch.setattr(training, "OUTAGE_PAUSES", (0.1,))
    monkeypatch.setattr(retries, "DELAYS", {"retry_delay_seconds": 0})
    assert retrying() == {"number": 1}
    assert ToyStep.made == [1, 1]


def test_step_is_not_retried_once_another_process_has_taken_over_the_run(context, monkeypatch):
    store = context.store

    @dataclass
    class SuspendedStep(ToyStep):
        """Fails after the run's lock has expired and another process has acquired it."""

        def make(self, context, key):
            self.made.append(self.number)
            store.backend.write("locks/run-tiny/9", b"{}")
            raise OSError(errno.EIO, "the first attempt fails")

    @flow(task_runner=THREADS)
    def suspended():
        with activities.begin(store, "run", "tiny") as lock, Runner(context, lock) as started:
            started.run(SuspendedStep(1))

    monkeypatch.setattr(retries, "DELAYS", {"retry_delay_seconds": 0})
    with pytest.raises(FatalError, match="run tiny: another process took over its lock"):
        suspended()
    assert ToyStep.made == [1]


def test_failed_background_step_raises_where_its_result_is_needed(context):
    @flow(task_runner=THREADS)
    def failing():
        with Runner(context) as runner:
            broken = runner.start(ToyStep(1, _broken_barrier()))
            runner.run(ToyStep(2))
            broken.result()

    with pytest.raises(threading.BrokenBarrierError):
        failing()
    assert ToyStep.made.count(2) == 1
