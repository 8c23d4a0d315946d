"""Locks: one at a time, over processes; taken over from the dead at once, and from the silent when they expire."""

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks.store import locks
from tasks.store.backends import FolderBackend, ObjectBackend
from tasks.store.lock_owner import LockOwner
from tests import s3

HOLDER = """
import sys, time
from pathlib import Path
from tasks.store import locks
from tasks.store.backends import FolderBackend
with locks.acquire(FolderBackend(Path(sys.argv[1])), "locks/work", float(sys.argv[2])):
    print("held", flush=True)
    time.sleep(float(sys.argv[3]))
"""

COUNTER = """
import sys
from pathlib import Path
from tasks.store import locks
from tasks.store.backends import FolderBackend
root = Path(sys.argv[1])
for _ in range(10):
    with locks.acquire(FolderBackend(root), "locks/work"):
        count = int((root / "count").read_text())
        (root / "count").write_text(str(count + 1))
"""


@pytest.fixture
def storage(tmp_path):
    return FolderBackend(tmp_path)


def start(code: str, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def hold(storage, expiry: float, seconds: float) -> subprocess.Popen:
    process = start(HOLDER, storage.root, expiry, seconds)
    assert process.stdout.readline() == "held\n"
    return process


def taken_after(storage, expiry=60.0) -> float:
    """Seconds until the lock is ours."""
    begun = time.monotonic()
    with locks.acquire(storage, "locks/work", expiry):
        return time.monotonic() - begun


def test_processes_take_turns(storage):
    (storage.root / "count").write_text("0")
    processes = [start(COUNTER, storage.root) for _ in range(3)]
    for process in processes:
        assert process.wait(120) == 0
    assert (storage.root / "count").read_text() == "30"
    assert len(list((storage.root / "locks/work").iterdir())) == 1  # what was used up is removed


def test_threads_take_turns(storage):
    active, most = [], []

    def work() -> None:
        for _ in range(5):
            with locks.acquire(storage, "locks/work"):
                active.append(1)
                most.append(len(active))
                time.sleep(0.002)
                active.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 20


def test_the_lock_is_free_after_an_exception(storage):
    with pytest.raises(RuntimeError), locks.acquire(storage, "locks/work"):
        raise RuntimeError
    assert taken_after(storage) < 20


def test_locks_of_other_names_are_others(storage):
    with locks.acquire(storage, "locks/other"):
        assert taken_after(storage) < 20


def test_who_waits_says_for_whom_once(storage, caplog):
    holder = hold(storage, 60, 1)
    with caplog.at_level(logging.INFO):
        taken_after(storage)
    assert [
        message for message in caplog.messages if f"process {holder.pid} on" in message
    ] == caplog.messages
    assert len(caplog.messages) == 1
    holder.wait()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(storage):
    holder = hold(storage, 60, 60)
    holder.send_signal(signal.SIGKILL)
    assert taken_after(storage) < 20
    holder.wait()


def test_a_holder_that_lives_keeps_its_lock_past_the_expiry(storage):
    holder = hold(storage, 2, 5)
    assert taken_after(storage) > 3
    assert holder.wait(10) == 0


def test_the_lock_of_a_silent_process_is_taken_over_when_it_expires(storage, caplog):
    holder = hold(storage, 3, 3.5)
    holder.send_signal(signal.SIGSTOP)  # neither gone nor heard of
    try:
        assert 0.2 < taken_after(storage) < 30
    finally:
        holder.send_signal(signal.SIGCONT)
    with locks.acquire(storage, "locks/work"):  # when it comes back it takes nothing away
        assert holder.wait(20) == 0
        time.sleep(0.5)
        other = start(HOLDER, storage.root, 60, 0)
        time.sleep(1.5)
        assert other.poll() is None
    assert other.wait(20) == 0


def test_of_another_host_only_the_expiry_counts(storage, monkeypatch):
    monkeypatch.setattr(LockOwner, "current", classmethod(lambda cls: LockOwner("another-host", 1, 0.0)))
    storage.create("locks/work/1", locks._state(1.0))
    monkeypatch.undo()
    assert 0.5 < taken_after(storage) < 10


def test_a_half_written_turn_blocks_for_no_longer_than_the_expiry(storage):
    (storage.root / "locks/work").mkdir(parents=True)
    (storage.root / "locks/work/3").write_bytes(b'{"own')
    assert 1 < taken_after(storage, expiry=1.0) < 10
    assert (storage.root / "locks/work/4").exists()


def test_one_of_many_gets_each_turn_on_s3(monkeypatch):
    with s3.bucket(monkeypatch) as address:
        storage = ObjectBackend(f"{address}/store")
        barrier = threading.Barrier(4)
        got = []

        def take(who: int) -> None:
            barrier.wait()
            got.append(storage.create("locks/work/1", b"mine: %d" % who))

        threads = [threading.Thread(target=take, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(got) == [False, False, False, True]
        with locks.acquire(storage, "locks/other"):
            assert storage.files("locks/other").keys() == {"1"}
        assert taken_after(storage, expiry=2.0) > 1  # turn 1 above, which nobody can read


def test_an_owner_is_told_from_a_later_process_of_the_same_number():
    current = LockOwner.current()
    assert not current.is_gone
    assert LockOwner(current.host, current.pid, current.started - 1000).is_gone
    assert LockOwner.from_json(current.to_json()) == current
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert LockOwner(current.host, process.pid, time.time()).is_gone
    assert not LockOwner("another-host", process.pid, 0.0).is_gone


def test_creating_is_exclusive_and_reading_what_is_not_there_gives_none(tmp_path):
    storage = FolderBackend(tmp_path / "new")
    assert storage.read("a/b") is None
    assert storage.create("a/b", b"1")
    assert not storage.create("a/b", b"2")
    assert storage.read("a/b") == b"1"
    storage.write("a/b", b"33")
    assert storage.files("a") == {"b": 2}
    storage.remove("a")
    storage.remove("a")
    assert storage.files("") == {}
    assert Path(storage.location("a/b")) == tmp_path / "new/a/b"
