"""Branches of a trunk through the real flow: losses, caching, averages of checkpoints, and the page."""

import io
import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from flows.cli.experiments import print_branches
from flows.cli.main import main
from flows.experiments.plans import load_branches as load
from modeling.conversion.convert import Options, convert
from parallel.checkpoint.locations import MARKER
from profiles.errors import ProfileError
from profiles.files import run_files
from tasks.evaluation.average import AverageStep
from tasks.experiments.branches import members_of
from tasks.failures import FatalError
from tasks.fork import decay_overrides, find_parent
from tasks.store import activities, runs
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store
from tests.flows.micro import exported, losses
from tests.forked_jobs import forked_jobs

LONG = {"step": 6, "decay": 4}
MIXED = ["data.sources=[{kind: files, path: a.txt, weight: 1}, {kind: files, path: b.txt, weight: 1}]"]
SOUP = {"name": "soup", "of": ["trunk@6", "long"], "last": 2}


def write_branches(folder: Path, profile: Path, **changes: object) -> Path:
    """A trunk of the profile `micro` of 6 steps, a branch of 4 more, and an average."""
    path = folder / "stable.yaml"
    settings = {
        "target": str(profile),
        "every": 2,
        "branches": [{**LONG, "name": "long"}],
        "averages": [SOUP],
    }
    path.write_text(yaml.safe_dump({**settings, **changes}))
    return path


def branches(file: Path, store: Path) -> dict:
    from flows.experiments.branches import branches

    with forked_jobs():
        return branches(str(file), str(store))


def written(store: Path) -> dict[str, int]:
    """When the metrics of each run and each average were written."""
    paths = [*store.glob("runs/*/metrics.jsonl"), *store.glob("artifacts/average/*/manifest.json")]
    return {path.parent.name: path.stat().st_mtime_ns for path in paths}


def test_branches_equal_runs_of_their_length_and_are_trained_once(pretrain, profile, tmp_path, capsys):
    store = tmp_path / "store"
    first = branches(write_branches(tmp_path, profile), store)
    assert [(run["run"], run["step"], run["steps"]) for run in first["runs"]] == [
        ("stable-trunk", 0, 6), ("stable-long", 6, 10)
    ]  # fmt: skip
    parent = find_parent(Store(str(store)), "stable-trunk@6", "branch")
    decay = decay_overrides(store / "runs/stable-trunk/profile.yaml", parent, 4)
    pretrain(store, *decay, name="from-scratch")
    assert losses(store / "runs/stable-long") == losses(store / "runs/from-scratch")

    # Master weights are averaged, and transformers computes the same loss.
    (soup,) = first["averages"]
    members = [("trunk", 4), ("trunk", 6), ("long", 8), ("long", 10)]
    assert soup["members"] == [f"stable-{run}@{step}" for run, step in members]
    found, mean = load_file(Path(soup["model"]) / "model.safetensors"), {}
    for number, (run, step) in enumerate(members):
        folder = tmp_path / str(number)
        convert(store / f"runs/stable-{run}/checkpoints/step_{step}", folder, Options("hf"))
        for name, tensor in load_file(folder / "model.safetensors").items():
            mean[name] = mean.get(name, 0) + tensor / 4
    torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-7)
    dataset = next((store / "artifacts/dataset").iterdir())
    assert exported(Path(soup["model"]), dataset, 32)[0] == pytest.approx(soup["validation_loss"], rel=1e-5)

    # Another branch beyond the trunk's end extends the trunk, and nothing else runs again.
    before = written(store)
    more = [{**LONG, "name": "long"}, {"step": 8}]
    second = branches(write_branches(tmp_path, profile, branches=more), store)
    after = written(store)
    assert after.keys() - before.keys() == {"stable-8-2"}
    assert {name for name in before if after[name] != before[name]} == {"stable-trunk"}
    assert second["averages"] == first["averages"]
    trunk = losses(store / "runs/stable-trunk")
    assert len(trunk) == 8
    assert {step: losses(store / "runs/stable-8-2")[step] for step in trunk} == trunk
    page = Path(second["page"]).read_text()
    for text in ("Loss by length", "stable-8-2", "soup", "Training loss"):
        assert text in page
    parent = find_parent(Store(str(store)), "stable-long@8", "branch")
    with pytest.raises(
        ProfileError, match="the learning rate of stable-long has begun to decay before step 8"
    ):
        decay_overrides(store / "runs/stable-long/profile.yaml", parent, 4)
    run, merged = str(store / "runs/stable-long"), tmp_path / "merged"
    average = ["--average", "2", "--average", str(store / "runs/from-scratch/export")]
    assert main(["convert", run, str(merged), "--to", "hf", *average]) == 0
    for name, tensor in load_file(merged / "model.safetensors").items():
        three = [tmp_path / "2", tmp_path / "3", store / "runs/from-scratch/export"]
        mean = sum(load_file(folder / "model.safetensors")[name] for folder in three) / 3
        torch.testing.assert_close(tensor, mean, rtol=1e-6, atol=1e-7)
    assert main(["convert", run, str(tmp_path / "many"), "--to", "hf", "--average", "9"]) == 2


