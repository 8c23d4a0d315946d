"""Flows in this process without Prefect's engine and server.

Steps are plain calls; displays and events go nowhere.

    with without_prefect() as results: main(["run", ...])

A cached run takes a second of CPU this way. Prefect's own part, such as retries with pauses and concurrency, is not tested.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass
class State:
    """Subset of Prefect's State that flows use, of a task that has ended."""

    value: Any = None
    error: Exception | None = None
    name: str = "Completed"
    message: str | None = None

    def is_completed(self) -> bool:
        return self.error is None and self.name != "Cancelled"

    @property
    def wrapped_future(self) -> Future[Any]:
        """A future that is done: as one of a mapped task, a state has what its function returned."""
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def result(self, raise_on_failure: bool = True) -> Any:
        if self.error is not None and raise_on_failure:
            raise self.error
        return self.error or self.value


class Task:
    """Subset of Prefect's Task: calls its function at once, and retries it without a pause."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.function = function
        self.retries = min(options.get("retries", 0), 4)
        self.may_retry = options.get("retry_condition_fn", lambda *_: True)

    def __call__(self, *arguments: Any, return_state: bool = False) -> Any:
        state = self._attempt(arguments)
        for _ in range(self.retries):
            if state.error is None or not self.may_retry(None, None, state):
                break
            state = self._attempt(arguments)
        return state if return_state else state.result()

    def map(self, function: Any, items: list[Any], names: list[str]) -> list[State]:
        pairs = zip(items, names, strict=True)
        return [self(function, item, name, return_state=True) for item, name in pairs]

    def _attempt(self, arguments: tuple[Any, ...]) -> State:
        try:
            value = self.function(*arguments)
        except Exception as error:
            return State(error=error, name="Failed", message=repr(error))
        if hasattr(value, "is_completed"):  # one of Prefect's states
            return State(value.data, name=value.name, message=value.message)
        return State(value)


@contextlib.contextmanager
def without_prefect() -> Iterator[list[Any]]:
    """Replace Prefect in the flows pretrain, evaluate and export, and in their commands.

    Yields the flows' results.
    """
    import flows.alerts.events
    import flows.cli.evaluate
    import flows.cli.run
    import flows.evaluate
    import flows.export
    import flows.pretrain
    from flows.runner import step_task

    results: list[Any] = []

    def run_flow(_options: Any, _profile: Any, _name: str, start: Callable[[], Any], _show: Any) -> int:
        results.append(start())
        return 0

    replaced = [
        (step_task, "task", lambda **options: lambda function: Task(function, **options)),
        (step_task, "map_item", Task(step_task.map_item.fn)),
        (step_task, "unmapped", lambda value: value),
        (flows.alerts.events, "emit_event", lambda *_, **__: None),
        (flows.cli.run, "run_flow", run_flow),
        (flows.cli.evaluate, "run_flow", run_flow),
    ]
    for module, name in (
        (flows.pretrain, "pretrain"),
        (flows.evaluate, "evaluate"),
        (flows.export, "export"),
    ):
        replaced.append((module, name, getattr(module, name).fn.__wrapped__))
    with contextlib.ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield results
