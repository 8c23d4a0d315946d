"""The report as a reader gets it: all there, escaped, and without any request to a network."""

import html
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from tokenizers import Tokenizer, decoders, models

from flows.cli.main import main
from profiles import resolve
from tasks.report import run
from tasks.reporting.chart import MAX_POINTS, Series, line_chart, thinned, ticks
from tasks.reporting.outcome import Outcome
from tasks.store.store import Store

VOID = {"meta", "link", "br", "img"}


TRACED = {
    "programs": [
        {"name": "block, training", "graphs": [{"flops": 10**9}, {"flops": 2 * 10**9}]},
        {"name": "loss, training", "graphs": [{"flops": 10**9}]},
    ],
    "stages": [{"kept": 9 << 20, "peak": 2 << 20}],
}


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


def write_run(folder, *overrides, losses=100):
    """A run's folder: metrics of so many steps, two evaluations, one incident."""
    folder.mkdir(parents=True)
    (folder / "profile.yaml").write_text(resolve.dump(resolve.load("tiny", overrides, folder.name)))
    rows = [
        {"step": step, "loss": 8.3 - step / 100, "step_seconds": 0.5, "tokens_per_second": 4096.0}
        | {"forward_backward_seconds": 0.3, "optimizer_seconds": 0.1, "memory_bytes": 3 << 28}
        | {"skipped": step == 7}
        for step in range(1, losses + 1)
    ]
    rows += [{"step": 50, "validation_loss": 7.9}, {"step": 100, "validation_loss": 7.4}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    event = {"event": "skipped", "time": 1.8e9, "step": 7, "reason": "loss is <nan>"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    words = {"To": 0, " be": 1, " or": 2, " <b>not</b>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="To"))
    tokenizer.decoder = decoders.Fuse()
    (folder / "export").mkdir()
    tokenizer.save(str(folder / "export/tokenizer.json"))


def report(folder):
    profile = resolve.load(str(folder / "profile.yaml")).model_copy(
        update={"description": "<script>alert(1)</script> & more"}
    )
    corpus = {"tokens": 604605, "documents": 681, "validation_tokens": 22816, "validation_documents": 38}
    corpus |= {"bytes": 2245413, "bytes_per_token": 3.579, "shards": 1}
    corpus |= {"missing": 0, "short": 1200, "duplicates": 3}
    compiled = {
        "total": 3,
        "failed": 0,
        "from_cache": 1,
        "seconds": 30.1,
        "programs": [
            {"name": "block", "graphs": 2, "status": "compiled", "seconds": 21.27, "peak_bytes": 5 << 28}
        ],
        "traced": TRACED,
    }
    outcomes = [
        Outcome("tokenizer", "cached", 4.0),
        Outcome("dataset", "done", 4.2, summary=corpus),
        Outcome("checkpoint", "skipped", None, "from <scratch>"),
        Outcome("graphs", "done", 30.1, summary=compiled),
        Outcome("train", "done", 75),
    ]
    stage = {"bytes": {"parameters": 1 << 29, "optimizer": 505 << 20, "activations": 7 << 20}, "flops": 1e12}
    plan = {"parameters": 2735424, "mesh": {"data": 1, "tensor": 2}, "step_seconds": 0.25, "stages": [stage]}
    samples = [{"prompt": [0, 1], "text": [2, 3]}]
    evaluation = {
        "validation_loss": 7.4,
        "perplexity": 1635.98,
        "tokens": 12345,
        "step": 100,
        "metrics": {"own_accuracy": 0.123456},
        "samples": samples,
    }
    return run(profile, folder, plan, evaluation, outcomes)


@pytest.fixture
def page(tmp_path):
    folder = tmp_path / "it's here" / "first"
    write_run(folder)
    return report(folder).read_text()


def test_the_report_is_well_formed_and_says_everything(page):
    parser = Wellformed()
    parser.feed(page)
    assert parser.open == []
    text = "".join(parser.text)
    expected = (
        *("tokenizer", "cached · took 4.0 s when made", "skipped", "from <scratch>", "done · 1:15"),
        *("7.4000", "own_accuracy", "0.1235", "12,345", "2,735,424", "data 1 × tensor 2", "& more"),
        *("0.300 s (60%)", "200%", "768 MiB", "52%"),  # parts of a step, and planned against measured
        *(
            "604,605 tokens in 681 documents",
            "1.02",
            "3 graphs in 30.1 s",
            "21.3 s",
            "1.25 GiB",
            "11 MiB",
        ),  # data and graphs
        *("2.14 MiB, 3.58 bytes a token", "1,200 too short, 3 duplicates"),
        *("2027-01-15", "loss is <nan>", "Steps skipped: 1.", "To be or <b>not</b>"),
    )
    for part in expected:
        assert part in text, part
    assert "name: first" in text


def test_the_same_facts_are_there_for_programs(page, tmp_path):
    facts = json.loads((tmp_path / "it's here/first/report.json").read_text())
    assert facts["evaluation"]["validation_loss"] == 7.4
    assert facts["measured"]["training_seconds"] == 50
    assert {step["step"]: step["how"] for step in facts["steps"]}["checkpoint"] == "skipped"


def test_runs_are_compared_by_figures_curves_and_what_differs_in_their_profiles(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "store/runs/first")
    report(tmp_path / "store/runs/first")
    write_run(tmp_path / "store/runs/second", "train.learning_rate=1e-3", losses=50)
    assert main(["compare", "first", "second", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["differences"] == {"train.learning_rate": [0.003, 0.001]}
    assert [each["state"] for each in told["runs"]] == ["finished", "at step 50 of 300"]
    assert [each["loss"] for each in told["runs"]] == pytest.approx([7.3, 7.8])
    page = (tmp_path / "compare.html").read_text()
    parser = Wellformed()
    parser.feed(page)
    assert parser.open == []
    assert page.count('class="line line-2"') == 2

    assert main(["compare", "first", "second"]) == 0
    assert "train.learning_rate  0.003" in capsys.readouterr().out
    assert main(["compare", "first", "secund"]) == 2
    assert "nearest valid: second" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    ["", "{}", "[]", '{"plan": {}}', '{"plan": {"parameters": 5}, "evaluation": {"perplexity": "x"}}'],
)
def test_a_damaged_report_is_refused_by_its_name(capsys, tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "store/runs/first")
    (tmp_path / "store/runs/first/report.json").write_text(damage)
    assert main(["compare", "first"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{tmp_path}/store/runs/first/report.json is damaged" in told


def test_lines_that_are_damaged_are_left_out_of_a_comparison(tmp_path):
    write_run(tmp_path / "store/runs/first", losses=20)
    metrics = tmp_path / "store/runs/first/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 7,', '"step": 7'))
    compare = [sys.executable, "-m", "flows.cli.main", "compare", "first", "--json"]
    done = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, check=True)
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["steps"], run["loss"]) == (19, pytest.approx(8.1))
    assert "store/runs/first/metrics.jsonl: line 7: not a JSON object; skipped" in done.stderr


def test_a_run_that_is_not_exported_has_samples_and_no_code_to_load_it(tmp_path):
    folder = tmp_path / "store/runs/first"
    write_run(folder)
    with Store(str(tmp_path / "store")).artifacts.publish("tokenizer", "key") as artifact:
        (folder / "export/tokenizer.json").rename(artifact / "tokenizer.json")
    (folder / "export").rmdir()
    (folder / "inputs.json").write_text('{"identity": "x", "tokenizer": "key", "dataset": "y"}')
    page = report(folder).read_text()
    assert " or &lt;b&gt;not&lt;/b&gt;</blockquote>" in page
    assert "from_pretrained" not in page
    assert "The model" not in page
    assert json.loads((folder / "report.json").read_text())["export"] is None

    shutil.rmtree(tmp_path / "store/artifacts")  # of a run that was copied from its store
    assert "What it writes" not in report(folder).read_text()


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
