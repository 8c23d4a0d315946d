"""`trainshed run` and `chain`: run a flow here, with a local Prefect server if none is configured.

The terminal shows Trainshed's lines; Prefect's lines and tracebacks go to `<store>/logs/<run>.log`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.cli.exit_codes import DONE, FAILED, REJECTED
from flows.server.outages import FINISH_SECONDS, TEAM_SECONDS, await_start, finish_sending
from flows.server.prefect_settings import (
    PASSWORD,
    configure,
    may_have_server_settings,
    single_certificate_setting,
)
from flows.server.shared_server import Server, shared_server
from flows.step_names import check_last_step
from flows.ui.console import (
    PipeTolerantConsole,
    TerminalHandler,
    configure_logging,
    log_outcome,
    one_line,
    print_facts,
    print_json,
    print_stderr,
    relative,
    waiting,
)
from modeling.start import without_garbage_collection
from profiles import resolve
from profiles.errors import ProfileError, counted
from profiles.files import state_files
from profiles.files.state_files import CorruptedState
from profiles.schema import Profile
from tasks.chain_gate import GateMissed
from tasks.reporting.format import format_perplexity
from tasks.reporting.outcome import Outcome
from tasks.sources.shard import SOURCE_ERRORS
from tasks.store.store import Store, open_store

log = logging.getLogger(__name__)

OUTPUTS = {"model": "export", "metrics": "metrics", "report": "report"}  # printed name: key of the result


def run(options: argparse.Namespace) -> int:
    """Run the flow and print its results. Raises ProfileError for an invalid profile or store."""
    if options.source:
        with without_garbage_collection(), waiting(lambda: "loading the planner"):
            from flows.start_checks import overrides_from

        work_dir = resolve.load(options.profile).cluster.work_dir or "store"
        started = overrides_from(options.source, Store(options.store, work_dir))
        options.overrides = [*started, *options.overrides]
    profile = resolve.load(options.profile, options.overrides, options.name)
    resolve.check(profile)
    check_last_step(profile, options.until)
    if options.dry_run:
        return _dry_run(options, profile)
    resolve.check_start(profile)
    asked = options.update or options.replace or options.fork or options.until
    if not asked and _show_completed(options, profile):
        return DONE
    with without_garbage_collection(), waiting(lambda: f"planning {profile.name}"):
        from flows.start_checks import RunCommand, check_run

        command = RunCommand(
            options.profile, options.overrides, options.name, options.store, fork=options.fork or ""
        )
        check_run(profile, command, replace=options.replace)

    flags = {name: getattr(options, name) for name in ("update", "replace", "fork", "until")}
    given = options.profile, options.overrides, options.name, options.store
    start = call_flow(f"flows.pretrain:{'finetune' if profile.fine_tunes else 'pretrain'}", *given, **flags)
    return run_flow(options, profile, profile.name, start, print_results)


def chain(options: argparse.Namespace) -> int:
    """Train several profiles in one flow run. Raises ProfileError for an invalid profile or store."""
    with without_garbage_collection(), waiting(lambda: f"planning {counted(len(options.profiles), 'run')}"):
        from flows.chained_runs import load_chain
        from flows.start_checks import check_plan

        runs = load_chain(options.profiles, options.overrides, options.name or "")
        for each in runs:
            check_plan(each.profile)
    given = options.profiles, options.overrides, options.name, options.store
    start = call_flow("flows.chain:chain", *given, replace=options.replace)
    return run_flow(options, runs[0].profile, "-".join(each.name for each in runs), start, _print_chain)


def _show_completed(options: argparse.Namespace, profile: Profile) -> bool:
    """Show the result of a completed run, without Prefect and torch; False if a flow has to run.

    If a server is in use on this store or configured, a flow runs anyway, so that the server lists it.
    """
    from tasks import completed

    work_dir = profile.cluster.work_dir or "store"
    if not state_files.is_dir(Store(options.store, work_dir).work_dir):
        return False  # a run that is rejected makes no store
    store = open_store(options.store, work_dir)
    home = configure(store.work_dir)
    if may_have_server_settings(home) or state_files.exists(home / "server.json"):
        return False
    if (result := completed.find(store, profile)) is None:
        return False
    if options.json:
        print_json(result)
        return True
    terminal = TerminalHandler(PipeTolerantConsole(highlight=False))
    logging.getLogger().handlers = [terminal]
    log.setLevel(logging.INFO)
    for step in result["steps"]:
        log_outcome(log, Outcome(**step))
    print_results(terminal.console, result)
    return True


def _dry_run(options: argparse.Namespace, profile: Profile) -> int:
    """Print what the step train would submit, on any machine: neither data nor devices are needed."""
    with without_garbage_collection(), waiting(lambda: f"planning {profile.name}"):
        from modeling.planning import planner
        from modeling.planning.auto import resolve_auto
        from tasks.launchers.preview import preview
        from tasks.step import Context
        from tasks.steps.jobs import training_job

        profile = resolve_auto(profile)
        planner.require_fit(profile, planner.plan(profile))
    store = Store(options.store, profile.cluster.work_dir or "store")
    job = training_job(Context(profile, store, store.run_folder(profile.name).path))
    text = preview(job, profile.cluster)
    if options.json:
        print_json({"run": profile.name, "launcher": profile.cluster.launcher, "submits": text})
    else:
        print(text, end="")
        print_stderr("nothing was submitted; names in capitals stand for artifacts of earlier steps")
    return DONE


def call_flow(flow: str, *arguments: Any, **named: Any) -> Callable[[], Any]:
    """A call of a flow, MODULE:NAME, which is imported then: once Prefect's settings are chosen."""

    def start() -> Any:
        module, _, name = flow.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments, **named)

    return start


