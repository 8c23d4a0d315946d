"""Hugging Face hub on loopback for real clients: models, datasets, commits, branches, gated repos.

Point a process at it with `HF_ENDPOINT=<hub.url> HF_HUB_DISABLE_XET=1`; `patch` does the same for this process.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = r"(?:refs/[^/]+/)?[^/]+"
TOKEN = "hf_a_token_that_only_the_tests_know"


@dataclass
class Repository:
    """Files of every commit, newest last, and whether reading them requires a token."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False


class Hub:
    """A context manager that serves during its block.

    Attributes:
        url: address, for HF_ENDPOINT.
        requests: method, path and token of all requests so far.
        faults: status and headers with which the next requests fail, one each; if `broken`, the first one is repeated.
    """

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.faults: list[tuple[int, dict[str, str]]] = []
        self.broken = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit(
        self,
        name: str,
        files: dict[str, bytes],
        kind: str = "models",
        gated: bool = False,
        ref: str | None = None,
    ) -> str:
        """Commit files to the repository and point `main`, or `ref`, to the commit; returns its hash."""
        content = sorted((path, _hash(data)) for path, data in files.items())
        sha = _hash(repr((name, content)).encode())
        repository = self.repositories.setdefault((kind, name), Repository())
        repository.commits[sha] = files
        repository.refs[ref or "main"] = sha
        repository.gated = gated
        return sha

    def patch(self, monkeypatch, cache) -> None:
        """Point this process's clients at the hub, with their own cache folder."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._server.shutdown()
        self._server.server_close()


class _HttpError(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        """Suppress logging."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.headers.get("Content-Type") == "application/x-www-form-urlencoded":
            body = parse_qs(body.decode())
        else:
            body = json.loads(body) if body else {}
        path = unquote(urlsplit(self.path).path)
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.server.hub.requests.append((self.command, path, self.token))
        faults = self.server.hub.faults
        if faults:
            status, headers = faults[0] if self.server.hub.broken else faults.pop(0)
            self.send(status, b"", headers)
            return
        try:
            self.route(path, body)
        except _HttpError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.code}
            self.send(error.status, json.dumps({"error": error.code}).encode(), headers)

    def route(self, path: str, body: dict) -> None:
        name = r"(?P<name>[^/]+(?:/[^/]+)?)"
        if path == "/api/whoami-v2":
            if self.token != TOKEN:
                raise _HttpError(401, "InvalidToken")
            self.send_json({"type": "user", "name": "tester", "auth": {"type": "access_token"}})
        elif found := re.fullmatch(
            rf"/api/(?P<kind>models|datasets)/{name}/tree/(?P<revision>{REVISION})/?(?P<under>.*)", path
        ):
            _, files = self.files(**found.groupdict())
            everything = "recursive=true" in urlsplit(self.path).query.lower()
            self.send_json(_tree(files, found["under"], everything))
        elif found := re.fullmatch(
            rf"/api/(?P<kind>models|datasets)/{name}/paths-info/(?P<revision>{REVISION})", path
        ):
            _, files = self.files(**found.groupdict())
            self.send_json([entry for entry in _tree(files, "", True) if entry["path"] in body["paths"]])
        elif found := re.fullmatch(
            rf"/api/(?P<kind>models|datasets)/{name}(/revision/(?P<revision>{REVISION}))?", path
        ):
            sha, files = self.files(**found.groupdict(), metadata=True)
            siblings = [{"rfilename": name} for name in files]
            self.send_json(
                {"id": found["name"], "sha": sha, "siblings": siblings, "private": False, "tags": []}
            )
        elif found := re.fullmatch(
            rf"(?P<kind>/datasets)?/{name}/resolve/(?P<revision>{REVISION})/(?P<file>.+)", path
        ):
            kind = "datasets" if found["kind"] else "models"
            sha, files = self.files(kind, found["name"], found["revision"])
            if found["file"] not in files:
                raise _HttpError(404, "EntryNotFound")
            self.send_file(sha, files[found["file"]])
        else:
            raise _HttpError(404, "RepoNotFound")

    def files(
        self, kind: str, name: str, revision: str | None, metadata: bool = False, **_: str
    ) -> tuple[str, dict[str, bytes]]:
        repository = self.server.hub.repositories.get((kind, name))
        if repository is None:
            raise _HttpError(404 if self.token else 401, "RepoNotFound")
        if repository.gated and not metadata and self.token != TOKEN:
            raise _HttpError(403 if self.token else 401, "GatedRepo")
        sha = repository.refs.get(revision or "main", revision)
        if sha not in repository.commits:
            raise _HttpError(404, "RevisionNotFound")
        return sha, repository.commits[sha]

    def send_file(self, sha: str, data: bytes) -> None:
        headers = {
            "X-Repo-Commit": sha,
            "ETag": f'"{_hash(data)}"',
            "Accept-Ranges": "bytes",
        }
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if part is None:
            self.send(200, data, headers)
            return
        first, last = int(part[1]), min(int(part[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.send(206, data[first : last + 1], headers)

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tree(files: dict[str, bytes], under: str, everything: bool) -> list[dict]:
    """Entries of a folder, or of the entire tree below it, including folders."""
    prefix = under and f"{under}/"
    if prefix and not any(path.startswith(prefix) for path in files):
        raise _HttpError(404, "EntryNotFound")
    parts = [path.removeprefix(prefix).split("/") for path in files if path.startswith(prefix)]
    folders = {prefix + "/".join(path[:depth]) for path in parts for depth in range(1, len(path))}
    entries = [
        {"type": "directory", "path": path, "size": 0, "oid": _hash(path.encode())}
        for path in sorted(folders)
    ]
    entries += [
        {"type": "file", "path": path, "size": len(data), "oid": _hash(data)}
        for path, data in files.items()
        if path.startswith(prefix)
    ]
    return [entry for entry in entries if everything or "/" not in entry["path"].removeprefix(prefix)]


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
