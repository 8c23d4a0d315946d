"""Forks of runs whose parent still trains and removes checkpoints meanwhile, or is itself removed."""

import json

import pytest
from tokenizers import Tokenizer, models

from flows.cli.main import main
from modeling.supervision.time_account import TOTALS
from profiles import resolve
from profiles.errors import ProfileError
from profiles.files.jsonl import LogFollower, is_metrics
from profiles.resolve import load
from profiles.schema import Profile
from profiles.sections.data import MixtureChange
from tasks.fork import (
    copy_checkpoint,
    decay_overrides,
    find_parent,
    hold_checkpoint,
    parent_profile,
    rate_warnings,
    require_forkable,
    require_new_name,
    require_same_mixture,
)
from tasks.inputs import Inputs, Lockfile
from tasks.lineage import find_origin, record_data
from tasks.step import Context
from tasks.store import ledger, runs
from tasks.store.artifacts import ArtifactId
from tasks.store.run_folder import Parent
from tasks.store.store import Store
from tests.profiles.pair import PAIR

INPUTS = {"tokenizer": "t", "dataset": "d", "checkpoint": None}


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path) -> Store:
    """A store with the run `parent`, which has checkpoints of steps 100 and 200."""
    if request.param == "memory":
        import fsspec

        fsspec.filesystem("memory").store.clear()
    store = Store("memory://bucket/store" if request.param == "memory" else str(tmp_path), tmp_path)
    runs.open_run(store, load(PAIR, ["train.schedule=constant"], "parent"), "one", "flow", INPUTS)
    save(store, 100)
    save(store, 200)
    return store


def save(store: Store, step: int) -> None:
    for file in ("0.distcp", "complete.json"):
        store.backend.write(f"runs/parent/checkpoints/step_{step}/{file}", b"{}")


def remove(store: Store, step: int) -> None:
    store.backend.remove(f"runs/parent/checkpoints/step_{step}")


def open_child(store: Store, parent: Parent, dataset: str = "d") -> None:
    inputs = {**INPUTS, "dataset": dataset}
    runs.open_run(store, load(PAIR, (), "child"), "two", "flow", inputs, parent=parent)


def test_the_cli_forks_in_its_work_dir(store, tmp_path, monkeypatch):
    found = {}
    monkeypatch.setattr("flows.cli.run.run", lambda options: found.update(vars(options)) or 0)
    work = ("--work-dir", str(tmp_path), "--set", "cluster.devices_per_node=1")
    assert main(["fork", "parent@100", "child", "--store", store.uri, *work]) == 0
    assert (found["fork"], found["name"]) == ("parent@100", "child")
    assert found["overrides"] == [f"cluster.work_dir={tmp_path}", "cluster.devices_per_node=1"]
    stored = resolve.dump(load(PAIR, [f"cluster.work_dir={tmp_path / 'work'}"], "parent"))
    store.run_folder("parent").write("profile.yaml", stored.encode())
    assert main(["fork", "parent@100", "child", "--store", store.uri]) == 0
    assert not store.is_remote or found["profile"].startswith(str(tmp_path / "work"))


def test_a_fork_keeps_its_checkpoint_while_the_parent_trains_on(store):
    parent = find_parent(store, "parent", "child")
    hold_checkpoint(store, parent, "child")
    remove(store, 200)
    hold_checkpoint(store, parent, "child")  # started again
    open_child(store, parent)
    copy_checkpoint(store, parent, "child")
    child = store.run_folder("child")
    assert child.checkpoint_steps() == [200]
    assert child.files("checkpoints").keys() == {"step_200/0.distcp", "step_200/complete.json"}
    assert not child.files("checkpoints.partial")
    # Otherwise training rejects it as another run's.
    marker = json.loads(child.read("checkpoints/step_200/complete.json"))
    assert marker["run"] == child.owner != store.run_folder("parent").owner
    grandchild = find_parent(store, "child", "grandchild")
    hold_checkpoint(store, grandchild, "grandchild")
    runs.open_run(store, load("tiny", (), "grandchild"), "three", "flow", INPUTS, parent=grandchild)
    copy_checkpoint(store, grandchild, "grandchild")
    other = store.run_folder("grandchild")
    assert json.loads(other.read("checkpoints/step_200/complete.json"))["run"] == other.owner


@pytest.mark.parametrize("removed", ["", "/complete.json"])
def test_a_fork_of_a_removed_checkpoint_is_rejected(store, removed):
    parent = find_parent(store, "parent", "child")
    store.backend.remove(f"runs/parent/checkpoints/step_200{removed}")
    open_child(store, parent)
    with pytest.raises(ProfileError, match=r"name = parent: is the parent's own; .* nearest valid: parent-2"):
        find_parent(store, "parent", "parent")
    with pytest.raises(ProfileError, match=r"fork = parent@200: .* nearest valid: parent@100"):
        copy_checkpoint(store, parent, "child")
    assert store.run_folder("child").checkpoint_steps() == []