def run_flow(
    options: argparse.Namespace,
    profile: Profile,
    name: str,
    start: Callable[[], Any],
    show: Callable[[Console, Any], None],
) -> int:
    """Run a flow in this process and print its result; returns the exit code.

    Args:
        options: `store` and `json`.
        profile: whose `cluster.work_dir` is used with a remote store.
        name: of the log file.
        start: calls the flow.
        show: prints the result in words.

    Raises:
        ProfileError: an invalid profile or store.
    """
    store = open_store(options.store, profile.cluster.work_dir or "store")  # rejects an unknown scheme
    work_dir = Path(relative(str(store.work_dir)))
    log_file = work_dir / "logs" / f"{name}.log"
    terminal = TerminalHandler(PipeTolerantConsole(stderr=options.json, highlight=False))
    stop = _StopRequest()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        state_files.make_folder(log_file.parent)
    except OSError as error:
        key = "cluster.work_dir" if store.is_remote else "store"
        raise ProfileError(key, str(work_dir), f"cannot be written: {error.strerror}") from None
    try:
        with prefect_api(work_dir):
            from prefect.exceptions import CancelledRun

            from flows.final_states import results

            results.clear()
            configure_logging(terminal, log_file)
            stop.check()
            try:
                result = start()
            except CancelledRun as cancelled:
                raise KeyboardInterrupt(f", {cancelled}") from None
            except Exception as error:
                if results.result is None and results.stopped is None:
                    raise
                log.debug("the flow's final state was not stored", exc_info=error)
                what = "" if results.result is None else ", whose results are complete"
                log.warning("Prefect's server did not store the final state of this flow run%s", what)
                finish_sending()
                if results.result is None:
                    raise KeyboardInterrupt(f", {results.stopped}") from None
                result = results.result
    except ProfileError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        return _report_failure(error, log_file)
    finally:
        terminal.end_progress()
    if options.json:
        print_json(result)
    else:
        show(terminal.console, result)
    return DONE


class _StopRequest:
    """Signal handler that raises KeyboardInterrupt, as Python's does, and remembers it.

    The interpreter drops an exception that is raised inside a destructor or a callback.
    """

    def __init__(self) -> None:
        self._requested = False

    def __call__(self, *_: object) -> None:
        self._requested = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if it was requested before."""
        if self._requested:
            raise KeyboardInterrupt


def _report_failure(error: BaseException, log_file: Path) -> int:
    """Print why a flow ended and what to do next; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):  # its message, if any, tells what is saved
        print_stderr(f"stopped{error}; run the same command again to resume")
        return FAILED
    if isinstance(error, GateMissed):
        print_stderr(f"trainshed: {error}")
        return FAILED
    log.debug("the flow failed", exc_info=error)
    print_stderr(f"trainshed: {one_line(error)}")
    if isinstance(error, SOURCE_ERRORS):
        return REJECTED
    if isinstance(error, CorruptedState):  # it names the file and what to do
        return FAILED
    from tasks.failures import FatalError

    if not isinstance(error, FatalError):
        print_stderr("run the same command again to resume")
    if state_files.is_file(log_file):
        print_stderr(f"traceback: {log_file}")
    return FAILED


