"""Artifacts in Prefect's UI that cannot be rendered, not be sent, or not be updated."""

import re
import threading
import uuid

from flows.ui import artifacts
from flows.ui.artifacts import PrefectArtifact
from flows.ui.overview import Overview, escape
from profiles import resolve
from tests.tasks.reporting.run_folders import write_run


def test_display_error_is_logged_once_and_stops_nothing(caplog):
    page = PrefectArtifact("markdown", "run", "What this run does")
    for _ in range(2):
        page.update(lambda: 1 / 0, now=True)
    (said,) = caplog.records
    assert said.getMessage() == "artifact run: cannot be rendered: ZeroDivisionError: division by zero"


def test_addresses_of_a_message_stay_links():
    page = "https://errors.pydantic.dev/2.14/v/extra_forbidden"
    assert escape(f"a_key: see\n{page} | *this*") == f"a\\_key: see {page} \\| \\*this\\*"


def test_time_left_has_the_time_of_its_estimate(tmp_path, monkeypatch):
    """The page of a flow that was killed stays as it is."""
    pages = []
    monkeypatch.setattr(PrefectArtifact, "update", lambda _, render, now: pages.append(render()))
    write_run(tmp_path / "run", "train.steps=200")
    overview = Overview(resolve.load(str(tmp_path / "run/profile.yaml")), tmp_path / "run")
    overview.update()
    overview.end("# Stopped")
    training, ended = pages
    assert re.search(r"0\.5 s per step, 50\.0 s left as of 20\d\d-\d\d-\d\d \d\d:\d\d UTC$", training, re.M)
    assert re.search(r"0\.5 s per step$", ended, re.M)


def test_server_that_does_not_answer_holds_no_update_and_gets_the_latest_once_it_does(monkeypatch):
    sent, answers = [], threading.Event()

    def send(artifact, data, *_):
        answers.wait(60)
        sent.append((artifact._key, data))

    monkeypatch.setattr(PrefectArtifact, "_send", send)
    monkeypatch.setattr(artifacts, "UPDATE_SECONDS", 0)
    monkeypatch.setattr(artifacts, "FLUSH_SECONDS", 0.1)
    pages = [PrefectArtifact("markdown", key, "", uuid.uuid4()) for key in ("run", "training")]
    for number in range(5):
        for page in pages:
            page.update(lambda number=number: number, now=number == 4)
    assert sent == []
    monkeypatch.setattr(artifacts, "FLUSH_SECONDS", 60)
    answers.set()
    pages[0].update(lambda: "last", now=True)
    assert {("run", "last"), ("training", 4)} <= {*sent}
    assert len(sent) <= 4  # what was replaced meanwhile is not sent