def test_a_fork_whose_checkpoints_are_corrupted_does_not_start_over(store):
    parent = find_parent(store, "parent", "child")
    open_child(store, parent)
    copy_checkpoint(store, parent, "child")
    store.run_folder("child").quarantine_checkpoint("checkpoints/step_200", "corrupted")
    copy_checkpoint(store, parent, "child")
    assert store.run_folder("child").checkpoint_steps() == []


@pytest.mark.parametrize("opened", [False, True])
def test_the_same_command_resumes_a_fork_whose_parent_has_trained_on(store, opened):
    parent = find_parent(store, "parent", "child")
    hold_checkpoint(store, parent, "child")
    if opened:
        open_child(store, parent)
        copy_checkpoint(store, parent, "child")
    save(store, 300)
    remove(store, 200)
    assert find_parent(store, "parent", "child") == find_parent(store, "parent@200", "child") == parent
    assert find_parent(store, "parent", "other").step == find_parent(store, "parent@300", "child").step == 300
    store.run_folder("parent").move_aside()
    runs.open_run(store, load(PAIR, (), "parent"), "another", "flow", INPUTS)
    save(store, 200)
    # A fork that was opened resumes from its own checkpoint.
    assert find_parent(store, "parent", "child").identity == ("one" if opened else "another")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_fork_resumes_without_its_parent(store, replaced, caplog):
    caplog.set_level("INFO")
    parent = find_parent(store, "parent", "child")
    before = decay_overrides(parent_profile(store, parent, "child"), parent, 50)
    hold_checkpoint(store, parent, "child")
    profile = load(PAIR, before, "child")
    runs.open_run(store, profile, "two", "flow", INPUTS, parent=parent)
    store.remove("runs/parent")
    assert find_parent(store, "parent", "child") == parent  # interrupted before it had its checkpoint
    copy_checkpoint(store, parent, "child")
    if replaced:
        runs.open_run(store, load(PAIR, ["model.num_hidden_layers=5"], "parent"), "another", "flow", INPUTS)
        save(store, 300)
    assert find_parent(store, "parent", "child") == find_parent(store, "parent@200", "child") == parent
    assert "run parent was removed or replaced; child resumes from its own checkpoint" in caplog.text
    assert decay_overrides(parent_profile(store, parent, "child"), parent, 50) == before
    require_new_name(store, parent, "child")
    require_forkable(store, parent, profile)
    with pytest.raises(ProfileError, match="model: differs from the model of parent"):
        require_forkable(store, parent, load(PAIR, ["model.num_hidden_layers=5"], "child"))
    with pytest.raises(ProfileError):
        find_parent(store, "parent@100", "child")
    if replaced:
        assert find_parent(store, "parent", "other").identity == "another"
    else:
        with pytest.raises(ProfileError, match="fork = parent: no such run"):
            find_parent(store, "parent", "other")


@pytest.mark.parametrize(
    ("theirs", "ours", "rates"),
    [
        ([], ["train.steps=600"], ("3.00e-04, at step 300 of base", "1.75e-03 at step 301")),
        (
            [],
            ["train.steps=600", "train.schedule=constant", "train.learning_rate=0.0003"],
            None,
        ),  # as it proposes
        (["train.schedule=constant"], ["train.steps=600", "train.schedule=constant"], None),
        ([], ["train.learning_rate=1e-3", "train.steps=600"], ("3.00e-04", "6.77e-04")),
    ],
)
def test_a_fork_that_raises_the_learning_rate_is_warned_of_with_both_rates(tmp_path, theirs, ours, rates):
    store, parent = Store(str(tmp_path)), Parent("base", "one", 300)
    cosine = [
        f"train.{each}"
        for each in ("steps=300", "warmup_steps=30", "learning_rate=3e-3", "minimum_learning_rate=3e-4")
    ]
    runs.open_run(store, load(PAIR, [*cosine, *theirs], "base"), "one", "flow", INPUTS)
    warnings = rate_warnings(store, parent, load(PAIR, [*cosine, *ours], "child"))
    assert [all(rate in text for rate in rates) for text in warnings] == [True] * bool(rates), warnings
    assert all("set train.schedule=constant and train.learning_rate=0.0003" in text for text in warnings)


