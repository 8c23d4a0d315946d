"""Report, comparison and series in a real browser: light and dark, wide and narrow, without requests."""

import pytest

from tasks.continual.gates import Row
from tasks.continual.page import render
from tasks.continual.rounds import NOT_PROMOTED, PROMOTED, Round, Series
from tasks.continual.series import Promoted
from tasks.reporting import comparison_page, html
from tasks.store.store import Store
from tests.browser.pages import NARROW, WIDE, visit
from tests.tasks.reporting.run_folders import write_report, write_run


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """URLs of a report, of a comparison page, and of a series with a round that was not promoted."""
    store = tmp_path_factory.mktemp("pages")
    for name, rate in (("first", "3e-3"), ("second", "1e-3")):
        write_run(store / "runs" / name, f"train.learning_rate={rate}")
    page = write_report(store / "runs/first")
    runs = comparison_page.load_runs(Store(str(store)), ["first", "second"])
    both = html.write(store / "compare.html", comparison_page.render(*runs))
    outcomes = [PROMOTED, PROMOTED, NOT_PROMOTED]
    rounds = [
        Round(
            f"nightly-round-{number}",
            number,
            outcome,
            tokens=64603,
            replay=0.05,
            rows=rows(number, outcome),
            current=number == 2,
        )
        for number, outcome in enumerate(outcomes, 1)
    ]
    series = store / "series.html"
    series.write_text(render(Series("nightly", Promoted("nightly-round-2", "one", 2, "t", "d"), rounds)))
    return {"report": page.as_uri(), "compare": both.as_uri(), "series": series.as_uri()}


def rows(number: int, outcome: str) -> list[Row]:
    """What a round was measured."""
    rise = 0.005 if outcome == PROMOTED else 1.0
    old = Row("old", 1 + number / 100, 1 + number / 100 + rise, "rises ≤ 0.01", outcome == PROMOTED)
    return [old, Row("new", 2.0, 1.5 - number / 10, "falls", True)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "size"), [("wide", WIDE), ("narrow", NARROW)])
@pytest.mark.parametrize("name", ["report", "compare", "series"])
def test_page_is_self_contained_and_fits_the_window(browser, pages, name, width, size, scheme):
    with visit(browser, pages[name], size, scheme) as seen:
        assert seen.page.locator("svg .line").count() >= 2
        background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = sum(map(int, background.removeprefix("rgb(").rstrip(")").split(","))) < 3 * 128
        assert dark == (scheme == "dark")
        assert not seen.overflows()
        seen.picture(f"{name}-{width}-{scheme}", whole=True)
        assert seen.asked == []
        assert seen.complaints == []
