"""A run's HTML report: complete, escaped, and without network requests."""

import html
import json
import re
import shutil

import pytest

from tasks.reporting import run_report
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store
from tests.tasks.reporting.run_folders import WellFormed, write_report, write_run


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "it's here" / "first"
    write_run(folder)
    parent = {"run": "<first>", "identity": "x", "step": 50}
    (folder / "run.json").write_text(json.dumps({"identity": "y", "id": "z", "parent": parent}))
    return write_report(folder)


@pytest.fixture(scope="module")
def page(path):
    return path.read_text()


def test_report_is_well_formed_and_complete(page):
    parser = WellFormed()
    parser.feed(page)
    assert parser.open == []
    text = "".join(parser.text)
    expected = (
        *("tokenizer", "cached · 4.0 s when first run", "skipped", "from <scratch>", "done · 1:15"),
        *(
            "7.4000",
            "user_accuracy",
            "0.1235",
            "predicted tokens",
            "12,345",
            "2,735,424",
            "tensor 2",
            "& more",
        ),
        *("0.3 s (60%)", "200%", "768 MiB", "1.44 GiB", "52%", "uncalibrated"),  # parts of a step, planned
        *(
            "604,605 tokens in 681 documents",
            "1.02",
            "3 graphs in 30.1 s",
            "21.3 s",
            "1.25 GiB",
            "11 MiB",
        ),  # data and graphs
        *("2.14 MiB, 3.58 bytes per token", "1,200 too short, 3 duplicates"),
        "the tokenizer has 583 tokens instead of 4,096",
        "the validation loss rose by 5%, from 7.0000 at step 50 to 7.3500 at step 100",
        "Forked from <first>@50: that run trained the steps up to 50.",
        *("validation loss on 4 batches", "Evaluation on the whole validation split", "7.4000"),
        *("memory of rank 0, MiB", "learning rate", "gradient norm"),
        *("2027-01-15", "loss is <nan>", "Skipped steps: 1.", "To be or <b>not</b>"),
    )
    for part in expected:
        assert part in text, part
    assert "name: first" in text


def test_report_json_has_the_same_facts(path):
    facts = json.loads(path.with_name("report.json").read_text())
    assert facts["evaluation"]["validation_loss"] == 7.4
    assert facts["measured"]["training_seconds"] == 50
    assert {step["step"]: step["how"] for step in facts["steps"]}["checkpoint"] == "skipped"


def test_run_without_export_has_samples_and_no_loading_code(tmp_path):
    folder = tmp_path / "store/runs/first"
    write_run(folder)
    with Store(str(tmp_path / "store")).artifacts.publish(ArtifactId("tokenizer", "key")) as artifact:
        for file in (folder / "export").iterdir():
            file.rename(artifact / file.name)
    (folder / "export").rmdir()
    (folder / "inputs.json").write_text('{"identity": "x", "tokenizer": "key", "dataset": "y"}')
    page = write_report(folder).read_text()
    assert " or &lt;b&gt;not&lt;/b&gt;</blockquote>" in page
    assert "from_pretrained" not in page
    assert "Exported model" not in page
    assert json.loads((folder / "report.json").read_text())["export"] is None

    shutil.rmtree(tmp_path / "store/artifacts")  # as for a run folder copied out of its store
    assert "Samples" not in write_report(folder).read_text()


def test_empty_lines_of_a_sample_are_shown_as_one():
    assert run_report._sample({"prompt": "a\n\n\n", "text": "b\n\n\n\nc\n\n"}).endswith("b\n\nc</blockquote>")


def test_user_text_is_escaped(page):
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page


def test_report_makes_no_network_requests(page):
    parser = WellFormed()
    parser.feed(page)
    assert parser.addresses == ["data:,"]
    assert not re.search(r"https?://|url\(|@import", page)


def test_loading_code_names_the_export_folder_and_continues_a_held_out_prompt(page, path):
    code = html.unescape(page.split("<pre>")[1].split("</pre>")[0])
    compile(code, "report", "exec")
    assert str(path.parent / "export") in code
    assert "prompt = 'To be'" in code


def test_report_on_pairs_counts_pairs_and_shows_each_result_once(tmp_path):
    folder = tmp_path / "run"
    preference = ("objective.kind=dpo", "objective.packing=true", "init.from=run:tiny")
    write_run(folder, *preference)
    rows = (folder / "metrics.jsonl").read_text() + '{"step": 0, "validation_loss": 0.69}\n'
    (folder / "metrics.jsonl").write_text(rows)
    before = {"step": 0, "validation_loss": 0.69, "perplexity": None, "tokens": 12345}
    (folder / "before.json").write_text(json.dumps({**before, "metrics": {"user_accuracy": 0.0}}))
    page = html.unescape(write_report(folder).read_text())
    section = page.partition("Evaluation on the whole validation split")[2].partition("<section>")[0]
    assert [section.count(text) for text in ("user_accuracy", "validation loss", "0.1235")] == [1, 1, 1]
    assert "pairs</th><td>12,345<" in section
    assert "604,605 tokens in 340 pairs" in page
    assert "validation loss of the initial weights" in page


def test_report_shows_the_load_of_experts(tmp_path):
    folder = tmp_path / "run"
    write_run(folder)
    row = {"step": 101, "loss": 7.0, "balance_loss": 2.5, "router_z_loss": 0.5, "expert_load_max": 1.75}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**row, "dropped_choices": 12.0}) + "\n")
    (folder / "expert_loads.json").write_text(json.dumps({"step": 101, "loads": [[1.0, 1.0], [0.5, 1.5]]}))
    parser = WellFormed()
    parser.feed(write_report(folder).read_text())
    text = "".join(parser.text)
    assert parser.open == []
    assert "1.75" in text
    assert "layer 1, expert 1: 1.50 of the mean" in text
