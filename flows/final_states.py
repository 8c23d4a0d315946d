"""Final states of flow runs beyond Prefect's own, for outcomes that are neither crashes nor bugs.

Stopped (cancelled)   Ctrl-C or SIGTERM: in the terminal, by `trainshed up`, by Slurm; the message says what is saved
Rejected (failed)     an invalid profile or source; the same message as in the terminal, without a traceback
GateMissed (failed)   the evaluation of a run in a chain missed its gate
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed

from flows import working_folder
from flows.hooks import show_stop
from flows.runner import REJECTIONS, forward_logs
from flows.server.outages import shorten_retries
from flows.server.prefect_settings import GATE_MISSED, REJECTED, STOPPED
from tasks.chain_gate import GateMissed

P = ParamSpec("P")
R = TypeVar("R")


def final_states(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a flow's function to end in one of these states where Prefect would use Crashed or Failed.

    A rejection reaches the caller unchanged, a stop as `prefect.exceptions.CancelledRun`. The type is that of a call of the
    flow, which never returns a state.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> Any:
        working_folder.enter()
        forward_logs()
        try:
            with results.outermost() as keep:
                return keep(function(*arguments, **named))
        except REJECTIONS as error:
            return Failed(name=REJECTED, message=str(error), data=error)
        except GateMissed as error:
            return Failed(name=GATE_MISSED, message=str(error), data=error)
        except (KeyboardInterrupt, TerminationSignal, CancelledRun) as stop:
            shorten_retries()
            if _is_cancelled():  # which Prefect completes
                if isinstance(stop, CancelledRun):  # the signal reached a flow that this one called
                    raise TerminationSignal(signal.SIGTERM) from stop
                raise
            saved = show_stop(flow_run.id, flow_run.parameters)
            results.stop(saved)
            return Cancelled(name=STOPPED, message=saved)

    # Otherwise Prefect would evaluate the string annotations in this module's namespace.
    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return run


class Results:
    """How the outermost flow's function ended.

    Used if Prefect's server does not accept the flow's final state.

    Attributes:
        result: what it has returned; None if it has not.
        stopped: what is saved of it, if it was stopped; None if it was not.
    """

    def __init__(self) -> None:
        self.result: Any = None
        self.stopped: str | None = None
        self._active = 0
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget an earlier flow of this process."""
        self.result = self.stopped = None

    def stop(self, saved: str) -> None:
        """Record what a stopped flow has saved, unless another flow has called it."""
        with self._lock:
            if self._active == 0:
                self.stopped = saved

    @contextlib.contextmanager
    def outermost(self) -> Iterator[Callable[[R], R]]:
        """Yields a function that records the result of a flow, unless another flow has called it."""
        with self._lock:
            self._active += 1
            called = self._active > 1
            if not called:
                self.clear()

        def keep(result: R) -> R:
            if not called and not isinstance(result, State):
                self.result = result
            return result

        try:
            yield keep
        finally:
            with self._lock:
                self._active -= 1


results = Results()


def _is_cancelled() -> bool:
    """Whether the flow run is being cancelled in Prefect."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run.id).state
            return state is not None and state.is_cancelling()
    except Exception:  # an unreachable server has not cancelled it
        return False
