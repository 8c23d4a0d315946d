"""Batch prefetching: order, depth, errors raised at their own step, and the end of the thread."""

import threading
from types import SimpleNamespace

import pytest

from modeling.data.prefetch import Batch, Prefetcher
from modeling.training.train import TrainingData


def test_batches_come_in_order_and_at_most_depth_ahead():
    read = []
    batches = Prefetcher(lambda step: Batch(tokens=read.append(step) or step), 3, 9)
    for step in range(3, 10):
        assert batches.next().tokens == step
        assert len(read) <= step - 3 + 1 + 2
    assert read == list(range(3, 10))  # none after the last


def test_next_batch_is_read_in_the_background():
    second = threading.Event()
    batches = Prefetcher(lambda step: Batch(tokens=second.set() if step == 2 else step), 1, 3)
    assert batches.next().tokens == 1
    assert second.wait(30)


def test_read_error_is_raised_at_its_own_step():
    def read(step):
        if step == 2:
            raise OSError("the disk is gone")
        return Batch(tokens=step)

    batches = Prefetcher(read, 1, 9)
    assert batches.next().tokens == 1
    with pytest.raises(OSError, match="the disk is gone"):
        batches.next()


def test_thread_ends_when_the_prefetcher_is_dropped():
    before = set(threading.enumerate())
    batches = Prefetcher(lambda step: Batch(tokens=step), 1, 9)
    assert batches.next().tokens == 1
    (thread,) = set(threading.enumerate()) - before
    del batches
    thread.join(30)
    assert not thread.is_alive()


def test_seek_waits_for_the_previous_thread():
    reading, released, threads = threading.Event(), threading.Event(), set()

    def read(*_):
        threads.add(threading.current_thread())
        reading.set()
        released.wait(30)
        return Batch()

    settings, data_axis = SimpleNamespace(global_batch_size=4, last_step=9), SimpleNamespace(rank=0, size=1)
    profile, mesh = SimpleNamespace(train=settings), SimpleNamespace(data=data_axis)
    trainer = SimpleNamespace(profile=profile, mesh=mesh, reads_samples=True, read_batch=read)
    data = TrainingData(trainer, samples=None, excluded=[])
    data.seek(5)
    assert reading.wait(30)
    (first,) = threads
    threading.Timer(0.2, released.set).start()
    data.seek(3)  # as a rollback does
    assert not first.is_alive()
    data.next()
    assert len(threads) == 2