def test_a_fork_changes_weights_only_after_its_step(store):
    """Each source's position in the data depends on its share of all earlier samples."""

    def mixed(weights: str, *schedule: tuple[int, list[float]]) -> Profile:
        sources = [
            {"kind": "files", "path": f"{name}.jsonl", "weight": int(weight)}
            for name, weight in zip("abc", weights, strict=False)
            if weight != "-"
        ]
        changes = [{"step": step, "weights": row} for step, row in schedule]
        overrides = [f"data.sources={json.dumps(sources)}", f"data.schedule={json.dumps(changes)}"]
        return load(PAIR, overrides, "child")

    alone = load(PAIR, ["data.sources=[{kind: files, path: a.jsonl}]"])
    early, late = (100, [1, 3]), (200, [0, 1])
    for parent, child, choice in (
        (mixed("31"), mixed("62"), None),
        (mixed("31"), mixed("31", (101, [1, 1])), None),
        (mixed("31", late), mixed("31"), None),
        (mixed("31"), mixed("3-1"), None),  # the first source has the same share
        (mixed("31"), mixed("111", (1, [3, 1, 0]), (101, [1, 1, 1])), None),
        (mixed("31"), mixed("11", (150, [0, 1])), [(1, [3, 1]), (101, [1, 1]), (150, [0, 1])]),
        (mixed("31"), mixed("11"), [(1, [3, 1]), (101, [1, 1])]),
        (mixed("31", early), mixed("31"), [(1, [3, 1]), (100, [1, 3]), (101, [3, 1])]),
        (mixed("31"), mixed("31", early), [(1, [3, 1]), (101, [1, 3])]),
        (mixed("31"), mixed("211"), [(1, [3, 1, 0]), (101, [2, 1, 1])]),
        (alone, mixed("11"), [(1, [1, 0]), (101, [1, 1])]),
        (mixed("311"), mixed("31"), []),
    ):
        if choice is None:
            require_same_mixture(parent, child, "parent", 100)
            continue
        with pytest.raises(
            ProfileError, match=r"data\.schedule: parent drew other shares .* step 100"
        ) as error:
            require_same_mixture(parent, child, "parent", 100)
        for schedule in error.value.choices:
            assert [(row["step"], row["weights"]) for row in schedule] == choice
            given = child.data.model_copy(update={"schedule": [MixtureChange(**row) for row in schedule]})
            require_same_mixture(parent, child.model_copy(update={"data": given}), "parent", 100)
        assert bool(error.value.choices) == bool(choice)

    parent = find_parent(store, "parent@100", "child")
    sources = "[{kind: python-docs, weight: 1}, {kind: files, path: a, weight: 1}]"
    child = load(PAIR, [f"data.sources={sources}"], "child")
    with pytest.raises(ProfileError, match=r"nearest valid: .*'weights': \[1\.0, 0\.0\]"):
        require_forkable(store, parent, child)
    hold_checkpoint(store, parent, "child")
    open_child(store, parent)
    copy_checkpoint(store, parent, "child")
    require_forkable(store, parent, child)  # it resumes
    with pytest.raises(ProfileError, match=r"data\.schedule: parent drew other shares"):
        require_forkable(store, parent, child, replace=True)


LORA = ["init.from=model", "lora.rank=8"]


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (LORA, [*LORA, "lora.alpha=4", "lora.dropout=0.1"], None),
        (LORA, [*LORA, "lora.targets=[down, gate_up, output, qkv]"], None),
        (
            LORA,
            [*LORA, "lora.rank=16"],
            r"lora\.rank = 16: a fork loads .* parent trained.*; nearest valid: 8$",
        ),
        (LORA, ["init.from=model"], r"lora\.rank = null: .*; nearest valid: 8$"),
        (["init.from=model"], LORA, r"lora\.rank = 8: .*init\.from=run:parent; nearest valid: null$"),
        (
            LORA,
            [*LORA, "lora.targets=[qkv]"],
            r"lora\.targets = \['qkv'\]: .*; nearest valid: \['qkv', 'output', ",
        ),
    ],
)
def test_a_fork_trains_the_tensors_of_its_parent(tmp_path, theirs, ours, message):
    store = Store(str(tmp_path))
    runs.open_run(store, load(PAIR, theirs, "parent"), "one", "flow", INPUTS)
    save(store, 100)
    parent, child = find_parent(store, "parent", "child"), load(PAIR, ours, "child")
    if message is None:
        require_forkable(store, parent, child)
        return
    with pytest.raises(ProfileError, match=message):
        require_forkable(store, parent, child)


def test_a_fork_with_other_data_is_warned_of_once(store, caplog):
    for key in "de":
        with store.artifacts.publish(ArtifactId("dataset", key)) as folder:
            (folder / "shards.json").write_text("[]")
    for dataset in "de":
        parent = find_parent(store, "parent", "child")
        record_data(store, parent.run, parent.identity)
        open_child(store, parent, dataset)
        copy_checkpoint(store, parent, "child")
        copy_checkpoint(store, parent, "child")
        messages = [record.message for record in caplog.records if "reads other data than" in record.message]
        assert len(messages) == (dataset == "e")
        store.remove("runs/child")


