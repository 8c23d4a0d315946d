"""How a flow runs its steps: as Prefect tasks whose cached results count only while their artifacts are whole.

Prefect remembers under a step's key that it was done; the store knows whether what it made is still there. Only both
together make a step cached. Prefect's records are small JSON files in `<store>/prefect/`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.filesystems import RemoteFileSystem
from prefect.logging.handlers import APILogHandler
from prefect.states import Completed

from flows.ui.console import OURS, in_one_line
from flows.ui.plan import sentence
from modeling.planning.planner import Plan
from modeling.training import anomalies
from profiles.errors import ProfileError
from tasks import graphs, keys
from tasks.failures import Hopeless
from tasks.reporting.format import format_duration, format_value
from tasks.reporting.outcome import Outcome
from tasks.sources.shard import DAMAGED
from tasks.store import run_artifacts, runs
from tasks.store.artifacts import Artifact
from tasks.store.store import Store
from tasks.tokenization.worker_pool import Ended

log = logging.getLogger(__name__)

ANY_NUMBER = 1_000_000  # of retries, where Prefect is not to count them


class Runner:
    """Runs the steps of one flow run, one after another, and remembers what became of each."""

    def __init__(self, store: Store) -> None:
        self.outcomes: list[Outcome] = []
        self._store = store
        self._results = _result_storage(store)
        self._folder: Path | None = None
        self._failures: list[dict[str, Any]] = []  # that are to be recorded once there is a folder

    def record_in(self, folder: Path) -> None:
        """The run's folder, whose events.jsonl is told of attempts that fail, and of those that did before."""
        self._folder = folder
        for failure in self._failures:
            anomalies.record(folder, **failure)
        self._failures.clear()

    def always(self, step: Task[..., Any], *arguments: Any) -> Any:
        """A step that is done every time."""
        return self._run(step, *arguments)

    def once(
        self,
        step: Task[..., Artifact],
        kind: str,
        key: str,
        *arguments: Any,
        run_folder: Path | None = None,
        patience: int | None = None,
    ) -> Artifact:
        """A step whose artifact of this kind and key is reused while it is whole.

        Args:
            run_folder: of the run that the artifact points into, where it does.
            patience: attempts in a row that may fail without a new checkpoint in that folder, where that is how its attempts
                are counted: a long run may fail any number of times, as long as it gets on.
        """
        if run_folder is None:
            known = self._store.artifacts.find(kind, key)
        else:
            known = run_artifacts.find(self._store, kind, key, run_folder.name)
        record = f"{kind}-{key}"
        step = step.with_options(
            cache_key_fn=lambda *_: record,
            refresh_cache=known is None,
            persist_result=True,
            result_serializer="json",
            result_storage=self._results,
        )
        getting_on = None
        if run_folder is not None and patience is not None:
            step = step.with_options(retries=ANY_NUMBER)
            getting_on = GettingOn(self._store, run_folder, patience)
        return self._run(step, *arguments, known=known, getting_on=getting_on)

    def skip(self, name: str, reason: str) -> None:
        """A step that this run does not need, shown as such."""
        self._run(_nothing.with_options(name=name, task_run_name=name), reason)

    def _run(
        self,
        step: Task[..., Any],
        *arguments: Any,
        known: Artifact | None = None,
        getting_on: GettingOn | None = None,
    ) -> Any:
        begun = time.monotonic()
        retries = 0

        def condition(_: Task[..., Any], run: TaskRun, state: State) -> bool:
            nonlocal retries
            worth = worth_retrying(step, run, state) and (getting_on is None or getting_on.failed())
            if worth:
                retries += 1
                self._record(step.name, "tried again", state)
            return worth

        if step.retry_condition_fn is not None:
            step = step.with_options(retry_condition_fn=condition)
        # Called directly, never submitted: so a cancellation reaches the step, which then ends its children.
        state = step(*arguments, return_state=True)
        seconds = time.monotonic() - begun
        if not state.is_completed():
            self._note(Outcome(step.name, "failed", seconds, retries=retries))
            self._record(step.name, "failed", state)
        # Prefect's record may be from a time when the store lay elsewhere: what the store says now counts.
        result = known or state.result()  # which raises what made the step fail
        if state.name == "Skipped":
            self._note(Outcome(step.name, "skipped", None, state.message or ""))
        elif isinstance(result, Artifact):
            how, took = ("done", seconds) if known is None else ("cached", known.seconds)
            self._note(Outcome(step.name, how, took, describe(result), result.summary, retries))
        else:
            self._note(Outcome(step.name, "done", seconds, describe(result), retries=retries))
        return result

    def _record(self, name: str, how: str, state: State) -> None:
        """An attempt that failed, with the step of training that it got to."""
        failure = state.result(raise_on_failure=False)
        reason = in_one_line(failure) if isinstance(failure, Exception) else state.message
        event = {"event": f"{name} {how}", "time": round(time.time(), 3), "reason": reason}
        if self._folder is None:
            self._failures.append(event)
            return
        rows = runs.read_metrics(self._folder) if name == "train" else ()
        anomalies.record(self._folder, **event, **({"step": rows[-1]["step"]} if rows else {}))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        took = (
            format_duration(outcome.seconds) if outcome.how in ("done", "failed") and outcome.seconds else ""
        )
        log.info("%s", f"{outcome.step:<10}  {outcome.how:<7}  {took:>7}  {outcome.note}".rstrip())


