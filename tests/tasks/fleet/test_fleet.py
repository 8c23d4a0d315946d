"""All runs of a store: states, caching, nodes, cost and the page."""

import json
import os
import shutil
import threading
import time

import pytest

from flows.cli.main import main
from profiles import resolve
from tasks.fleet import run_summary
from tasks.fleet.fleet import read_fleet
from tasks.fleet.page import render, warning_texts
from tasks.store.backends.folder import FolderBackend
from tasks.store.store import Store
from tests import s3
from tests.profiles.pair import PAIR
from tests.tasks.fleet.histories import SimulatedRun
from tests.tasks.reporting.run_folders import WellFormed, write_checkpoint


def simulated(store, name, steps=20, until=20, **facts):
    run = SimulatedRun(store / "runs" / name, steps, **facts)
    (run.folder / "run.json").write_text(json.dumps({"identity": name}))
    plan = {"step_seconds": 1.0, "tokens_per_second": 100.0}
    (run.folder / "plan.json").write_text(json.dumps(plan))
    run.submit(0, 100)
    run.start(8, 2)
    for _ in range(until):
        run.train(2.0, 0.0)
    return run


@pytest.fixture
def store(tmp_path):
    """Runs: finished, failed three times on n7, queued, replaced, and one without a step."""
    done = simulated(tmp_path, "done")
    done.end()
    done.report()
    failed = simulated(tmp_path, "failed", until=5, node_price=3600.0)
    failed.save(0)
    for _ in range(3):
        failed.fail("rank 3 on n7 was killed by SIGKILL")
        failed.submit(10, 10)
        failed.start(1, 1)
    failed.wait("repeated", 1)
    failed.fail("rank 0 on n8 ended with exit code 1")
    unnamed = simulated(
        tmp_path, "unnamed", until=5, nodes=["n9", "n8"], devices=4
    )  # by a launcher that names no node
    unnamed.fail("train: rank 2 was killed by SIGKILL")
    simulated(tmp_path, "done~1", until=3)
    waiting = simulated(tmp_path, "waiting", until=4)
    waiting.end()
    waiting.submit(10, 0)
    (tmp_path / "runs" / "new").mkdir()
    return Store(str(tmp_path))


def by_name(fleet):
    return {run.name: run for run in fleet.runs}


def test_fleet_has_the_state_and_time_of_each_run_and_the_failures_of_nodes(store):
    with store.lock("run-waiting"):
        fleet = read_fleet(store, now=1_800_001_000.0)  # of the simulated clock
    found = by_name(fleet)
    states = {
        "done": "finished",
        "done~1": "replaced",
        "failed": "stopped",
        "new": "not started",
        "unnamed": "stopped",
        "waiting": "queued",
    }
    assert {name: run.state for name, run in found.items()} == states
    assert found["done"].use.goodput == pytest.approx(40 / 150)
    assert found["done"].speed_of_plan == pytest.approx(0.5)
    assert found["done"].tokens == 2000
    assert found["waiting"].use.seconds["queue"] > 100  # until now
    nodes = [(node.name, node.failures, node.runs) for node in fleet.nodes]
    assert nodes == [("n7", 3, ("failed",)), ("n8", 2, ("failed", "unnamed"))]
    assert [text.split()[1] for text in warning_texts(fleet) if text.startswith("Node")] == ["n7"]


