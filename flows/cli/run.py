"""`trainshed run`: the pretraining flow in this process, with a Prefect server of its own where none is named.

The terminal shows Trainshed's lines; Prefect's, and every traceback, go to `<store>/logs/<run>.log`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from flows.cli.temporary_server import serving
from flows.prefect_settings import SETTINGS
from flows.ui import console
from profiles import resolve
from profiles.errors import ProfileError
from tasks.sources.shard import SOURCE_ERRORS
from tasks.store.store import Store

log = logging.getLogger(__name__)

FAILED, REFUSED = 1, 2


def run(profile: str, overrides: Sequence[str], name: str | None, store: str, *, as_json: bool) -> int:
    """Run the flow and show what came of it; returns the exit code.

    Raises:
        ProfileError: the profile is refused.
    """
    resolved = resolve.load(profile, overrides, name)
    resolve.check(resolved)
    resolve.check_start(resolved)
    Store(store, resolved.cluster.work_dir or "store")  # refused here where nobody knows its scheme
    logs = Path(resolved.cluster.work_dir or "store") if "://" in store else Path(store)
    log_file = logs / "logs" / f"{resolved.name}.log"
    terminal = console.Terminal(console.Unread(stderr=as_json, highlight=False))
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        key = "cluster.work_dir" if "://" in store else "store"
        raise ProfileError(key, str(logs), f"is no folder to write to: {error.strerror}") from None
    try:
        with prefect_api(log_file.with_name("server.log")):
            from flows.pretrain import pretrain

            console.take_over_logging(terminal, log_file)
            result = pretrain(profile, list(overrides), name, store)
    except ProfileError:
        raise
    except KeyboardInterrupt:
        console.say("stopped; the same command goes on from the newest checkpoint")
        return FAILED
    except SOURCE_ERRORS as error:
        log.debug("a source was refused", exc_info=True)
        console.say(f"trainshed: {console.in_one_line(error)}")
        return REFUSED
    except Exception as error:
        log.debug("the run failed", exc_info=True)
        console.say(f"trainshed: {console.in_one_line(error)}")
        console.say("the same command goes on from where this one got to")
        if log_file.is_file():
            console.say(f"the traceback: {log_file}")
        return FAILED
    finally:
        terminal.end_progress()
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        show(terminal.console, result)
    return 0


@contextlib.contextmanager
def prefect_api(log_file: Path) -> Iterator[None]:
    """Prefect's API for the block: that of the server which the user's settings name, else of one of our own."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if PREFECT_API_URL.value():
        yield
        return
    with serving(log_file) as server:
        from prefect.logging.handlers import APILogWorker

        import flows.pretrain  # noqa: F401  takes about as long as the server's start, so it is done beside it

        with temporary_settings({PREFECT_API_URL: server.wait()}):
            try:
                yield
            finally:
                APILogWorker.drain_all(timeout=5)  # the last lines, while there is somebody to take them


def show(terminal: Console, result: dict[str, Any]) -> None:
    """What it came to and where things are."""
    terminal.print()
    facts = {
        "validation loss": f"{result['validation_loss']:.4f}",
        "perplexity": f"{result['perplexity']:.1f}",
        "model": console.from_here(result["export"]),
        "metrics": console.from_here(result["metrics"]),
        "report": console.from_here(result["report"]),
    }
    for name, value in facts.items():
        terminal.print(f"{name:<15}  {value}", soft_wrap=True, markup=False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