class GettingOn:
    """Whether a run that fails again and again gets on in between: each new checkpoint makes good for what failed before.

    Args:
        patience: failures in a row, without one, after which it is tried again.
    """

    def __init__(self, store: Store, folder: Path, patience: int) -> None:
        self._store, self._folder, self._patience = store, folder, patience
        self._in_a_row = 0
        self._newest = self._newest_checkpoint()

    def failed(self) -> bool:
        """Note a failure; whether it is to be tried again."""
        newest = self._newest_checkpoint()
        if newest > self._newest:
            self._newest, self._in_a_row = newest, 0
        self._in_a_row += 1
        return self._in_a_row <= self._patience

    def _newest_checkpoint(self) -> int:
        return max(self._store.run_folder(self._folder.name).checkpoint_steps(), default=0)


@task
def _nothing(reason: str) -> State:
    return Completed(name="Skipped", message=reason)


def worth_retrying(step: Task[..., Any], run: TaskRun, state: State) -> bool:
    """Whether another attempt could end better: not where the user's input was refused, or memory was too small."""
    try:
        state.result()
    except (ProfileError, *DAMAGED, Ended, Hopeless):
        return False
    except Exception:
        return True
    return False


def describe(result: Any) -> str:
    """What a step came to, in a line."""
    if isinstance(result, Plan):
        return sentence(result)
    if not isinstance(result, Artifact):
        return ""
    facts = result.summary
    match result.kind:
        case "tokenizer":
            return f"{facts['vocabulary_size']:,} tokens, from {facts['source']}"
        case "dataset":
            return f"{facts['tokens']:,} tokens to train on, {facts['validation_tokens']:,} held out"
        case "checkpoint":
            return f"{facts['bytes'] / 1e6:,.1f} MB of weights, from {facts['source']}"
        case "graphs":
            return facts.get("note") or graphs.counted(facts["total"])
        case "training":
            return f"loss {facts['loss']:.4f} after {facts['steps']:,} steps"
        case "evaluation":
            own = "".join(
                f", {name} {format_value(value)}" for name, value in facts.get("metrics", {}).items()
            )
            return (
                f"validation loss {facts['validation_loss']:.4f}, perplexity {facts['perplexity']:.1f}{own}"
            )
        case "export":
            return f"{facts['bytes'] / 1e6:,.1f} MB"
    return ""


def forward_logs() -> None:
    """Let Prefect's UI have our log lines, next to those of its own."""
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            handler = APILogHandler()
            handler.addFilter(lambda _: bool(TaskRunContext.get() or FlowRunContext.get()))
            logger.addHandler(handler)


def _result_storage(store: Store) -> Path | RemoteFileSystem:
    if "://" not in store.uri:
        return Path(store.uri).absolute() / "prefect"
    block = RemoteFileSystem(basepath=f"{store.uri}/prefect")
    block.save(f"trainshed-{keys.digest(store.uri)[:16]}", overwrite=True)  # Prefect takes saved blocks only
    return block
