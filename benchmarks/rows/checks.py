"""Rows that verify rather than measure: check_device on given profiles, and tests marked `cuda`.

Their result is the number that passed, and the reasons for failures. Both run as a user would run them, in separate processes.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.harness.processes import TIMEOUT
from modeling.check_device import isolation
from profiles import resolve
from profiles.schema import Profile

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class CheckResult:
    """Result of a row: how many checks passed, and why others failed."""

    name: str
    title: str
    against: str
    counted: str  # such as "9 passed, 1 failed"
    failure: str | None = None

    @property
    def status(self) -> str:
        """ "failed" or "passed"."""
        return "failed" if self.failure else "passed"

    def to_json(self) -> dict[str, Any]:
        document = {"row": self.name, "title": self.title, "against": self.against}
        document |= {"status": self.status, "counted": self.counted}
        return {**document, "failure": self.failure} if self.failure else document


@dataclass(frozen=True)
class DeviceChecks:
    """The checks of check_device.

    Attributes:
        made: profiles on whose shapes kernels are checked.
        shipped: names of shipped profiles on whose shapes kernels are also checked.
    """

    made: tuple[Profile, ...]
    shipped: tuple[str, ...] = ()
    device: str = "cuda"
    name: str = "check-device"
    title: str = "check_device"
    against: str = "the CPU in float32"
    requires: str | None = None
    processes: int = 1

    def turns(self, _: object) -> int:
        """How many scripts run."""
        return 1

    def run(self, _: object, before_turn: Callable[[str], object]) -> CheckResult:
        before_turn("checks")
        with tempfile.TemporaryDirectory(prefix="benchmarks-profiles-") as folder:
            paths = [Path(folder, f"{profile.name}.yaml") for profile in self.made]
            for path, profile in zip(paths, self.made, strict=True):
                path.write_text(resolve.dump(profile))
            processes = isolation.default_processes(self.device)
            results = isolation.run_checks(self.device, processes, [*map(str, paths), *self.shipped])
        failed = [f"{check.name}: {result.measured}" for check, result, _ in results if not result.passed]
        counted = _counted(passed=len(results) - len(failed), failed=len(failed))
        return CheckResult(self.name, self.title, self.against, counted, "\n".join(failed) or None)


@dataclass(frozen=True)
class MarkedTests:
    """Tests marked `cuda`; a skipped test is a failure, unless `device` is cpu.

    Attributes:
        paths: test folders or files in the repository.
        timeout: seconds for all of them.
    """

    paths: tuple[str, ...] = ("tests",)
    device: str = "cuda"
    timeout: float = TIMEOUT
    name: str = "cuda-tests"
    title: str = "tests that need a GPU"
    against: str = "pytest -m cuda"
    requires: str | None = "pytest"
    processes: int = 1

    def turns(self, _: object) -> int:
        """How many scripts run."""
        return 1

    def run(self, _: object, before_turn: Callable[[str], object]) -> CheckResult:
        before_turn("tests")
        with tempfile.TemporaryDirectory(prefix="benchmarks-tests-") as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider"]
            command += ["--junitxml", str(report), *self.paths]
            try:
                environment = isolation.environment(self.device)
                ran = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=self.timeout
                )
            except subprocess.TimeoutExpired:
                return self._result("none finished", f"timed out after {self.timeout:.0f} s")
            if not report.exists():
                return self._result("none ran", "\n".join((ran.stdout + ran.stderr).splitlines()[-30:]))
            cases = [*ElementTree.parse(report).iter("testcase")]
        return self._outcome(cases, ran.returncode)

    def _outcome(self, cases: Sequence[ElementTree.Element], code: int) -> CheckResult:
        failed = [
            reason for case in cases for kind in ("failure", "error") if (reason := _reason(case, kind))
        ]
        skipped = [reason for case in cases if (reason := _reason(case, "skipped"))]
        passed = len(cases) - len(failed) - len(skipped)
        counted = _counted(passed=passed, failed=len(failed), skipped=len(skipped))
        if self.device == "cpu" and skipped:
            counted += " without a GPU"
        elif not failed:
            failed = skipped
        if not cases:
            failed = ["no test has the marker cuda"]
        elif code and not failed:
            failed = [f"pytest: exit code {code}"]
        return self._result(counted, "\n".join(failed) or None)

    def _result(self, counted: str, failure: str | None) -> CheckResult:
        return CheckResult(self.name, self.title, self.against, counted, failure)


def _counted(**counts: int) -> str:
    """Text such as "9 passed, 1 failed"; counts of zero are left out, except the first."""
    first, *others = counts.items()
    return ", ".join(f"{count} {word}" for word, count in (first, *(each for each in others if each[1])))


def _reason(case: ElementTree.Element, kind: str) -> str | None:
    """A test's name and the first line of its message, if it has a result of this kind."""
    found = case.find(kind)
    if found is None:
        return None
    lines = (found.get("message") or found.text or kind).strip().splitlines()
    return f"{case.get('name')}: {lines[0] if lines else kind}"
