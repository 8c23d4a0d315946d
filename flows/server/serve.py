"""The process of a local Prefect server: `python -m flows.server.serve LISTENER HOME KIND`.

LISTENER is the number of an inherited socket, which is bound to loopback. KIND is `shared`, the server of commands, without a UI,
which ends after its last user; or `up`, with Prefect's UI and all its services.

Any web page that the user has open can send requests to loopback, and any user of the machine can connect to it. A request is
therefore answered only if

- its Host is a name of this machine's loopback: a page whose own host name was pointed here sends that name (DNS rebinding);
- it has the password of the server's home, except for the UI's files and the health check;
- it has a token of Prefect's CSRF protection if it changes something; a page of another origin cannot read one.

The page LOGIN reads the password from the fragment of its address, which browsers never send, and stores it for Prefect's UI.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.server.locks import ServerLocks
from flows.server.prefect_settings import LOGIN
from modeling.start import without_garbage_collection
from profiles.files.retry_policies import SERVER_HOME

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

SHARED, UP = "shared", "up"
HOSTS = ("127.0.0.1", "localhost")
CHECK_SECONDS = SERVER_HOME.delays[0]  # between checks for users
# Seconds without a successful check, such as of a file system that does not answer.
OUTAGE = SERVER_HOME.seconds
# Settings to register types of blocks at each start, and not again if they are the same as at the last one.
BLOCK_TYPES = ("PREFECT_SERVER_REGISTER_BLOCKS_ON_START", "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION")
STOP_TIMEOUT = 5.0  # seconds until the process ends without the server's consent
# `prefect-password` is the key of Prefect's UI, which sends its value as it is.
LOGIN_PAGE = """<!doctype html><meta charset="utf-8"><title>Prefect</title><p id="text">Signing in …</p><script>
const password = decodeURIComponent(location.hash.slice(1));
if (password) {
  localStorage.setItem("prefect-password", btoa(password));
  location.replace("/");
} else {
  document.getElementById("text").textContent = "The address lacks the password, which `trainshed up` prints after a #.";
}
</script>
"""


class Guard:
    """ASGI middleware that rejects requests for other host names, and forbids framing the UI."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].partition(":")[0].lower() not in HOSTS:
            await self._reject(scope, receive, send)
            return

        async def send_unframed(message: Any) -> None:
            if message["type"] == "http.response.start":
                rule = (b"content-security-policy", b"frame-ancestors 'none'")
                message = {**message, "headers": [*message.get("headers", ()), rule]}
            await send(message)

        await self.app(scope, receive, send_unframed)

    async def _reject(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        from starlette.responses import PlainTextResponse

        names = " and ".join(HOSTS)
        await PlainTextResponse(f"this server answers to {names} only\n", 400)(scope, receive, send)


def make_app() -> ASGIApp:
    """Prefect's application, guarded, with the page LOGIN."""
    from prefect.server.api.server import create_app
    from starlette.requests import Request
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    async def login(_: Request) -> HTMLResponse:
        return HTMLResponse(
            LOGIN_PAGE, headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        )

    _look_seldom_for_tasks()
    _wait_longer_for_messages()
    app = create_app()
    app.router.routes.insert(0, Route(LOGIN, login))
    return Guard(app)


def _look_seldom_for_tasks() -> None:
    """Let Prefect look for due background tasks once a second.

    By default it looks four times a second, which is a third of what an idle server computes. Prefect does not document the
    names that decide it: a version without them keeps its default.
    """
    seldom = dict.fromkeys(("scheduling_resolution", "minimum_check_interval"), timedelta(seconds=1))
    with contextlib.suppress(ImportError, KeyError):
        from prefect.server.api import background_workers

        names = vars(background_workers)
        if seldom.keys() <= signature(names["Worker"]).parameters.keys():
            names["Worker"] = partial(names["Worker"], **seldom)


def _wait_longer_for_messages() -> None:
    """Let Prefect's queue of background tasks wait a second for a message, which ends the wait.

    By default it waits a tenth of a second at a time, in a thread: two fifths of what an idle server computes. Any timeout but 0
    becomes a second, which those that wait longer ask for again. These names, too, are not documented.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from burner_redis.pubsub import PubSub

        async def receive(self: Any, timeout: float | None) -> Any:
            try:
                return await asyncio.to_thread(self._queue.get, timeout != 0, 1.0)
            except queue.Empty:
                return None

        receives = [*signature(PubSub._queue_get).parameters] == ["self", "timeout"]
        if receives and isinstance(PubSub(None)._queue, queue.Queue):
            PubSub._queue_get = receive


def stop_without_users(locks: ServerLocks, port: int) -> None:
    """End this process, the server, once it has no users.

    Also if that cannot be determined for OUTAGE seconds.
    """
    answered = time.monotonic()
    while time.monotonic() - answered < OUTAGE:
        time.sleep(CHECK_SECONDS)
        try:
            if locks.close_unused(port):
                break
        except FileNotFoundError:  # the home was deleted, so that no command can find this server again
            break
        except Exception:
            traceback.print_exc()
            continue
        answered = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_TIMEOUT)
    os._exit(0)


def main(listener: socket.socket, home: Path, kind: str) -> None:
    """Serve on a bound socket until SIGTERM or, if `kind` is SHARED, until no user is left."""
    port = listener.getsockname()[1]
    if kind == SHARED:
        watch = threading.Thread(target=stop_without_users, args=(ServerLocks(home), port), daemon=True)
        watch.start()
        # Only the services of Prefect's own temporary server run.
        os.environ |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_UI_ENABLED": "0"}
        # Types of blocks are for the UI, and `up` registers them; a new block registers its own.
        os.environ |= dict.fromkeys(BLOCK_TYPES, "false")
    os.environ["PREFECT_UI_API_URL"] = f"http://127.0.0.1:{port}/api"
    with without_garbage_collection():
        import uvicorn

        app = make_app()
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