@contextlib.contextmanager
def prefect_api(work_dir: Path) -> Iterator[None]:
    """Context manager: use the configured Prefect server, else the one that commands on this store share."""
    chosen = os.environ.get("PREFECT_HOME")
    home = configure(work_dir)
    with contextlib.ExitStack() as stack:

        def serve() -> Server:
            return stack.enter_context(shared_server(home, work_dir / "logs/server.log"))

        new = not state_files.exists(home / "prefect.db")

        # If possible before Prefect is imported, so that the import overlaps with the server's start.
        server = None if may_have_server_settings(home) else serve()
        with without_garbage_collection(), waiting(lambda: "loading Prefect"):
            from prefect.settings import (
                PREFECT_API_AUTH_STRING,
                PREFECT_API_SSL_CERT_FILE,
                PREFECT_API_URL,
                PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
                temporary_settings,
            )

            configured = bool(PREFECT_API_URL.value())
            if not configured:
                server = server or serve()
            import flows.pretrain  # noqa: F401
        if configured:
            with waiting(lambda: "waiting for the Prefect server"):
                await_start(PREFECT_API_URL.value())
            settings, seconds = dict[Any, Any](), TEAM_SECONDS
        else:
            assert server is not None  # Prefect's settings name no other
            with waiting(lambda: "starting Prefect's server"):
                url = server.wait()
            own = chosen or home.is_relative_to(work_dir.absolute())
            why = "" if own else ", as the store's file system has no locks"
            database = f", database in {relative(str(home))}{why}" if new else ""
            print_stderr(_where_to_watch(url, database))
            certificate = single_certificate_setting(home)["PREFECT_API_SSL_CERT_FILE"]
            settings = {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: server.access[PASSWORD]}
            settings[PREFECT_API_SSL_CERT_FILE] = certificate
            # No other client needs this run's heartbeats, and the last one delays the exit by up to a second.
            if server.started:
                settings[PREFECT_FLOWS_HEARTBEAT_FREQUENCY] = None
            seconds = FINISH_SECONDS
        with temporary_settings(settings):  # whatever the flow changes ends with it
            try:
                yield
            finally:
                finish_sending(seconds)  # before the server stops


def _where_to_watch(api: str, database: str) -> str:
    """The address of the server's UI, which only `trainshed up` serves, or else of its API."""
    address = api.removesuffix("/api")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError), direct.open(address, timeout=5):
        return f"Prefect's UI: {address}"
    # Two lines, neither of which a terminal of 80 columns breaks.
    return f"Prefect's API: {api}{database}\nfor its UI, start `trainshed up` before the run"


def print_results(console: Console, result: dict[str, Any]) -> None:
    """Print the final metrics and the paths of the outputs."""
    console.print()
    if "until" in result:
        console.print(f"ended after {result['until']}; the same command without --until continues there")
        return
    facts = {"validation loss": f"{result['validation_loss']:.4f}"}
    if result["perplexity"] is not None:
        facts["perplexity"] = format_perplexity(result["perplexity"])
    print_facts(console, facts | _outputs(result))


def _outputs(result: dict[str, Any]) -> dict[str, str]:
    return {name: relative(result[key]) for name, key in OUTPUTS.items()}


def _print_chain(console: Console, results: list[dict[str, Any]]) -> None:
    """Print the validation loss of each run, and the outputs of the last one."""
    console.print()
    width = max(len(result["run"]) for result in results)
    for result in results:
        before = result["before"] and f"{result['before']['validation_loss']:.4f} before, "
        line = f"{result['run']:<{width}}  validation loss {before or ''}{result['validation_loss']:.4f}"
        console.print(line + (" after" if before else ""), soft_wrap=True, markup=False)
    console.print()
    print_facts(console, _outputs(results[-1]))
