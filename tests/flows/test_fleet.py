"""The page of all runs: by the flow, with its artifact in Prefect's UI, and by the command."""

import json

from flows.cli.main import main
from tests.flows.micro import shown
from tests.tasks.fleet.histories import SimulatedRun


def test_the_page_and_the_artifact_show_all_runs(prefect_server, tmp_path, capsys):
    from flows.fleet import fleet

    run = SimulatedRun(tmp_path / "runs/first", steps=9)
    run.submit(0, 10.0)
    run.start(3.0, 1.0)
    for _ in range(9):
        run.train(2.0, 0.0)
    run.end()
    run.report()
    for _ in range(3):
        run.fail("rank 1 on n7 was killed by SIGKILL")
    page = fleet.with_options(flow_run_name="all runs")(str(tmp_path))
    assert page == str(tmp_path / "fleet.html")
    assert "Node n7 failed 3 times" in (tmp_path / "fleet.html").read_text()
    artifact = shown("all runs")["fleet"]
    assert "| first | finished | 9 of 9 |" in artifact
    assert "- Node n7 failed 3 times" in artifact
    output = str(tmp_path / "page.html")
    assert main(["fleet", "--store", str(tmp_path), "--output", output, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["runs"]] == ["first"]
    assert found["runs"][0]["goodput"] == 18 / 32
    assert main(["runs", "--store", str(tmp_path)]) == 0
    assert "56%" in capsys.readouterr().out
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["fleet", "--store", str(empty), "--output", output]) == 0
    assert f"no runs in {empty}" in capsys.readouterr().err
    assert main(["fleet", "--store", str(tmp_path), "--output", str(tmp_path)]) == 2  # a folder
