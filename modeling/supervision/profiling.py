"""Profiler trace of a range of steps: `cluster.trace = [first, last]`.

Writes torch.profiler's Chrome trace of the leading rank to RUN/traces/steps_<first>-<last>.json.gz, for Perfetto or
chrome://tracing. An attempt that trains only part of the range writes a trace of that part. Traced steps are a few percent
slower; other steps are not affected.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch.profiler import profile, supported_activities

from profiles.files import state_files

FOLDER = "traces"
log = logging.getLogger(__name__)


class StepTrace:
    """Traces steps `first` to `last` of this process; None traces nothing."""

    def __init__(self, run: Path, steps: tuple[int, int] | None) -> None:
        self._folder, self._steps = run / FOLDER, steps
        self._profiler: profile | None = None

    def begin(self, step: int) -> None:
        """Call before a step; a run that resumes within the range traces the rest of it."""
        if self._steps and self._profiler is None and self._steps[0] <= step <= self._steps[1]:
            self._first = step
            self._profiler = profile(activities=supported_activities(), record_shapes=True)
            self._profiler.start()

    @property
    def active(self) -> bool:
        """Whether steps are being traced: then call `write` before the process ends."""
        return self._profiler is not None

    def ends_with(self, step: int) -> bool:
        """Whether a trace ends with this step: then call `write` after it."""
        return self._steps is not None and self.active and step >= self._steps[1]

    def write(self, step: int) -> None:
        """Write the trace after the last step, which takes up to minutes; a failure is a warning."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None  # `active`
        profiler.stop()
        path = self._folder / f"steps_{self._first}-{step}.json.gz"
        try:
            state_files.make_folder(self._folder)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            log.warning(f"{path}: the trace cannot be written: {error}; continuing without it")
        else:
            log.info(f"trace of the last steps: {path}")
