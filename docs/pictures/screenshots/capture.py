"""Take screenshots after `trainshed run tiny`: `python …/capture.py RUN_FOLDER [NAME ...]`

Names are the keys of SIZES, by default all but those of OF_ROUNDS. They show:

    prefect, alerts        a Prefect server, at PREFECT_API_URL with PREFECT_API_AUTH_STRING; for `alerts`, started by
                           `trainshed up --alerts`
    report, evaluations    the run's report.html
    fleet                  the store's fleet.html, written by `trainshed fleet`
    ladder, branches       the pages of `trainshed ladder run tiny` and `trainshed branches run tiny`
    mixture                the page of the mixture in docs/training/mixtures.md
    trackers               `trackio show --project llama`, while it is running
    series, rounds         the page of a series, and its artifact in Prefect's UI; RUN_FOLDER is its latest round. They are of
                           `benchmarks.rounds --part printed --keep FOLDER`, whose server has the PREFECT_HOME
                           FOLDER/server/prefect-home

Needs Playwright and Chromium (`make test-system`).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Browser, sync_playwright

from flows.cli.deployments import query
from flows.server.prefect_settings import LOGIN, PASSWORD

HERE = Path(__file__).parent
SIZES = {
    "prefect": (1200, 1130),
    "report": (1000, 1130),
    "fleet": (1300, 1100),
    "alerts": (1200, 760),
    "trackers": (1200, 760),
    "ladder": (1000, 1130),
    "mixture": (1000, 1350),
    "branches": (1000, 1130),
    "evaluations": (1000, 1130),
    "series": (1000, 1130),
    "rounds": (1200, 1130),
}
# Text that shows that a page is complete.
SHOWN = {
    "prefect": "fullest rank",
    "report": "mean of",
    "fleet": "last change",
    "alerts": "Trainshed alert: started",
    "trackers": "validation_loss",
    "ladder": "Rungs",
    "mixture": "From the natural",
    "branches": "Averages of checkpoints",
    "evaluations": "Evaluations of checkpoints",
    "series": "Loss by round",
    "rounds": "is promoted",
}
# Where pages of Prefect are cut, since paths of this machine follow.
ENDS = {"prefect": "role=heading[name='Paths']", "rounds": "text=/^Page: /"}
OF_ROUNDS = ("series", "rounds")  # only by name, as RUN_FOLDER is another
SECTIONS = ("evaluations",)  # screenshots of only the section that has the text of SHOWN


def main(run: Path, *names: str) -> None:
    """Write NAME.png of each name beside this file."""
    pages = {
        "prefect": lambda: _page_address(run, "run"),
        "report": lambda: (run / "report.html").resolve().as_uri(),
        "evaluations": lambda: (run / "report.html").resolve().as_uri(),
        "trackers": lambda: "http://127.0.0.1:7860/?project=llama",
        "alerts": lambda: f"{os.environ['PREFECT_API_URL'].removesuffix('/api')}/automations",
        "fleet": lambda: (run.parents[1] / "fleet.html").resolve().as_uri(),
        "mixture": lambda: (run.parents[1] / "mixtures/mixture.html").resolve().as_uri(),
        "ladder": lambda: (run.parents[1] / f"ladders/{run.name}-ladder.html").resolve().as_uri(),
        "branches": lambda: (run.parents[1] / f"branches/{run.name}-branches.html").resolve().as_uri(),
        "series": lambda: (run.parents[1] / f"series/{_series(run)}.html").resolve().as_uri(),
        "rounds": lambda: _page_address(run, "series"),
    }
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in names or [name for name in pages if name not in OF_ROUNDS]:
            _capture(browser, name, pages[name]())
        browser.close()


def _series(run: Path) -> str:
    """Name of the series of a round."""
    return run.name.rpartition("-round-")[0]


def _page_address(run: Path, key: str) -> str:
    """Address of an artifact of a run's latest flow run in Prefect's UI."""
    api, flow_run = os.environ["PREFECT_API_URL"], (run / "flow-run").read_text().strip()
    found = {"flow_runs": {"id": {"any_": [flow_run]}}, "artifacts": {"key": {"any_": [key]}}}
    (artifact,) = query(f"{api}/artifacts/filter", found)
    return f"{api.removesuffix('/api')}/artifacts/artifact/{artifact['id']}"


def _capture(browser: Browser, name: str, address: str) -> None:
    """Write a screenshot of a page, cut above the element of ENDS."""
    width, height = SIZES[name]
    page = browser.new_page(viewport={"width": width, "height": height})
    if address.startswith(server := os.environ.get("PREFECT_API_URL", "").removesuffix("/api") or "-"):
        page.goto(f"{server}{LOGIN}#{quote(os.environ[PASSWORD])}")
    page.goto(address)
    page.get_by_text(SHOWN[name]).first.wait_for()
    if name == "trackers":  # the page shows all metrics, by group
        page.get_by_text(SHOWN[name]).first.scroll_into_view_if_needed()
    page.wait_for_timeout(1000)  # for fonts and images
    if name in SECTIONS:
        page.locator("section").filter(has_text=SHOWN[name]).screenshot(path=HERE / f"{name}.png")
        return
    end = page.locator(ENDS[name]).last.bounding_box() if name in ENDS else None
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, end["y"]) if end else height}
    page.screenshot(path=HERE / f"{name}.png", clip=clip)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
