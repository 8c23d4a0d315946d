"""A trace of a few steps, where the profile asks for one: `cluster.trace = [first, last]`.

torch.profiler's Chrome trace of the leading rank, RUN/traces/steps_<first>-<last>.json.gz, to be opened in Perfetto or
chrome://tracing. Steps that are traced are slower (some percent); the others cost nothing.
"""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile, supported_activities

FOLDER = "traces"


class StepTrace:
    """Traces steps `first` to `last` of this process; `steps` None traces none."""

    def __init__(self, run: Path, steps: tuple[int, int] | None) -> None:
        self._folder, self._steps = run / FOLDER, steps
        self._under_way: profile | None = None

    def begin(self, step: int) -> None:
        """Before the step's work; a run that resumes between the two traces what is left of them."""
        if self._steps and self._under_way is None and self._steps[0] <= step <= self._steps[1]:
            self._first = step
            self._under_way = profile(activities=supported_activities(), record_shapes=True)
            self._under_way.start()

    def end(self, step: int) -> Path | None:
        """After the step's work; the trace's file, where this step was the last of it."""
        if self._steps is None or self._under_way is None or step < self._steps[1]:
            return None
        self._under_way.stop()
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"steps_{self._first}-{step}.json.gz"
        self._under_way.export_chrome_trace(str(path))
        self._under_way = None
        return path
