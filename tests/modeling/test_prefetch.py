"""Batches made ahead by a thread: in their order, no more than asked for, and what goes wrong there is told here."""

import threading

import pytest

from modeling.data.prefetch import Batch, Prefetch


def test_batches_come_in_order_and_few_are_made_ahead():
    made = []
    batches = Prefetch(lambda step: Batch(tokens=made.append(step) or step), 3, 9, ahead=2)
    for step in range(3, 10):
        assert batches.next().tokens == step
        assert len(made) <= step - 3 + 1 + 2
    assert made == list(range(3, 10))  # none after the last


def test_the_next_batch_is_made_while_nobody_waits_for_it():
    second = threading.Event()
    batches = Prefetch(lambda step: Batch(tokens=second.set() if step == 2 else step), 1, 3)
    assert batches.next().tokens == 1
    assert second.wait(30)


def test_what_the_reader_raises_is_raised_at_its_own_step():
    def make(step):
        if step == 2:
            raise OSError("the disk is gone")
        return Batch(tokens=step)

    batches = Prefetch(make, 1, 9)
    assert batches.next().tokens == 1
    with pytest.raises(OSError, match="the disk is gone"):
        batches.next()


def test_the_thread_ends_with_the_batches_that_nobody_takes():
    before = set(threading.enumerate())
    batches = Prefetch(lambda step: Batch(tokens=step), 1, 9)
    assert batches.next().tokens == 1
    (thread,) = set(threading.enumerate()) - before
    del batches  # as a run does that goes back to an older step
    thread.join(30)
    assert not thread.is_alive()
