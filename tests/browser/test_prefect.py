"""Prefect's UI in a browser: runs, deployment forms, signing in, and attacks by a foreign page."""

import http.server
import json
import os
import re
import signal
import threading
from urllib.parse import quote

import psutil
import pytest

from flows.cli.deployments import listed
from flows.cli.deployments import query as ask
from flows.server.prefect_settings import LOGIN, PASSWORD
from tests.browser.conftest import FOREIGN
from tests.browser.pages import visit
from tests.deployments import HOME, register
from tests.flows.micro import settings, wait_for_step, write_patient_loss
from tests.waiting import until

STEPS = 4000
ROWS = 10  # in the table of the last steps
ENOUGH = 120  # steps until every artifact is shown


def artifacts(prefect_ui: str, flow_run: str) -> dict[str, dict]:
    """Artifacts of a flow run by their unique keys."""
    found = ask(f"{prefect_ui}/api/artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    assert len({each["key"] for each in found}) == len(found)
    return {each["key"]: each for each in found}


@pytest.fixture(scope="module")
def killed(prefect_ui, browser, profile, tmp_path_factory):
    """A run viewed while it trained, then killed: flow run id, artifacts and what the pages showed."""
    from tests.flows.micro import Command

    folder = tmp_path_factory.mktemp("live")
    overrides = settings(
        f"train.steps={STEPS}",
        "train.warmup_steps=50",
        "evaluate.every=20",
        "cluster.retries=0",
        "cluster.hang_seconds=null",  # the run is suspended while pages are looked at
        "checkpoint.every=40",
        write_patient_loss(folder),
    )
    started = Command(
        "run", str(profile), *overrides, "--name", "live", cwd=folder, PREFECT_API_URL=f"{prefect_ui}/api"
    )
    seen = {}
    try:
        run = folder / "store/runs/live"
        wait_for_step(run, ENOUGH, timeout=240)
        (flow_run,) = ask(f"{prefect_ui}/api/flow_runs/filter", {})
        shown = {}

        def is_shown() -> bool:
            """Whether the curve and a full table are shown; both are updated every few seconds."""
            shown.update(artifacts(prefect_ui, flow_run["id"]))
            full = "last-steps" in shown and len(json.loads(shown["last-steps"]["data"])) == ROWS
            return full and "data:image" in shown["run"]["data"]

        until(is_shown, 60, every=0.2)
        training = [
            process
            for process in started.processes()
            if any("modeling.training.train" in part for part in process.cmdline())
            and process.ppid() != started.process.pid
        ]
        for process in training:  # leaves the cores to the browser
            process.suspend()
        with visit(browser, f"{prefect_ui}/artifacts/artifact/{shown['run']['id']}", (1300, 1150)) as page:
            page.page.get_by_role("heading", name="Plan", exact=True).wait_for()
            page.page.wait_for_timeout(500)
            page.picture("prefect-run")
            seen["run"] = (page.page.inner_text("body"), page.has_broken_image(), page.complaints, page.asked)
            seen["pictures"] = page.page.locator("article img").count()
        with visit(browser, f"{prefect_ui}/runs/flow-run/{flow_run['id']}", (1300, 1000)) as page:
            page.page.get_by_text("Artifacts", exact=True).last.click()
            page.page.get_by_text("last-steps").first.wait_for()
            page.page.wait_for_timeout(1000)
            page.picture("prefect-flow-run")
            seen["flow run"] = (
                page.page.inner_text("body"),
                page.has_broken_image(),
                page.complaints,
                page.asked,
            )
        for process in training:
            os.kill(process.pid, signal.SIGKILL)
        code, _, err = started.result()
        assert code == 1
        assert "rank 0 was killed by SIGKILL" in err
        assert "Traceback" not in err
        assert "Traceback" in (folder / "store/logs/live.log").read_text()
        assert "train failed" in (run / "events.jsonl").read_text()
        assert started.left_behind() == []
    finally:
        for process in started.processes():
            with psutil.Process(process.pid).oneshot():
                process.kill()
    return flow_run["id"], shown, seen


def test_run_page_shows_curve_plan_and_paths_during_training(killed):
    _, shown, seen = killed
    text, broken, complaints, asked = seen["run"]
    assert re.search(rf"Step [\d,]+ of {STEPS:,}, loss \d", text)
    assert "one process" in text
    assert "store/runs/live" in text
    assert "trainshed tensorboard live" in text
    assert seen["pictures"] == 1
    assert not broken
    assert complaints == []
    assert asked == []
    assert 0 < float(shown["training"]["data"]) < 100
    assert float(shown["dataset"]["data"]) == 100
    steps = json.loads(shown["last-steps"]["data"])
    assert len(steps) == ROWS
    assert re.fullmatch(r"[\d,]+", steps[0]["tokens/s"])
    assert "MFU" not in steps[0]  # unknown for a CPU


def test_flow_run_lists_readable_steps_and_artifacts(killed):
    text, broken, complaints, asked = killed[2]["flow run"]
    for part in ("live", "training", "last-steps", "dataset"):
        assert part in text
    assert not broken
    assert complaints == []
    assert asked == []


def test_failure_is_shown_first_with_what_to_do(killed, prefect_ui, browser):
    flow_run, _, _ = killed
    shown = artifacts(prefect_ui, flow_run)["run"]
    assert shown["data"].startswith("# Failed\n\n**What happened:**")
    with visit(browser, f"{prefect_ui}/artifacts/artifact/{shown['id']}", (1300, 1300)) as page:
        page.page.get_by_text("What to do next:").wait_for()
        page.page.wait_for_timeout(500)
        page.picture("prefect-failed")
        text = page.page.inner_text("body")
        assert "SIGKILL" in text
        assert re.search(r"resumes from step [\d,]+, its latest checkpoint", text)
        assert text.index("Failed") < text.index("Step ")
        assert page.complaints == []


NAMING = ("profile", "run", "file")  # parameters that name what a deployment runs, if they are text
# Whether a form field has this value or shows it as the selection.
SHOWN = """name => [...document.querySelectorAll("form *")].some(
    each => String(each.value || (each.children.length ? "" : each.textContent)).trim() === name)"""


def test_deployment_forms_open_with_their_profile_and_explain_their_fields(prefect_ui, browser, tmp_path):
    """For the first deployment of each flow and a few others, which differ only in their parameters."""
    every = listed(HOME, every=True)
    by_flow = {each["entrypoint"]: each for each in reversed(every)}  # the first of each
    chosen = [*by_flow.values(), *(each for each in every[6::60] if each not in by_flow.values())]
    register(f"{prefect_ui}/api", chosen, tmp_path)
    deployments = ask(f"{prefect_ui}/api/deployments/filter", {})
    assert len(deployments) == len(chosen)
    # With the value that each form must show; `fleet` has none but defaults.
    forms = {
        f"{prefect_ui}/deployments/deployment/{each['id']}/run": value
        for each in deployments
        if (value := next((each["parameters"][key] for key in NAMING if key in each["parameters"]), None))
    }
    with visit(browser, next(iter(forms)), (1300, 1200)) as seen:
        seen.page.get_by_text("Where artifacts and runs are kept").wait_for()
        seen.page.wait_for_timeout(500)
        seen.picture("prefect-form")
        text = seen.page.inner_text("body")
        assert "A shipped profile, or the path of a YAML file" in text
        assert "Keys to override" in text
        assert "name in the store" in text  # beside Prefect's own "Run Name"
        for address, name in forms.items():
            seen.page.goto(address)
            seen.page.wait_for_function(SHOWN, arg=name)
        assert seen.complaints == []
        assert seen.asked == []


AUTOMATION = {
    "name": "foreign",
    "trigger": {
        "type": "event",
        "posture": "Reactive",
        "expect": ["prefect.flow-run.Completed"],
        "threshold": 1,
        "within": 0,
    },
    "actions": [{"type": "do-nothing"}],
}
# An untyped Blob has no content type, so that the browser asks no permission first (no preflight).
SEND = """async ([address, body, headers]) => {
    try {
        const how = headers ? {mode: "cors", headers} : {mode: "no-cors"};
        const answer = await fetch(address, {method: "POST", body: new Blob([body]), ...how});
        return answer.type === "opaque" ? "sent" : answer.status;
    } catch (error) { return "not allowed"; }
}"""


@pytest.fixture
def page(browser):
    """A page of another site, in a browser that has signed in to no server."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>page</title>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        context = browser.new_context()
        opened = context.new_page()
        opened.goto(f"http://{FOREIGN}:{site.server_port}/")
        yield opened
        context.close()
        site.shutdown()


def names(prefect_ui: str) -> set[str]:
    return {each["name"] for each in ask(f"{prefect_ui}/api/automations/filter", {})}


def test_page_of_another_site_changes_nothing_even_with_the_password(prefect_ui, page):
    automations, body = f"{prefect_ui}/api/automations/", json.dumps(AUTOMATION)
    assert page.evaluate(SEND, [automations, body, None]) == "sent"
    assert page.evaluate(SEND, [automations, body, {"Authorization": "Basic eDp5"}]) == "not allowed"
    renamed = prefect_ui.replace("127.0.0.1", FOREIGN)
    assert page.goto(f"{renamed}/api/health").status == 400  # DNS rebinding
    assert page.evaluate(SEND, ["/api/automations/", body, {}]) == 400
    assert AUTOMATION["name"] not in names(prefect_ui)
    ask(automations, AUTOMATION)  # the same request, with password and token
    assert AUTOMATION["name"] in names(prefect_ui)


def test_user_signs_in_by_the_printed_address_and_others_do_not(prefect_ui, page):
    page.goto(f"{prefect_ui}/runs")
    page.wait_for_url("**/login?redirect=/runs")
    page.goto(f"{prefect_ui}{LOGIN}#{quote(os.environ[PASSWORD])}")
    page.get_by_role("link", name="Deployments").first.wait_for()
    assert "login" not in page.url
    assert "password" not in page.url
    assert page.goto(f"{prefect_ui}/runs").headers["content-security-policy"] == "frame-ancestors 'none'"
