"""`trainshed series` and `trainshed promote`: the rounds of a series, and its promoted model."""

import base64
import json
import re
import shutil
from dataclasses import replace

import fsspec
import pytest

from flows.cli.main import main
from flows.ui.pages import series_markdown
from profiles.errors import ProfileError
from tasks.continual import rounds
from tasks.continual.gates import Row, Verdict
from tasks.continual.page import render
from tasks.continual.rounds import promote_earlier
from tasks.continual.series import Promoted, promoted_model, set_promoted
from tasks.store import ledger
from tasks.store.store import Store
from tests.tasks.reporting.run_folders import WellFormed, write_run

FIRST = Promoted("nightly", "identity-0", 0, "t", "d0")


def verdict(old, new, source="wiki"):
    """What a round was measured: (before, after) on old and new text, and on a source."""
    rises, falls = old[1] <= old[0] + 0.01, new[1] < new[0]
    rows = [Row("old", *old, "rises ≤ 0.01", rises), Row("new", *new, "falls", falls)]
    return Verdict([*rows, Row(f"source:{source}", *old)])


@pytest.fixture
def series(tmp_path):
    """A series of three rounds, of which the second one was not promoted at first."""
    store = Store(str(tmp_path / "store"))
    current = FIRST
    losses = [
        ("nightly-round-1", 1, ((1.0, 1.005), (2.0, 1.5))),
        ("nightly-round-2~1", 2, ((1.01, 1.3), (2.0, 1.4))),
        ("nightly-round-2", 2, ((1.01, 1.01), (2.0, 1.6))),
    ]
    for name in ("nightly", *(run for run, _, _ in losses)):
        folder = tmp_path / "store/runs" / name
        write_run(tmp_path / "run", "train.steps=6", losses=6)
        folder.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run").rename(folder)
        (folder / "inputs.json").write_text(
            json.dumps({"identity": f"identity-{name[-1:]}", "tokenizer": "t", "dataset": f"d-{name}"})
        )
        (folder / "export").mkdir(exist_ok=True)
        (folder / "export/config.json").write_text("{}")
    (tmp_path / "store/runs/nightly/inputs.json").write_text(
        json.dumps({"identity": "identity-0", "tokenizer": "t", "dataset": "d0"})
    )
    entry = {"run": "nightly", "identity": "identity-0", "parent": None, "dataset": "d0", "shards": ["a"]}
    store.backend.write("ledger/identity-0.json", json.dumps(entry).encode())
    for run, number, measured in losses:
        found = verdict(*measured, source="code<b>")
        replayed = {} if "~" in run else {"replay": 0.05}
        rounds.record(store, run, current, found, {"tokens": 1000 * number, **replayed})
        if found.promotes:
            identity = f"identity-{run[-1:]}"
            entry = {"run": run, "identity": identity, "parent": current.identity}
            data = {**entry, "dataset": f"d-{run}", "shards": [run]}
            store.backend.write(f"ledger/{identity}.json", json.dumps(data).encode())
            current = replace(current, run=run, identity=identity, round=number, held_out=f"d-{run}")
    set_promoted(store, "nightly", current)
    return store


