"""Conformance suite for launchers (contract of `base.Launcher`), to subclass in a pytest file:

    from tasks.launchers.conformance import LauncherConformance

    class TestMyLauncher(LauncherConformance):
        def create(self):
            return MyLauncher(...)

`create` returns a new launcher each time, as another process would have it. Jobs run `tasks.launchers.conformance_job`, which
must be importable where they run, and use folders below `tmp_path`, which jobs must see under the same path.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiles.files import folders, state_files
from tasks.launchers.base import START, Handle, Job, JobFailed, Launcher, execute
from tasks.launchers.conformance_job import FAILURE

SECRET = ("CONFORMANCE_SECRET", "kept in no file")


class ModuleJob(Job):
    """A job that starts as those of training do: forked, if it has ranks."""

    @property
    def module(self) -> list[str]:
        return [START, self.program]


class LauncherConformance:
    """The tests. Subclasses may set `seconds` for a job to start or end, and `ranks` (0 skips their test)."""

    seconds = 120.0
    ranks = 2

    def create(self) -> Launcher:
        """A new launcher."""
        raise NotImplementedError

    def test_job_gets_folder_secrets_and_log_and_ends(self, tmp_path: Path) -> None:
        os.environ["PREFECT_API_KEY"] = "only for the flow"
        job = self.job(tmp_path, secrets=(SECRET,))
        job.folder.mkdir()
        job.log_file.write_text("an earlier job\n")
        (tmp_path / "finish").touch()
        try:
            self.execute(job)
        finally:
            del os.environ["PREFECT_API_KEY"]
        found = facts(tmp_path)
        assert found["folder"] == os.getcwd()
        assert found["safe_path"]
        assert found["secrets"] == {SECRET[0]: SECRET[1], "PREFECT_API_KEY": None}
        assert job.log_file.read_text().startswith("an earlier job\n")
        assert "rank 0 runs\n" in job.log_file.read_text()
        known = json.loads(job.handle_file.read_text())
        assert known["identifier"]
        assert known["log_start"] == len("an earlier job\n")
        files = (entry for _, entry in folders.walk(tmp_path) if entry.is_file())
        texts = {entry.path: Path(entry).read_text(errors="replace") for entry in files}
        assert [path for path, text in texts.items() if SECRET[1] in text] == [str(tmp_path / "rank-0.json")]

    def test_failure_has_the_exit_code_and_the_last_lines(self, tmp_path: Path) -> None:
        (tmp_path / "finish").touch()
        job = self.job(tmp_path, "fail")
        failure = self.failure(job)
        assert failure.exit_code == FAILURE
        assert "rank 0 runs" in failure.detail
        assert str(job.log_file) in str(failure)

    def test_another_process_finds_the_running_job_and_no_other(self, tmp_path: Path) -> None:
        launcher, job = self.create(), self.job(tmp_path)
        handle = launcher.submit(job)
        facts(tmp_path, self.seconds)
        other = self.create()
        found = other.find(job)
        assert found is not None
        assert (found.identifier, found.log_start) == (handle.identifier, handle.log_start)
        assert other.poll(found).running
        assert other.location(found)
        assert other.find(self.job(tmp_path, "fail")) is None
        (tmp_path / "finish").touch()
        self.wait(lambda: not other.poll(found).running and not launcher.poll(handle).running)
        self.wait(lambda: other.find(job) is None and not other.location(found))

    def test_job_with_another_signature_replaces_the_running_one_after_it_saved(self, tmp_path: Path) -> None:
        launcher = self.create()
        launcher.submit(self.saving_job(tmp_path))
        first = facts(tmp_path, self.seconds)
        (tmp_path / "rank-0.json").unlink()
        handle = launcher.submit(self.saving_job(tmp_path, "other"))
        assert state_files.exists(tmp_path / "saved-0")
        assert facts(tmp_path, self.seconds)["pid"] != first["pid"]
        self.cancel(launcher, handle, grace=10)

    def test_cancelled_job_may_save_and_a_stubborn_one_is_killed(self, tmp_path: Path) -> None:
        for order, grace in ("obedient", 30.0), ("stubborn", 1.0):
            folder = tmp_path / order
            folder.mkdir()
            launcher = self.create()
            handle = launcher.submit(self.saving_job(folder, order))
            facts(folder, self.seconds)
            self.cancel(launcher, handle, grace)
            assert state_files.exists(folder / "saved-0") == (order == "obedient")
            launcher.cancel(handle, grace)  # no effect on a job that has ended

    def test_every_start_has_the_next_attempt_number(self, tmp_path: Path) -> None:
        (tmp_path / "finish").touch()
        for attempt in (1, 2):
            self.execute(self.saving_job(tmp_path))
            assert facts(tmp_path)["attempt"] == attempt
            assert (tmp_path / "attempt").read_text() == str(attempt)

    def test_ranks_run_side_by_side_and_prefix_their_lines(self, tmp_path: Path) -> None:
        if not self.ranks:
            return
        (tmp_path / "finish").touch()
        job = self.job(tmp_path, processes=self.ranks, threads=1)
        self.execute(job)
        for rank in range(self.ranks):
            assert facts(tmp_path, rank=rank)["world_size"] == str(self.ranks)
            assert f"[rank {rank}] rank {rank} runs\n" in job.log_file.read_text()

    def job(self, folder: Path, *orders: str, **options: Any) -> Job:
        program = "tasks.launchers.conformance_job"
        return ModuleJob("conformance", program, (str(folder), *orders), folder / "logs", **options)

    def saving_job(self, folder: Path, *orders: str) -> Job:
        """A job that saves when it is asked to stop."""
        return self.job(folder, *orders, attempt_file=folder / "attempt")

    def execute(self, job: Job) -> None:
        execute(self.create(), job, timeout=self.seconds)

    def failure(self, job: Job) -> JobFailed:
        """The failure of a job that must fail."""
        try:
            self.execute(job)
        except JobFailed as failure:
            return failure
        raise AssertionError("a job that ended with an exit code other than 0 did not raise JobFailed")

    def cancel(self, launcher: Launcher, handle: Handle, grace: float) -> None:
        launcher.cancel(handle, grace)
        self.wait(lambda: not launcher.poll(handle).running)
        assert not launcher.location(handle)

    def wait(self, condition: Callable[[], bool]) -> None:
        wait(condition, self.seconds)


def wait(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds; raises AssertionError."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds:.0f} s"
        time.sleep(0.05)


def facts(folder: Path, seconds: float = 5.0, rank: int = 0) -> dict[str, Any]:
    """What a rank of the job found, once it has written it."""
    path = folder / f"rank-{rank}.json"
    wait(path.exists, seconds)
    found: dict[str, Any] = json.loads(path.read_text())
    return found