def test_a_trained_run_is_finished_once_it_has_its_report_and_names_the_step_that_failed(tmp_path, capsys):
    run = simulated(tmp_path, "trained")
    run.end()
    store = Store(str(tmp_path))
    (run.folder / "profile.yaml").write_text(resolve.dump(resolve.load(PAIR, ("train.steps=20",), "trained")))
    os.utime(run.folder / "profile.yaml", (1.7e9, 1.7e9))

    def found():
        (view,) = read_fleet(store).runs
        assert main(["runs", "--store", str(tmp_path)]) == 0
        assert view.shown_state in capsys.readouterr().out
        return view.state, view.failed_step

    def compared():
        assert main(["compare", str(run.folder), "--json", "--output", str(tmp_path / "page.html")]) == 0
        return json.loads(capsys.readouterr().out)["runs"][0]["state"]

    # Its flow was killed before it wrote the report, or it ended and writes none, as that of a proxy of a share.
    assert (found(), compared()) == (("stopped", None), "at step 20 of 20")
    (run.folder / "alerts.json").write_text('{"steps": 20}')
    assert (found(), compared()) == (("finished", None), "finished")
    # A flow that writes a report has begun since.
    (run.folder / "alerts.json").write_text('{"steps": 20, "reports": true}')
    assert (found(), compared()) == (("stopped", None), "at step 20 of 20")
    run.report(10)  # it was extended since
    assert found() == ("stopped", None)
    run.clock += 5
    run.fail("OSError(28, 'No space left on device')", "export failed")
    assert found() == ("failed", "export")
    assert warning_texts(read_fleet(store)) == ["1 failed: trained (export)"]
    assert ">export failed<" in render(read_fleet(store))
    assert compared() == "export failed"
    with store.lock("run-trained"):
        assert found() == ("running", None)
    run.report()
    assert found() == ("finished", None)
    # Its last checkpoint is lost, then the run is started again, which trains the last steps again.
    shutil.rmtree(write_checkpoint(run.folder, 20).parent)
    assert (found(), compared()) == (("stopped", None), "at step 20 of 20, without its checkpoint")
    write_checkpoint(run.folder, 20)
    run.saved = 10
    run.submit(0, 10)
    run.start(1, 1)
    run.train(2.0, 0.0)
    report = (run.folder / "report.json").read_text()
    for text in (report, report.replace('"step"', '"at"')):  # early versions record no step
        (run.folder / "report.json").write_text(text)
        assert found() == ("stopped", None)
        with store.lock("run-trained"):
            assert found() == ("running", None)


def test_started_run_is_not_queued_if_the_clocks_of_its_nodes_are_behind(tmp_path):
    run = SimulatedRun(tmp_path / "runs" / "behind")
    run.submit(0, 30)
    run.clock -= 60
    run.start(8, 2)
    store = Store(str(tmp_path))
    with store.lock("run-behind"):
        (found,) = read_fleet(store, now=1_800_001_000.0).runs
    assert found.state == "running"
    assert found.use.seconds["queue"] == 0


def test_a_fork_counts_only_the_steps_that_it_trained(tmp_path):
    run = simulated(tmp_path, "fork", node_price=3600.0)
    parent = {"run": "parent", "identity": "parent", "step": 15}
    (run.folder / "run.json").write_text(json.dumps({"identity": "fork", "parent": parent}))
    (found,) = read_fleet(Store(str(tmp_path))).runs
    assert (found.step, found.tokens, found.planned_cost) == (20, 500, 5)


def test_a_finished_run_that_is_opened_again_is_not_finished(tmp_path):
    extended, evaluated = (simulated(tmp_path, name) for name in ("extended", "evaluated"))
    for run in (extended, evaluated):
        run.report()
    profile = extended.folder / "profile.yaml"
    profile.write_text("train: {steps: 40}")
    store = Store(str(tmp_path))

    def read(opened):
        os.utime(profile, (opened, opened))
        with store.lock("run-extended"), store.lock("run-evaluated"):
            return by_name(read_fleet(store, now=1_800_001_000.0))

    assert {run.state for run in read(1_800_000_000.0).values()} == {"finished"}  # opened before it started
    found = read(1_800_000_500.0)["extended"]
    assert (found.state, found.summary.steps) == ("running", 40)
    for run in (extended, evaluated):  # the latter to make up its last evaluation
        run.end()
        run.submit(10, 0)
    found = read(1_800_000_500.0)
    assert {run.state for run in found.values()} == {"queued"}
    assert all(run.use.seconds["queue"] > 500 for run in found.values())


