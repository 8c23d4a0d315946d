"""Settings of the test suite: what is left to run when a worker crashes."""

from types import SimpleNamespace

import pytest

from tests.conftest import Groups

TESTS = [f"tests/{name}" for name in ("a.py::1", "a.py::2", "b.py::1", "c.py::1", "d.py::1", "d.py::2")]


class Worker:
    """Runs a test once it has the next one or is told to end, as workers of pytest-xdist do."""

    def __init__(self, groups):
        self.shutting_down, self.ran, self._queue = False, [], []
        groups.add_node(self)
        groups.add_node_collection(self, TESTS)
        groups.schedule()

    def send_runtest_some(self, indices):
        self._queue += indices

    def shutdown(self):
        self.shutting_down = True

    def run(self, groups, tests=100):
        while len(self.ran) < tests and len(self._queue) > (not self.shutting_down):
            self.ran.append(self._queue.pop(0))
            groups.mark_test_complete(self, self.ran[-1])


@pytest.mark.parametrize("crashes_in", range(len(TESTS)))
def test_what_a_crashed_worker_left_runs_once_and_the_run_ends(crashes_in):
    options = SimpleNamespace(loadscopereorder=False)
    groups = Groups(SimpleNamespace(getvalue=lambda name: ["popen"], option=options))
    first = Worker(groups)
    first.run(groups, crashes_in)
    assert groups.remove_node(first) == TESTS[crashes_in]
    second = Worker(groups)
    second.run(groups)
    assert sorted([*first.ran, crashes_in, *second.ran]) == [*range(len(TESTS))]
    assert groups.tests_finished
    assert second.shutting_down
