"""Fault injection: an HTTP proxy on loopback that fails the requests that a test chooses."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Fault = str | None
"""None: the request is forwarded. "busy": it is answered with 503. "lost": the connection closes before it is forwarded.
"unanswered": the connection closes after it was processed. "half": the connection closes in the middle of the response.
"refused": a request that deletes several objects is answered with 200 and an error for each, as S3 does. "conflict": 409, as
S3 answers concurrent conditional writes. "older": answered with 501 if it has a checksum other than Content-MD5.
"page": answered with 200 and a web page, as by a captive portal, and not forwarded."""


class Proxy:
    """A context manager that serves during its block.

    Args:
        upstream: address of the real server.

    Attributes:
        url: address of the proxy.
        fault: called with the method and the path of each request; may be replaced at any time.
        faults: number of requests that failed.
    """

    def __init__(self, upstream: str) -> None:
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        self.faults = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.proxy, self._server.upstream = self, urlsplit(upstream).netloc
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        """Suppress logging."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy = self.server.proxy
        fault = proxy.fault(self.command, self.path)
        proxy.faults += fault is not None
        if fault == "lost":
            self.close_connection = True
            return
        if fault == "busy":
            self._send(
                503, {}, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"
            )
            return
        if fault == "conflict":
            self._send(409, {}, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
            return
        if fault == "older" and any(name.lower().startswith("x-amz-checksum-crc") for name in self.headers):
            self._send(501, {}, b"<Error><Code>NotImplemented</Code></Error>")
            return
        if fault == "page":
            page = b"<!DOCTYPE html><html><body>Sign in to this network</body></html>"
            self._send(200, {"Content-Type": "text/html"}, page)
            return
        if fault == "refused":
            keys = re.findall(rb"<Key>.*?</Key>", body)
            errors = b"".join(b"<Error>%s<Code>AccessDenied</Code></Error>" % key for key in keys)
            self._send(200, {"Content-Type": "application/xml"}, b"<DeleteResult>%s</DeleteResult>" % errors)
            return
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path, body or None, dict(self.headers))
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if fault == "unanswered":
            self.close_connection = True
            return
        excluded = {"transfer-encoding", "connection", "content-length", "date", "server"}
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in excluded}
        if self.command == "HEAD":  # the length of a GET's body
            headers["Content-Length"] = answer.getheader("Content-Length") or "0"
            data = b""
        self._send(answer.status, headers, data, half=fault == "half")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _send(self, status: int, headers: dict[str, str], data: bytes, *, half: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if half else data)
        self.close_connection = half