def test_validation_loss_is_that_of_the_final_evaluation_as_in_a_comparison(tmp_path, monkeypatch, capsys):
    """Neither the evaluation before training, the last row of a short run, nor that of a subset.

    Nor one of an earlier step, such as the parent's of a fork.
    """
    monkeypatch.chdir(tmp_path)
    for name, evaluations, steps in (
        ("tuned", {0: 4.1472, 10: 2.2}, 20),
        ("extended", {0: 4.1472, 20: 1.9}, 40),
        ("training", {0: 4.1472}, None),
    ):
        run = simulated(tmp_path / "store", name, steps=steps or 20)
        (run.folder / "profile.yaml").write_text(
            resolve.dump(resolve.load(PAIR, (f"train.steps={run.steps}",), name))
        )
        os.utime(run.folder / "profile.yaml", (1.7e9, 1.7e9))
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.writelines(
                f'{{"step": {step}, "validation_loss": {loss}}}\n' for step, loss in evaluations.items()
            )
        evaluation = {"step": 20, "validation_loss": 1.7433, "perplexity": 5.7}
        if steps:
            (run.folder / "report.json").write_text(
                json.dumps({"plan": {"parameters": 5}, "evaluation": evaluation})
            )
    fleet = read_fleet(Store(str(tmp_path / "store")))
    shown = {run.name: run.to_json() for run in fleet.runs}
    assert main(["compare", *shown, "--json"]) == 0
    for run in json.loads(capsys.readouterr().out)["runs"]:
        losses = [shown[run["run"]][key] for key in ("validation_loss", "last_validation_loss")]
        assert losses == [run.get("validation_loss"), run["last_validation_loss"]]
        assert (
            losses == {"tuned": [1.7433, None], "extended": [None, 1.9], "training": [None, None]}[run["run"]]
        )
    page = render(fleet)
    assert "4.0000, validation 1.7433<" in page
    assert "4.0000, validation, subset 1.9000<" in page
    assert "4.1472" not in page


def test_speed_excludes_warm_up_and_is_unknown_after_one_step(tmp_path):
    store = Store(str(tmp_path))
    for name, until in (("one", 1), ("two", 2)):
        run = SimulatedRun(tmp_path / "runs" / name)
        run.start(8, 2)
        for step in range(until):
            run.train(2.0, 100.0 if step == 0 else 0.0)
    found = by_name(read_fleet(store))
    assert found["two"].summary.step_seconds == 2.0
    assert (found["one"].summary.step_seconds, found["one"].speed_of_plan, found["one"].seconds_left) == (
        None,
        None,
        None,
    )


def test_cost_covers_the_time_in_which_jobs_held_nodes(store):
    run = by_name(read_fleet(store))["failed"]
    assert run.cost == pytest.approx(8 + 2 + 5 * 2 + 3 * 2 + 1)  # a node second costs 1; no queue
    assert run.planned_cost == 20
    assert run.final_cost > run.cost


