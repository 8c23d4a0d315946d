"""A Prefect server that is away or still starting."""

import inspect
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect import flow_engine
from prefect._internal.concurrency import services

from flows import runner
from flows.server import outages
from tests.ports import free_port


def test_events_that_cannot_be_sent_are_one_plain_line(monkeypatch, caplog):
    """Prefect writes the whole event for each, every few seconds."""
    shown = []
    handler = logging.Handler()
    handler.emit = shown.append
    logger = logging.getLogger("prefect._internal")
    monkeypatch.setattr(logger, "handlers", [handler])
    outages.shorten_outages()
    for _ in range(3):
        services.logger.error(outages.FAILED_ITEM + " %r", "EventsWorker", "x" * 2000)
    services.logger.error("another error")
    assert [record.getMessage() for record in shown] == ["another error"]
    assert [message for message in caplog.messages if "Prefect server does not answer" in message] == [
        "the Prefect server does not answer; the run continues, but its UI and alerts lack what happens meanwhile"
    ]
    assert "Service %r failed to process item %r" in services.QueueService._main_loop.__code__.co_consts


def test_end_of_a_rejected_flow_run_is_an_error():
    """Prefect logs it as information."""
    for state, level in (("Rejected('key: reason')", logging.ERROR), ("Completed()", logging.INFO)):
        record = logging.LogRecord(
            "prefect.flow_runs", logging.INFO, "", 0, f"Finished in state {state}", (), None
        )
        assert runner._is_news(record)
        assert record.levelno == level
    assert "Finished in state {" in inspect.getsource(flow_engine)


@pytest.mark.parametrize("status", [200, 401])
def test_a_server_that_is_starting_is_waited_for(status):
    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    asked, port = [], free_port()

    def serve():
        with HTTPServer(("127.0.0.1", port), Health) as server:
            server.handle_request()

    starting = threading.Timer(0.3, serve)
    starting.start()
    outages.await_start(f"http://127.0.0.1:{port}/api", seconds=30)
    assert asked == ["/api/health"]
    starting.join()
    outages.await_start(f"http://127.0.0.1:{port}/api", seconds=0)  # gives up
