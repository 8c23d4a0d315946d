"""Report and comparison page in a real browser: light and dark, wide and narrow, without requests."""

import pytest

from tasks.reporting import comparison_page
from tasks.store.store import Store
from tests.browser.pages import NARROW, WIDE, visit
from tests.tasks.reporting.run_folders import write_report, write_run


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """URLs of a report and of a comparison page."""
    store = tmp_path_factory.mktemp("pages")
    for name, rate in (("first", "3e-3"), ("second", "1e-3")):
        write_run(store / "runs" / name, f"train.learning_rate={rate}")
    page = write_report(store / "runs/first")
    runs = comparison_page.load_runs(Store(str(store)), ["first", "second"])
    both = comparison_page.write_page(*runs, store / "compare.html")
    return {"report": page.as_uri(), "compare": both.as_uri()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "size"), [("wide", WIDE), ("narrow", NARROW)])
@pytest.mark.parametrize("name", ["report", "compare"])
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