def test_only_runs_with_changed_files_are_read_again(store, tmp_path, monkeypatch, capsys):
    first = read_fleet(store)
    read = []

    def reader(backend, name, entries):
        read.append(name)
        return run_summary.read_summary(backend, name, entries)

    monkeypatch.setattr("tasks.fleet.fleet.read_summary", reader)
    second = read_fleet(store, now=first.time)
    assert not read
    assert [run.to_json() for run in second.runs] == [run.to_json() for run in first.runs]
    with (store.work_dir / "runs/waiting/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": NaN, "time": 1.9e9}\n{"step": 6, "lo')
    diverged = by_name(read_fleet(store))["waiting"]
    assert (diverged.step, diverged.summary.last["loss"]) == (5, None)
    assert by_name(read_fleet(store))["waiting"].summary.last == diverged.summary.last
    assert read == ["waiting"]
    monkeypatch.chdir(tmp_path)  # where `fleet` writes its page
    for command in ("runs", "fleet"):  # from the cache
        assert main([command, "--store", str(store.work_dir)]) == 0
        capsys.readouterr()
        assert main([command, "--store", str(store.work_dir), "--json"]) == 0
        json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    (store.local_cache / "fleet.json").write_text("{corrupted")
    assert len(read_fleet(store).runs) == 6


def test_runs_of_a_slow_folder_are_read_by_several_threads(store, monkeypatch):
    fast, threads, entries = read_fleet(store), set(), FolderBackend.entries

    def wait(backend, name):
        threads.add(threading.get_ident())
        time.sleep(0.05)
        return entries(backend, name)

    monkeypatch.setattr("tasks.store.store.SAMPLE", 2)
    monkeypatch.setattr(FolderBackend, "entries", wait)
    slow = read_fleet(store, now=fast.time)
    assert [run.to_json() for run in slow.runs] == [run.to_json() for run in fast.runs]
    assert len(threads) > 2


def test_a_warning_names_only_the_first_of_many_runs(tmp_path):
    for number in range(6):
        simulated(tmp_path, f"run-{number}", until=5).fail("rank 3 on n7 was killed by SIGKILL")
    (text,) = warning_texts(read_fleet(Store(str(tmp_path))))
    assert "failed 6 times, in run-0, run-1, run-2, run-3, run-4 and 1 other: drain it" in text


def test_page_is_well_formed_and_escapes_names_of_nodes(store):
    event = {"event": "straggler", "time": 1.8e9, "reason": "rank 1 on <b> is a straggler"}
    (store.work_dir / "runs/done/events.jsonl").write_text(json.dumps(event) + "\n")
    parser = WellFormed()
    parser.feed(render(read_fleet(store)))
    assert not parser.open
    assert parser.addresses == ["data:,"]
    text = " ".join(parser.text)
    assert "Node n7 failed 3 times" in text
    assert "<b>" in text


def test_page_has_costs_only_if_a_run_has_a_price(tmp_path):
    simulated(tmp_path, "free", until=5, node_price=None)
    store = Store(str(tmp_path))
    assert ">cost<" not in render(read_fleet(store))
    simulated(tmp_path, "paid", until=5, node_price=3600.0)
    assert ">cost<" in render(read_fleet(store))


def write_long(store, monkeypatch):
    """Give the finished run more rows than one request reads; its last evaluation is far before its end."""
    monkeypatch.setattr(run_summary, "WHOLE", 0)
    monkeypatch.setattr(run_summary, "TAIL", 4000)
    rows = [{"step": step, "loss": 10 - step / 1000, "step_seconds": 2.0} for step in range(1, 5001)]
    rows.insert(-60, {"step": 4940, "validation_loss": 5.5})
    path = store.work_dir / "runs/done/metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_long_curve_is_read_at_a_few_offsets(store, monkeypatch):
    """The sampled curve follows that of all rows."""
    write_long(store, monkeypatch)
    found = by_name(read_fleet(store))["done"].summary
    assert len(found.curve) == run_summary.POINTS
    assert all(loss == pytest.approx(10 - step / 1000) for step, loss in found.curve)
    assert found.curve[0][0] < 100
    assert found.curve[-1][0] > 4900
    assert (found.last["step"], found.step_seconds, found.last_validation_loss) == (5000, 2.0, 5.5)


@pytest.mark.s3
def test_runs_on_s3_are_read_without_a_local_copy(store, tmp_path, monkeypatch):
    monkeypatch.setattr(run_summary, "POINTS", 4)
    write_long(store, monkeypatch)
    expected = by_name(read_fleet(store))["done"].summary
    with s3.bucket(monkeypatch) as uri:
        s3.fill(store.work_dir / "runs/done", f"{uri}/store/runs/done")
        (run,) = read_fleet(Store(f"{uri}/store", tmp_path / "elsewhere")).runs
    assert (run.state, run.step) == ("finished", 5000)
    assert run.summary.curve == expected.curve
    assert run.summary.last_validation_loss == 5.5
