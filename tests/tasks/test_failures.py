"""Classification of failed jobs: their causes, and which failures are fatal."""

import errno
from pathlib import Path

import pytest

from profiles import resolve
from profiles.files import exit_codes
from profiles.files.state_files import NotRegularFile
from tasks.failures import FatalError, classify, is_outage
from tasks.launchers import Handle, Job, JobFailed, Status, causes
from tests.profiles.pair import PAIR


def failure(code: int | None, detail: str = "", *overrides: str) -> JobFailed:
    return classify(resolve.load(PAIR, overrides), JobFailed("train: rank 1 ended; its log: x", detail, code))


def job_failure(folder: Path, *log: str, code: int = 1) -> JobFailed:
    """The failure of a job of two processes a node that left this log."""
    job = Job("train", "modeling.training.train", (), folder, nodes=2, processes=2)
    job.log_file.write_text("\n".join(log) + "\n")
    return causes.job_failure(Handle(job, "7"), Status(running=False, exit_code=code), ("n1", "n2"))


def report(rank: int, code: int, time: str) -> str:
    """What torchrun prints when a rank failed."""
    return f"""============================================================
modeling.training.train FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_{time}
  host      : n1
  rank      : {rank} (local_rank: {rank % 2})
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
============================================================"""


OOM_KILL = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
)


@pytest.mark.parametrize(
    "log",
    [
        ("[rank 3] step 7/100  loss 5", report(3, -9, "10:00:00"), OOM_KILL),
        (OOM_KILL, "[rank 3] step 7/100  loss 5", report(3, -9, "10:00:00")),
        ("srun: error: n2: task 1: Out Of Memory", *["[rank 0] connection lost"] * 30),
        # torchrun noticed the end of another rank first.
        ("[rank 3] torch.OutOfMemoryError: CUDA out of memory.", report(0, 1, "10:00:00")),
    ],
)
def test_out_of_memory_is_recognised_in_any_message(tmp_path, log):
    found = job_failure(tmp_path, *log)
    assert isinstance(classify(resolve.load("tiny"), found), FatalError)
    assert len(found.detail.splitlines()) <= causes.DETAIL_LINES + 1


def test_survived_memory_error_is_not_the_cause(tmp_path):
    lines = ("[rank 3] UserWarning: Cannot allocate memory, trying another way",)
    lines += tuple(f"[rank 3] step {step}/100  loss 5" for step in range(50))
    found = job_failure(tmp_path, *lines, report(3, -9, "10:00:00"))
    assert "rank 3 on n2 was killed by SIGKILL" in str(found)
    assert found.detail == "[rank 3] step 49/100  loss 5"
    assert not isinstance(classify(resolve.load("tiny"), found), FatalError)


def test_requeued_job_reports_the_failure_of_its_last_start(tmp_path):
    first = ("job 7, start 1, on n3 n4; rendezvous at n3:20000", "[rank 0] interrupted: saved step 40")
    first += (report(0, 143, "10:00:00"), OOM_KILL, "saved; requeued")
    last = ("job 7, start 2, on n1 n2; rendezvous at n1:20000", "[rank 1] resumed from step 40")
    found = job_failure(tmp_path, *first, *last, "[rank 3] out of memory", report(3, 71, "11:00:00"))
    assert str(found).startswith("train: rank 3 on n2 ended with exit code 71")
    assert found.exit_code == 71
    assert found.detail == "[rank 3] out of memory"
    killed = job_failure(tmp_path, *first, *last, report(2, -9, "11:00:00"))
    assert not isinstance(classify(resolve.load("tiny"), killed), FatalError)


@pytest.mark.parametrize("code", [exit_codes.OUT_OF_MEMORY, exit_codes.HUNG, -9])
@pytest.mark.parametrize("consequence", [1, exit_codes.INTERRUPTED, -6])
def test_cause_is_the_rank_whose_exit_code_is_specific_if_clocks_of_nodes_differ(tmp_path, code, consequence):
    found = job_failure(tmp_path, report(3, code, "10:00:02"), report(0, consequence, "10:00:01"))
    assert found.exit_code == code
    assert "rank 3 on n2" in str(found)


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (exit_codes.OUT_OF_MEMORY, ""),
        (1, "[rank 1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (
            1,
            "[rank 1] RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
    ],
)
def test_out_of_memory_is_fatal_and_suggests_changes(code, detail):
    found = failure(code, detail)
    assert isinstance(found, FatalError)
    for change in ("train.micro_batch_size=2", "train.recompute=selective"):
        assert f"{change} (planned " in str(found)
    assert "rank 1 ended" in str(found)


def test_rejected_input_is_fatal_with_its_message():
    found = failure(
        exit_codes.REJECTED,
        "[rank 0] rejected\n[rank 0] ValueError: checkpoint.resume = 7: complete are 4, 8",
    )
    assert isinstance(found, FatalError)
    assert str(found).startswith("checkpoint.resume = 7: complete are 4, 8 (")


@pytest.mark.parametrize(
    "reason",
    [
        "SaveGivenUp: step 8 could not be saved: rank 0: Permission denied; gave up after 8 attempts",
        "LoadFailed: rank 3: OSError('step_8/a_3_0.distcp: stale file handle')",
        """LoadFailed: rank 0: OSError("a_0_0.distcp: PermissionError('The provided token has expired.')")""",
        "OSError: [Errno 116] Stale file handle",
        "RuntimeError: rank 0: OSError(5, 'Input/output error')",
    ],
)
def test_failed_storage_is_the_cause_and_retried(reason):
    found = failure(1, f"[rank 0] step 7/100  loss 5\n[rank 0] {reason}")
    assert is_outage(found)
    assert str(found).startswith(reason.partition(": ")[2])


@pytest.mark.parametrize("code", [-9, 1, None, exit_codes.HUNG, exit_codes.INTERRUPTED])
def test_everything_else_is_retried(code):
    assert not isinstance(failure(code), FatalError)
    assert not is_outage(failure(code))


def test_what_waiting_does_not_change_is_no_outage():
    denied = (
        """LoadFailed: rank 0: OSError("step_8/a_0_0.distcp: PermissionError(13, 'Permission denied')")"""
    )
    loop = "OSError: [Errno 40] Too many levels of symbolic links: 'run.json'"
    for reason in (denied, loop):
        assert isinstance(failure(1, f"[rank 0] {reason}"), FatalError)
    found = failure(1, f"[rank 0] {denied}", "cluster.launcher=slurm")  # its server may be restarting
    assert not isinstance(found, FatalError)
    assert not is_outage(found)
    for error in (
        NotRegularFile(errno.EINVAL, "is not a regular file"),
        PermissionError(errno.EACCES, "denied"),
        OSError(errno.ELOOP, "Too many levels of symbolic links"),
    ):
        assert not is_outage(error)
    assert is_outage(OSError(errno.EIO, "Input/output error"))