def test_checkpoints_of_a_run_that_has_replaced_the_parent_are_not_copied(store):
    parent = find_parent(store, "parent", "child")
    open_child(store, parent)
    store.remove("runs/parent")
    runs.open_run(store, load(PAIR, (), "parent"), "another", "flow", INPUTS)
    save(store, 200)
    assert find_parent(store, "parent", "child").identity == "another"
    with pytest.raises(ProfileError, match="fork = parent@200: the run was removed or replaced"):
        copy_checkpoint(store, parent, "child")


def test_a_fork_has_the_rows_of_its_parent_in_the_store_without_its_totals(store):
    """The copy of the parent on this machine may be outdated; the totals are of its time, not the fork's."""
    (store.run_folder("parent").path / "metrics.jsonl").write_text('{"step": 1}\n')
    totals = dict.fromkeys(TOTALS, 36_000.0)
    rows = "".join(f"{json.dumps({'step': step, 'loss': 3.0, **totals})}\n" for step in (1, 200, 201))
    store.backend.write("runs/parent/metrics.jsonl", f'{rows}{{"step": 20'.encode())
    parent = find_parent(store, "parent", "child")
    hold_checkpoint(store, parent, "child")
    store.backend.write("runs/parent/metrics.jsonl", b"")
    open_child(store, parent)
    copy_checkpoint(store, parent, "child")
    child = store.run_folder("child")
    rows = LogFollower(child.path / "metrics.jsonl").rows(is_metrics)
    assert [*rows] == [{"step": 1, "loss": 3.0}, {"step": 200, "loss": 3.0}]
    # Another machine may continue the fork before this one uploads it.
    assert child.read("metrics.jsonl") == (child.path / "metrics.jsonl").read_bytes()


def test_the_data_of_parents_that_never_ended_is_recorded(store, caplog):
    for key in ("d", "e"):
        with store.artifacts.publish(ArtifactId("dataset", key)) as folder:
            (folder / "shards.json").write_text(f'["shard of {key}"]')
    parent = find_parent(store, "parent", "child")
    open_child(store, parent, dataset="e")
    ledger.record(store, "grandchild", "three", store.artifacts.expect(ArtifactId("dataset", "e")), "two")
    assert record_data(store, "child", "two")
    assert ledger.trained_on(store, "three") == {"shard of d", "shard of e"}
    assert not record_data(store, "removed", "four")
    assert "run removed: its training data is unknown" in caplog.text
    ledger.record(store, "heir", "five", store.artifacts.expect(ArtifactId("dataset", "e")), "four")
    assert not record_data(store, "heir", "five", is_fork=True)
    assert "rounds after a fork of heir are rejected; restore" in caplog.text


def test_run_from_the_weights_of_another_descends_from_it_if_their_tokens_have_the_same_ids(store, caplog):
    with store.artifacts.publish(ArtifactId("dataset", "d")) as folder:
        (folder / "shards.json").write_text("[]")
    tokenizers = []
    for key, words in (("t", "ab"), ("more", "abc"), ("other", "ba")):
        with store.artifacts.publish(ArtifactId("tokenizer", key)) as folder:
            vocabulary = {word: number for number, word in enumerate(words)}
            Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(folder / "tokenizer.json"))
        tokenizers.append(store.artifacts.expect(ArtifactId("tokenizer", key)))
    exporter = {"digest": "w", "commit": None, "run": {"name": "parent", "identity": "one"}}
    own, more, other = tokenizers

    def origin(tokenizer, weights=exporter, parent=None):
        inputs = Inputs(None, (), weights, Lockfile({}))
        return find_origin(Context(load(PAIR), store, resolved=inputs), tokenizer, "two", parent)

    assert store.run_folder("parent").move_aside() == "parent~1"  # replaced after its weights were read
    assert (origin(own), origin(more), origin(other)) == ("one", "one", None)
    assert "tokenizer.source: tokens of parent have other ids" in caplog.text
    assert ledger.find(store, "one").run == "parent"
    assert origin(own, {"digest": "w", "commit": None}) is None  # of the hub
    assert origin(own, {**exporter, "run": {"name": "gone", "identity": "five"}}) is None
    fork = Parent("parent", "one", 100)
    assert (origin(more, None, fork), origin(other, None, fork)) == ("one", None)

    store.run_folder("parent~1").write("inputs.json", b"{")
    assert origin(own) is None
    assert "run parent: its tokenizer is not in the store any more" in caplog.text
    ledger.record(store, "child", "two", store.artifacts.expect(ArtifactId("dataset", "d")), "one")
    assert origin(own) == origin(own, {"digest": "w", "commit": None}) == "one"  # as recorded before
