"""A webhook server on loopback that keeps the notifications it is sent."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.waiting import until

SUBJECT = re.compile(r"Trainshed: (\S+) (\S+)")
SECONDS = 120.0


class Webhook:
    """`received` has the notifications: subject and body."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.received: list[dict[str, str]] = []

    def block(self) -> str:
        """Create or update this server's notification block; returns its name for `--alerts`."""
        from prefect.blocks.notifications import CustomWebhookNotificationBlock

        message = {"subject": "{{subject}}", "body": "{{body}}"}
        block = CustomWebhookNotificationBlock(name="loopback", url=self.url, json_data=message)
        block.save("loopback", overwrite=True)
        return "custom-webhook/loopback"

    def kinds(self) -> Counter[tuple[str, ...]]:
        """Number of alerts received, by (run, kind)."""
        return Counter(SUBJECT.match(message["subject"]).groups() for message in list(self.received))

    def wait_for(self, *expected: tuple[str, str]) -> None:
        """Wait until each (run, kind) has been received."""
        until(lambda: set(expected) <= self.kinds().keys(), SECONDS, every=0.2)


@contextmanager
def serve() -> Iterator[Webhook]:
    """A server during the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            webhook.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    webhook = Webhook(f"http://127.0.0.1:{server.server_port}/alert")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield webhook
    server.shutdown()
    server.server_close()
