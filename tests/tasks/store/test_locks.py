"""Locks exclude other processes; ended owners are replaced at once, unresponsive ones at expiry."""

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from profiles.errors import ProfileError
from tasks.launchers.conformance import wait
from tasks.store import locks
from tasks.store.backends.folder import FolderBackend
from tasks.store.backends.objects import ObjectBackend
from tasks.store.locks import LockOwner
from tasks.store.store import Store
from tests import s3

HOLDER = """
import sys, time
from pathlib import Path
from tasks.store import locks
from tasks.store.backends.folder import FolderBackend
with locks.acquire(FolderBackend(Path(sys.argv[1])), "locks/work", float(sys.argv[2])):
    print("held", flush=True)
    time.sleep(float(sys.argv[3]))
"""

COUNTER = """
import sys
from pathlib import Path
from tasks.store import locks
from tasks.store.backends.folder import FolderBackend
root = Path(sys.argv[1])
for _ in range(10):
    with locks.acquire(FolderBackend(root), "locks/work"):
        count = int((root / "count").read_text())
        (root / "count").write_text(str(count + 1))
"""


@pytest.fixture
def backend(tmp_path):
    return FolderBackend(tmp_path)


def start(code: str, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def start_holder(backend, expiry: float, seconds: float) -> subprocess.Popen:
    process = start(HOLDER, backend.root, expiry, seconds)
    assert process.stdout.readline() == "held\n"
    return process


def seconds_to_acquire(backend, expiry=60.0) -> float:
    started = time.monotonic()
    with locks.acquire(backend, "locks/work", expiry):
        return time.monotonic() - started


def test_lock_excludes_other_processes(backend):
    (backend.root / "count").write_text("0")
    processes = [start(COUNTER, backend.root) for _ in range(3)]
    for process in processes:
        assert process.wait(120) == 0
    assert (backend.root / "count").read_text() == "30"
    assert len(list((backend.root / "locks/work").iterdir())) == 1  # lower tickets are removed


def test_lock_excludes_other_threads(backend):
    active, counts = [], []

    def work() -> None:
        for _ in range(5):
            with locks.acquire(backend, "locks/work"):
                active.append(1)
                counts.append(len(active))
                time.sleep(0.002)
                active.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [1] * 20


def test_an_exception_releases_the_lock(backend):
    with pytest.raises(RuntimeError), locks.acquire(backend, "locks/work"):
        raise RuntimeError
    assert seconds_to_acquire(backend) < 20


def test_locks_of_different_names_are_independent(backend):
    with locks.acquire(backend, "locks/other"):
        assert seconds_to_acquire(backend) < 20


def test_waiting_logs_the_owner_once(backend, caplog):
    holder = start_holder(backend, 60, 1)
    with caplog.at_level(logging.INFO, logger="tasks"):
        seconds_to_acquire(backend)
    assert [
        message for message in caplog.messages if f"process {holder.pid} on" in message
    ] == caplog.messages
    assert len(caplog.messages) == 1
    holder.wait()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(backend):
    holder = start_holder(backend, 60, 60)
    holder.send_signal(signal.SIGKILL)
    assert seconds_to_acquire(backend) < 20
    holder.wait()


def test_a_live_owner_renews_its_lock_past_the_expiry(backend):
    holder = start_holder(backend, 2, 5)
    assert seconds_to_acquire(backend) > 3
    assert holder.wait(60) == 0


def test_the_lock_of_an_unresponsive_process_is_taken_over_at_expiry(backend, caplog):
    holder = start_holder(backend, 3, 3.5)
    holder.send_signal(signal.SIGSTOP)  # alive, but does not renew
    try:
        assert 0.2 < seconds_to_acquire(backend) < 30
    finally:
        holder.send_signal(signal.SIGCONT)
    with locks.acquire(backend, "locks/work"):  # does not lose it to the resumed process
        assert holder.wait(60) == 0
        time.sleep(0.5)
        other = start(HOLDER, backend.root, 60, 0)
        time.sleep(1.5)
        assert other.poll() is None
    assert other.wait(60) == 0


@pytest.mark.parametrize("ahead", [0.0, 86_400.0])
def test_the_lock_of_another_host_is_taken_over_at_expiry_whatever_its_clock(backend, monkeypatch, ahead):
    monkeypatch.setattr(LockOwner, "current", classmethod(lambda cls: LockOwner("another-host", 1, 0.0)))
    backend.create("locks/work/1", locks._state(1.0 + ahead))
    monkeypatch.undo()
    assert 0.5 < seconds_to_acquire(backend, expiry=1.5) < 10


@pytest.mark.parametrize("broken", ["locks", "locks/work", "locks/work/1"])
def test_file_or_dangling_link_in_place_of_a_lock_is_an_error(backend, broken):
    path = backend.root / broken
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if broken == "locks/work" else path.symlink_to("nowhere")
    with pytest.raises(OSError, match=f"a (folder|file) belongs; move it away: '{path}'"):
        seconds_to_acquire(backend)


def test_a_partially_written_ticket_blocks_for_half_the_expiry(backend):
    (backend.root / "locks/work").mkdir(parents=True)
    (backend.root / "locks/work/3").write_bytes(b'{"own')
    assert 1 < seconds_to_acquire(backend, expiry=2.0) < 10
    assert (backend.root / "locks/work/4").exists()


@pytest.mark.s3
def test_only_one_of_many_threads_creates_a_ticket_on_s3(monkeypatch):
    with s3.bucket(monkeypatch) as address:
        backend = ObjectBackend(f"{address}/store")
        barrier = threading.Barrier(4)
        created = []

        def take(who: int) -> None:
            barrier.wait()
            created.append(backend.create("locks/work/1", b"mine: %d" % who))

        threads = [threading.Thread(target=take, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(created) == [False, False, False, True]
        with locks.acquire(backend, "locks/other"):
            assert backend.files("locks/other").keys() == {"1"}
        assert seconds_to_acquire(backend, expiry=2.0) > 1  # ticket 1 above is not valid JSON


def test_owner_differs_from_a_later_process_with_the_same_pid():
    current = LockOwner.current()
    assert not current.is_gone
    assert replace(current, ticks=current.ticks - 1).is_gone
    assert LockOwner(**asdict(current)) == current
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert replace(current, pid=process.pid, started=time.time()).is_gone
    assert not replace(current, pid=process.pid, host="another-host").is_gone
    # A container that reuses the host's name has another boot id or pid namespace; files of earlier versions have neither.
    assert not replace(current, pid=process.pid, system="another-boot 4026531836").is_gone
    earlier = {name: value for name, value in asdict(current).items() if name != "system"}
    assert not LockOwner(**{**earlier, "pid": process.pid}).is_gone


def test_owner_is_not_gone_after_the_clock_was_set():
    current = LockOwner.current()
    shifted = replace(current, started=current.started - 1000)
    name = Path("/proc/self/comm")
    before = name.read_text()
    try:
        name.write_text("a) S 1 (b c")  # precedes the start in the process's status
        assert not shifted.is_gone
    finally:
        name.write_text(before)
    assert replace(shifted, ticks=None).is_gone  # written by an earlier version


def test_lost_lock_is_reported_to_its_holder(backend, caplog):
    with locks.acquire(backend, "locks/work", expiry=0.3) as lock:
        lock.check()
        assert backend.create(f"locks/work/{lock.ticket + 1}", locks._state(60.0))
        wait(lambda: "lock lost" in caplog.text, 60)  # by the renewal
        with pytest.raises(locks.LockLost, match="locks/work"):
            lock.check()
    assert json.loads(backend.read("locks/work/2"))["released"] is False


def test_renewal_survives_any_error(backend, caplog, monkeypatch):
    with locks.acquire(backend, "locks/work", expiry=0.3) as lock:
        first, write = backend.read("locks/work/1"), backend.write
        failures = iter([RuntimeError("a fault of the client"), OSError("busy")])

        def failing(name: str, data: bytes, **options: bool) -> None:
            for failure in failures:
                raise failure
            write(name, data, **options)

        monkeypatch.setattr(backend, "write", failing)
        wait(lambda: backend.read("locks/work/1") != first, 60)
        lock.check()
    assert "a fault of the client; retrying" in caplog.text


def test_waiting_backs_off(backend, monkeypatch):
    backend.create("locks/work/1", locks._state(60.0))
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 30:
            raise InterruptedError

    monkeypatch.setattr(locks.time, "sleep", sleep)
    monkeypatch.setattr(backend, "longest_poll", 10.0, raising=False)
    with pytest.raises(InterruptedError):
        seconds_to_acquire(backend)
    assert pauses[0] <= locks.POLL
    assert all(5 <= pause <= 10 for pause in pauses[20:])


@pytest.mark.parametrize(
    ("stored", "mode", "reason"),
    [
        # ignores the condition
        (lambda data: data, "overwrite", "locks need writes that fail"),
        # stores the encoding of a request with a checksum at its end
        (
            lambda data: b"%x\r\n%s\r\n0\r\nx-amz-checksum-crc32:\r\n" % (len(data), data),
            "create",
            "set AWS_REQUEST_CHECKSUM_CALCULATION=when_required",
        ),
    ],
)
def test_an_object_store_on_which_locks_do_not_work_is_rejected(tmp_path, monkeypatch, stored, mode, reason):
    from fsspec.implementations.memory import MemoryFileSystem

    create = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "pipe_file",
        lambda self, path, data, **options: create(self, path, stored(data), mode=mode),
    )
    monkeypatch.setattr(ObjectBackend, "_exclusive", set())
    store = Store("memory://overwriting/store", tmp_path)
    with (
        pytest.raises(ProfileError, match=f"store = memory://overwriting/store: .*{reason}"),
        store.lock("run-a"),
    ):
        pass
    assert store.backend.files("") == {}


def test_create_is_exclusive_and_read_returns_none_for_a_missing_file(tmp_path):
    backend = FolderBackend(tmp_path / "new")
    assert backend.read("a/b") is None
    assert backend.create("a/b", b"1")
    assert not backend.create("a/b", b"2")
    assert backend.read("a/b") == b"1"
    backend.write("a/b", b"33")
    assert backend.files("a") == {"b": 2}
    backend.remove("a")
    backend.remove("a")
    assert backend.files("") == {}
    assert Path(backend.location("a/b")) == tmp_path / "new/a/b"