def test_result_names_the_model_of_each_average(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = f"store/artifacts/average/{'0' * 60}/model"  # longer than a line of the terminal
    average = {
        "average": "soup",
        "members": ["a@2", "a@4"],
        "validation_loss": 1.0,
        "model": str(tmp_path / model),
    }
    printed = io.StringIO()
    print_branches(Console(file=printed, width=80), {"runs": [], "averages": [average], "page": "page.html"})
    assert f"  model: {model}\n" in printed.getvalue()


def test_averages_read_the_trunk_under_its_lock_and_end_if_they_lose_it(
    prefect_server, profile, tmp_path, monkeypatch
):
    """The trunk is replaced while they wait for it; once they begin, another process takes over its lock."""
    from flows.experiments import branches as flows

    def begin(store, kind, name):
        waited.append(name)
        if name == "stable-trunk":
            store.run_folder(name).write(
                run_files.INPUTS, json.dumps({"identity": "identity", **inputs("new")}).encode()
            )
        return activities_begin(store, kind, name)

    def step(dataset, *arguments, **options):
        datasets.append(dataset.key)
        store.backend.write("locks/averaging-stable-trunk/9", b"{}")
        return AverageStep(dataset, *arguments, **options)

    def inputs(key):
        return {"dataset": key, "tokenizer": key, "checkpoint": None}

    file, store, waited, datasets = write_branches(tmp_path, profile), Store(str(tmp_path / "store")), [], []
    _, trunk, _, _ = load(str(file))
    runs.open_run(store, trunk.profile, "identity", "flow", inputs("old"))
    for kind, key in itertools.product(("dataset", "tokenizer"), ("old", "new")):
        with store.artifacts.publish(ArtifactId(kind, key), {}) as staging:
            (staging / "file").touch()
    for run, number in (("trunk", 4), ("trunk", 6), ("long", 8), ("long", 10)):
        store.run_folder(f"stable-{run}").write(f"checkpoints/step_{number}/{MARKER}", b"{}")
    activities_begin = activities.begin
    monkeypatch.setattr(flows.activities, "begin", begin)
    monkeypatch.setattr(flows, "AverageStep", step)
    monkeypatch.setattr(flows, "train_alone", lambda *_: {"validation_loss": 1.0, "report": ""})
    monkeypatch.setattr(flows, "run_side_by_side", lambda *_: [flows.train_alone()])
    with pytest.raises(FatalError, match="another process took over its lock"):
        branches(file, tmp_path / "store")
    assert waited == ["stable-long", "stable-trunk"]  # in the same order in every flow
    assert datasets == ["new"]


def test_another_machine_continues_the_trunk_where_the_remote_store_has_it(profile, tmp_path):
    first, other = (Store("memory://branches", tmp_path / machine) for machine in ("first", "other"))
    first.run_folder("stable-trunk").write("checkpoints/step_8/complete.json", b"{}")
    _, trunk, _, _ = load(str(write_branches(tmp_path, profile)), other)
    assert trunk.profile.train.steps == 8
    first.remove("runs/stable-trunk")


def test_average_excludes_checkpoints_that_interruptions_saved(profile, tmp_path):
    average = {"name": "last", "of": ["trunk", "long"], "last": 3}
    described, trunk, found, _ = load(str(write_branches(tmp_path, profile, averages=[average])))
    store = Store(str(tmp_path / "store"))
    for run, steps in (("trunk", (2, 4, 5, 6)), ("long", (6, 7, 8, 10))):
        for step in steps:
            store.run_folder(f"stable-{run}").write(f"checkpoints/step_{step}/complete.json", b"{}")
    members = members_of(described, described.averages[0], trunk, found, store)
    assert members == [
        *(("stable-trunk", step) for step in (2, 4, 6)),
        *(("stable-long", step) for step in (6, 8, 10)),
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"branch": []}, "branch = []: there is no such key at the top level; nearest valid: branches"),
        ({"branches": [{"step": 5}]}, "branches.0.step = 5: is not a multiple of every = 2"),
        ({"every": 1, "branches": [{"step": 1}, LONG]}, "branches.0.decay = 1: step 1 is within the warm-up"),
        (
            {"branches": [{**LONG, "overrides": ["train.seed=-1", "train.weight_decay=-1"]}]},
            ";\nalso branches.0.train.",
        ),
        ({"branches": [LONG, LONG]}, "branches.1 = stable-6-4: is listed twice"),
        (
            {"overrides": MIXED, "branches": [{**LONG, "overrides": ["data.sources.0.weight=3"]}]},
            "branches.0.data.schedule: stable-trunk drew other shares of its sources up to step 6",
        ),
        ({"averages": [{"name": "a", "of": ["short"], "last": 2}]}, "is neither trunk, trunk@STEP nor a branch"),
        ({"averages": [{"name": "a", "of": ["trunk@7"], "last": 2}]}, "is not a checkpoint of the trunk"),
        ({"averages": [{"name": "a", "of": ["trunk@0", "long"]}]}, "is not a checkpoint of the trunk"),
        (
            {"averages": [{"name": "a", "of": ["trunk", "6-4"], "last": 4}]},
            "averages.a.last = 4: stable-trunk has the checkpoints 2, 4, 6 up to step 6",
        ),
        ({"averages": [{"name": "a", "of": ["trunk"]}]}, "averages.a: contains only one checkpoint"),
        ({"overrides": ["cluster.devices_per_node=2", "parallel.tensor=2"], "devices": 1}, "is less than the 2 of one run"),
    ],
)  # fmt: skip
def test_branches_that_cannot_run_are_rejected(profile, tmp_path, capsys, changes, says):
    assert main(["branches", "plan", str(write_branches(tmp_path, profile, **changes))]) == 2
    assert says in capsys.readouterr().err


def test_plan_counts_what_each_branch_adds(profile, tmp_path, capsys):
    more = [{**LONG, "name": "long"}, {"step": 8, "decay": 8}]
    file = str(write_branches(tmp_path, profile, branches=more))
    assert main(["branches", "plan", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["run"], run["from"], run["steps"]) for run in found["runs"]] == [
        ("stable-trunk", None, 8), ("stable-long", 6, 10), ("stable-8-8", 8, 16)
    ]  # fmt: skip
    step = found["runs"][0]["tokens"] / 8
    assert [run["tokens"] for run in found["runs"]] == [8 * step, 4 * step, 8 * step]
    assert found["total"]["flops"] / found["from_scratch_flops"] == pytest.approx(20 / 26)
    assert main(["branches", "plan", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("58% of the compute")
