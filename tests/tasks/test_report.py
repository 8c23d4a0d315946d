"""The report as a reader gets it: all there, escaped, and without any request to a network."""

import html
import itertools
import json
import math
import re
from html.parser import HTMLParser

import pytest

from profiles import resolve
from tasks.chart import MAX_POINTS, Series, line_chart, thinned, ticks
from tasks.report import Outcome, run

VOID = {"meta", "link", "br", "img"}


class Wellformed(HTMLParser):
    """Collects text and addresses; every tag must be closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.addresses = [], [], []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(tmp_path):
    profile = resolve.load("tiny").model_copy(update={"description": "<script>alert(1)</script> & more"})
    folder = tmp_path / "it's a run"
    folder.mkdir()
    rows = [{"step": step, "loss": 8.3 - step / 100} for step in range(1, 101)]
    rows += [{"step": 50, "validation_loss": 7.9}, {"step": 100, "validation_loss": 7.4}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "profile.yaml").write_text("name: <tiny>")
    outcomes = [
        Outcome("tokenizer", "cached", 0.1),
        Outcome("checkpoint", "skipped", 0, "from <scratch>"),
        Outcome("train", "done", 75),
    ]
    plan = {"parameters": 2735424, "mesh": {"data": 1, "tensor": 2}}
    evaluation = {"validation_loss": 7.4, "perplexity": 1635.98, "tokens": 12345, "step": 100}
    return run(profile, folder, plan, evaluation, outcomes).read_text()


def test_the_report_is_well_formed_and_says_everything(page):
    parser = Wellformed()
    parser.feed(page)
    assert parser.open == []
    text = "".join(parser.text)
    expected = (
        "tokenizer",
        "cached",
        "skipped",
        "from <scratch>",
        "done · 1:15",
        "7.4000",
        "12,345",
        "2,735,424",
    )
    for part in (*expected, "data 1 × tensor 2", "name: <tiny>", "& more"):
        assert part in text, part


def test_what_users_wrote_is_escaped(page):
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page


def test_the_report_asks_the_network_for_nothing(page):
    parser = Wellformed()
    parser.feed(page)
    assert parser.addresses == ["data:,"]
    assert not re.search(r"https?://|url\(|@import", page)


def test_the_code_that_it_shows_names_the_export_folder(page, tmp_path):
    code = html.unescape(page.split("<pre>")[1].split("</pre>")[0])
    compile(code, "report", "exec")
    assert str(tmp_path) in code


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (5.3, 8.31), (1, 300), (0.0001, 0.00011), (7, 7), (-3, 1e6)]
)
def test_ticks_are_round_and_enclose(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low <= high <= marks[-1]
    assert 2 <= len(marks) <= 8
    steps = {round((b - a) / (marks[1] - marks[0]), 6) for a, b in itertools.pairwise(marks)}
    assert steps == {1}
    mantissa = (marks[1] - marks[0]) / 10 ** math.floor(math.log10(marks[1] - marks[0]) + 1e-9)
    assert min(abs(mantissa - whole) for whole in (1, 2, 5)) < 1e-6


def test_a_chart_leaves_out_what_is_not_finite_and_keeps_within_its_drawing():
    chart = line_chart(
        [Series("loss", "training", [(1, 8.0), (2, math.nan), (3, 7.0)])], x_label="step", y_label="loss"
    )
    places = re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", chart.split('class="line')[1])
    assert len(places) == 2
    assert all(0 <= float(x) <= 1000 and 0 <= float(y) <= 400 for x, y in places)
    assert "nan" not in chart


def test_nothing_to_draw_is_said():
    assert (
        line_chart([Series("loss", "training", [])], x_label="step", y_label="loss")
        == "<p>No points to draw.</p>"
    )


def test_long_curves_are_thinned_to_means():
    points = [(float(x), float(x % 2)) for x in range(10 * MAX_POINTS)]
    assert len(thinned(points)) == MAX_POINTS
    assert {y for _, y in thinned(points)} == {0.5}