def test_series_prints_each_round_with_its_losses_and_outcome(series, tmp_path, capsys, monkeypatch):
    page = tmp_path / "series.html"
    command = ["series", "nightly", "--store", series.uri, "--output", str(page)]
    for width in ("80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        assert main(command) == 0
        lines = capsys.readouterr().out.splitlines()
        tables = [line for line in lines if not line.startswith(("page: ", "round-2~1 was"))]
        assert max(map(len, tables)) <= 80
        assert [line.split()[0] for line in lines[1:5]] == ["first", "round-1", "round-2~1", "round-2"]
        assert lines[0].split() == [
            "round",
            "outcome",
            "new",
            "tokens",
            "replay",
        ]  # neither time nor cost is known
        assert "promoted, current" in lines[4]
        assert ["0%" in line.split() for line in lines[1:5]] == [False, False, True, False]
        assert [line.split() for line in lines if line.startswith("round-2~1")][1] == (
            ["round-2~1", "old", "1.0100", "1.3000", "rises", "≤", "0.01", "no"]
        )
        assert "round-2~1 was not promoted: old rose from 1.0100 to 1.3000 (required: rises ≤ 0.01)" in lines
    parser = WellFormed()
    parser.feed(page.read_text())
    assert "source:code<b>" in parser.text  # escaped
    assert "cost" not in parser.text
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["outcome"] for each in found["rounds"]] == [
        "first run",
        "promoted",
        "not promoted",
        "promoted",
    ]
    assert found["rounds"][3]["rows"][0]["after"] == 1.01
    round_json = series.run_folder("nightly-round-2~1").path / "round.json"
    judged = round_json.read_bytes()
    round_json.unlink()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rounds"][2]["outcome"] == "replaced"  # the state of a run that was not judged
    round_json.write_bytes(judged)
    shown = series_markdown(rounds.read_series(series, "nightly"), "page")
    assert shown.count("\n| round-") == 3
    assert "| loss on new text |\n" in shown
    picture = base64.b64decode(re.search(r"\(data:image/svg\+xml;base64,(\S+)\)", shown)[1]).decode()
    assert all("old text, not promoted" in each for each in ("".join(parser.text), picture))
    assert "<b>1</b>" in page.read_text()
    assert "0.2</" not in page.read_text()  # rounds are integers
    for unknown in ("nightl", "runs/nightly", "night ly", "nightly/", ""):
        assert main(["series", unknown, "--store", series.uri]) == 2
        assert re.search("is no series in .*nearest valid: nightly\n", capsys.readouterr().err)
    set_promoted(series, "nightly", replace(FIRST, run="nightly-round-1", round=1))
    assert "rolled back" not in render(rounds.read_series(series, "nightly"))  # round 2 is being exported


def test_promote_makes_an_earlier_model_the_promoted_one(series, capsys):
    assert main(["promote", "nightly", "nightly-round-1", "--store", series.uri]) == 0
    assert "the next round is nightly-round-3" in capsys.readouterr().out
    current = promoted_model(series, "nightly")
    assert (current.run, current.round, current.held_out) == ("nightly-round-1", 1, "d-nightly-round-1")
    # What only the later rounds were trained on is new again.
    assert ledger.trained_on(series, current.identity) == {"a", "nightly-round-1"}
    found = rounds.read_series(series, "nightly")
    assert [each.run for each in found.rounds if each.current] == ["nightly-round-1"]
    assert "nightly-round-1</b>" in render(found)
    assert "promoted, rolled back" in render(found)

    _, first = promote_earlier(series, "nightly", "nightly")
    assert (first.round, first.held_out, first.next_round) == (0, "", 3)
    with pytest.raises(
        ProfileError, match="run = nightly-round-2~1: was not promoted in the series"
    ) as error:
        promote_earlier(series, "nightly", "nightly-round-2~1")
    assert [*error.value.choices] == ["nightly", "nightly-round-1", "nightly-round-2"]
    shutil.rmtree(series.run_folder("nightly-round-2").path / "export")
    with pytest.raises(ProfileError, match="has no exported model in"):
        promote_earlier(series, "nightly", "nightly-round-2")


def test_rounds_of_a_replaced_first_run_are_not_of_the_series(series):
    current = promoted_model(series, "nightly")
    set_promoted(series, "nightly", replace(current, dataset="another"))
    assert [each.run for each in rounds.read_series(series, "nightly").rounds] == ["nightly"]


def test_series_of_a_remote_store_is_shown_without_a_local_copy(series, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    (series.run_folder("nightly").path / "standing.json").unlink()
    for part in ("runs/nightly", "ledger"):
        memory.put(str(series.work_dir / part), f"/shown/store/{part}", recursive=True)
    remote = Store("memory://shown/store", tmp_path / "local")
    assert [each.run for each in rounds.read_series(remote, "nightly").rounds] == ["nightly"]
    assert not remote.work_dir.exists()
