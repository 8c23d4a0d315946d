"""A Prefect server that is away or still starting."""

import argparse
import asyncio
import contextlib
import inspect
import json
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect import flow, flow_engine, get_run_logger
from prefect._internal.concurrency import services
from prefect.logging import handlers
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.cli.deployments import query
from flows.cli.run import run_flow
from flows.final_states import final_states
from flows.runner.logs import is_news
from flows.server import outages
from profiles.resolve import load
from tasks.failures import FatalError
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
    services.logger.error(outages.UNSENT + " %s pending items.", "EventsWorker", 1)
    services.logger.error("another error")
    assert [record.getMessage() for record in shown] == ["another error"]
    assert [message for message in caplog.messages if "Prefect server does not answer" in message] == [
        "the Prefect server does not answer; the run continues, but its UI and alerts lack what happens meanwhile"
    ]
    assert "Service %r failed to process item %r" in services.QueueService._main_loop.__code__.co_consts


def test_logs_that_cannot_be_sent_are_one_plain_line(monkeypatch, caplog, capsys):
    """Prefect writes to the terminal for each batch."""

    class Away:
        async def create_logs(self, items):
            raise OSError("All connection attempts failed")

    monkeypatch.setattr(outages, "_filter", outages.OutageFilter())
    monkeypatch.setattr(handlers.APILogWorker, "_handle_batch", handlers.APILogWorker._handle_batch)
    outages.shorten_outages()
    worker = handlers.APILogWorker("settings")
    worker._client = Away()
    for _ in range(3):
        asyncio.run(worker._handle_batch([{}]))
    assert sum("Prefect server does not answer" in message for message in caplog.messages) == 1
    assert capsys.readouterr().err == ""


class Relay:
    """Forwards connections to a server until it is cut; counts those that it then closes at once."""

    def __init__(self, port: int) -> None:
        self._to, self.is_cut, self.closed = ("127.0.0.1", port), False, 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.is_cut = True
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_cut:
                    self.closed += 1
                    client.close()
                    continue
                server = socket.create_connection(self._to)
                self._open += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def test_stop_while_the_server_is_away_is_short_and_says_what_is_saved(
    prefect_server, tmp_path, monkeypatch, capsys
):
    """Its requests would be retried for four minutes each."""
    relay = Relay(int(prefect_server.split(":")[2].partition("/")[0]))
    monkeypatch.setattr(outages, "STOP_RETRIES", 0)
    monkeypatch.setattr(outages, "FINISH_SECONDS", 0.5)
    options = argparse.Namespace(store=str(tmp_path / "store"), json=False)

    @flow(name="stopped-in-an-outage")
    @final_states
    def stopped() -> None:
        relay.cut()
        raise KeyboardInterrupt

    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{relay.port}/api"}):
        assert run_flow(options, load("tiny"), "stopped", stopped, print) == 1
        assert PREFECT_CLIENT_MAX_RETRIES.value() > 0  # again
    relay.close()
    err = capsys.readouterr().err
    assert "stopped, completed steps and checkpoints are kept; run the same command again to resume" in err
    assert relay.closed < 10  # connections; each retry opens one


def test_command_whose_results_are_complete_succeeds_without_the_server(
    prefect_server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(outages, "FINISH_SECONDS", 0.5)
    relay = Relay(int(prefect_server.split(":")[2].partition("/")[0]))
    options = argparse.Namespace(store=str(tmp_path / "store"), json=True)

    @flow(name="finished-in-an-outage")
    @final_states
    def finished() -> dict[str, str]:
        relay.cut()
        return {"run": "tiny"}

    address = f"http://127.0.0.1:{relay.port}/api"
    with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
        assert run_flow(options, load("tiny"), "finished", finished, print) == 0
    relay.close()
    out, err = capsys.readouterr()
    assert json.loads(out) == {"run": "tiny"}
    assert "did not store the final state of this flow run, whose results are complete" in err


@pytest.mark.parametrize("fails", [False, True])
def test_logs_are_sent_before_the_end_of_a_run(fails, prefect_server, tmp_path, capsys):
    """At exit, Prefect would wait for a server that is away."""
    options = argparse.Namespace(store=str(tmp_path / "store"), json=False)
    line, ids = f"the last line: {fails}", []

    @flow(name="logs-at-its-end")
    @final_states
    def logs() -> str:
        ids.append(str(flow_run.id))
        get_run_logger().warning(line)
        if fails:
            raise FatalError("no disk")
        return "done"

    with temporary_settings({PREFECT_API_URL: prefect_server}):
        assert run_flow(options, load("tiny"), "logs", logs, print) == int(fails)
    of_run = {"logs": {"flow_run_id": {"any_": ids}}}
    assert line in [each["message"] for each in query(f"{prefect_server}/logs/filter", of_run)]


def test_end_of_a_rejected_flow_run_is_an_error():
    """Prefect logs it as information."""
    for state, level in (("Rejected('key: reason')", logging.ERROR), ("Completed()", logging.INFO)):
        record = logging.LogRecord(
            "prefect.flow_runs", logging.INFO, "", 0, f"Finished in state {state}", (), None
        )
        assert is_news(record)
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
