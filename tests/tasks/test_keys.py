"""Cache keys: which settings change them, and which do not."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import resolve
from profiles.sections import families
from tasks import keys
from tests.profiles.pair import PAIR

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_digest_does_not_depend_on_the_order_of_keys(value):
    assert keys.digest(value) == keys.digest(dict(reversed(value.items())))


@given(JSON, JSON)
def test_different_values_have_different_digests(one, other):
    assert keys.digest([one]) != keys.digest([other]) or one == other


def test_digests_are_the_same_in_every_process():
    code = "from tasks import keys; print(keys.digest({'a': [1, 2.5, None, 'ü'], 'b': {}}))"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert printed == keys.digest({"b": {}, "a": [1, 2.5, None, "ü"]})
    assert len(printed) == 32


def test_non_json_values_are_rejected():
    with pytest.raises(TypeError):
        keys.digest({"path": object()})
    with pytest.raises(ValueError, match="JSON"):
        keys.digest(float("nan"))


def test_a_files_digest_is_sha256(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert keys.file_digest(tmp_path / "file").startswith("ba7816bf8f01cfea")


def identity(*overrides, name=None, inputs=("tokenizer", "dataset", None)) -> str:
    return keys.run_identity(resolve.load(PAIR, overrides, name), *inputs)


@pytest.mark.parametrize(
    "override",
    [
        "train.seed=1",
        "train.global_batch_size=16",
        "train.sequence_length=128",
        "train.precision=bf16",
        "train.weight_decay=0.2",
        "train.optimizer=muon",
        "train.qk_clip=100",
        "train.balance_coefficient=0.01",
        "train.clip=null",
        "model.num_hidden_layers=4",
        "model.rope_theta=20000.0",
        "data.schedule=[{step: 9, weights: [1]}]",
    ],
)
def test_settings_of_the_mathematics_change_the_identity(override):
    assert identity(override) != identity()


def test_parametrization_changes_the_identity_but_not_the_graphs_key():
    one, other = (
        resolve.load(PAIR, ["model.parametrization=mup", f"model.base_hidden_size={size}"])
        for size in (64, 96)
    )
    identities = {keys.run_identity(run, "t", "d") for run in (one, other, resolve.load(PAIR))}
    assert len(identities) == 3
    assert keys.graphs(one) == keys.graphs(resolve.load(PAIR))


def test_features_of_a_packages_family_change_the_identity(monkeypatch):
    """Its model may be one of Trainshed's classes, whose file does not change with the package."""
    found = []
    positions = {"norm_position": "after"}, {"norm_position": "around"}
    for features in ({}, *positions, {"adjacent_pairs": True}, {"linear_norm_eps": 1e-5}):
        family = dataclasses.replace(families.OWN["llama"], **features)
        monkeypatch.setattr(families, "find", lambda _, family=family: family)
        found.append(identity("model.architecture=theirs"))
    assert len({*found}) == 5


def test_other_data_or_weights_change_the_identity():
    runs = [("t", "d", None), ("u", "d", None), ("t", "e", None), ("t", "d", "w"), ("t", "d", "x")]
    assert len({identity(inputs=inputs) for inputs in runs}) == len(runs)


@pytest.mark.parametrize(
    "override",
    [
        "description=another",
        "parallel.tensor=1",
        "parallel.data_sharding=none",
        "parallel.sequence_parallel=false",
        "cluster.devices_per_node=4",
        "cluster.retries=9",
        "compile.enabled=false",
        "checkpoint.every=7",
        "checkpoint.resume=none",
        "evaluate.every=9",
        "train.micro_batch_size=2",
        "train.balance_coefficient=0.001",  # the default
        "train.recompute=full",
        "train.check_replicas_every=10",
        "train.log_every=10",
        "train.spike_factor=3.0",
        "train.bad_steps=5",
        "train.rollbacks=1",
        "train.learning_rate=1e-3",  # the schedule is compared step by step
        "train.steps=301",
        "train.schedule=linear",
        "tokenizer.source=some/where",  # the artifact's key stands for it
        "data.text=body",
    ],
)
def test_topology_and_execution_settings_keep_the_identity(override):
    assert identity(override) == identity()


def test_graphs_key_depends_on_the_choice_of_kernels_where_there_is_one():
    for name, kinds in (("tiny", 1), ("llama3-8b-h100", 2)):
        choices = [resolve.load(name, [f"train.deterministic={choice}"]) for choice in ("true", "false")]
        assert len({keys.graphs(choice) for choice in choices}) == kinds


def test_graphs_key_depends_on_balance_capacity_and_placement_of_experts():
    changes = (
        "train.balance=none",
        "train.balance_coefficient=0.1",
        "train.capacity_factor=2.0",
        "parallel.expert=1",
    )
    found = {keys.graphs(resolve.load("tiny-moe", [change])) for change in ("train.steps=9", *changes)}
    assert len(found) == 1 + len(changes)
    assert keys.graphs(resolve.load("tiny-moe")) in found


def test_graphs_key_of_experts_depends_on_whether_samples_have_padding():
    found = {keys.graphs(resolve.load("tiny-moe", each)) for each in (["train.document_masks=true"], SFT)}
    assert len(found) == 2


def test_name_and_schedule_change_training_keys_but_not_the_identity():
    assert identity(name="other") == identity()
    train, longer = resolve.load(PAIR).train, resolve.load(PAIR, ["train.steps=301"]).train
    evaluation = partial(keys.evaluation, settings=resolve.load(PAIR).evaluate)
    for step in (keys.training, evaluation, keys.export):
        runs = [("tiny", "i", train), ("other", "i", train), ("tiny", "j", train), ("tiny", "i", longer)]
        assert len({step(*run) for run in runs}) == 4
    assert len({step("tiny", "i", train) for step in (keys.training, evaluation, keys.export)}) == 3


def test_keys_do_not_change_when_a_key_of_the_profile_is_renamed():
    """As version 0.2.0 computed them, of which the key was called minimum_steps."""
    profile = resolve.load("llama3-8b-h200", ["train.minimum_rate_steps=30"])
    assert keys.training("r", "i", profile.train) == "d9b5b5ae089d0c1babe7aca39c4499c2"
    assert keys.forecast_target(profile) == "b9d9990ee05fbb7c43e60a73393832e5"


NEURON = ["cluster.threads=1", "cluster.device=neuron", "compile.enabled=false"]
SFT = ["objective.kind=sft", "objective.packing=true"]
PAIRS = ["objective.kind=orpo", "objective.packing=true"]


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ([], ["train.spike_factor=3.0"]),
        ([], ["train.global_batch_size=16"]),
        (
            ["train.loss=tests.emulation.user_functions:accuracy"],
            ["evaluate.metrics=[tests.emulation.user_functions:accuracy]"],
        ),
        ([*PAIRS, "objective.beta=0.1"], [*PAIRS, "objective.beta=0.2"]),
        ([], ["model.parametrization=mup", "model.base_hidden_size=64"]),  # regroups the buckets
    ],
)
def test_step_settings_change_the_graphs_key_on_devices_that_compile_whole_steps(settings, others):
    found = {keys.graphs(resolve.load(PAIR, [*NEURON, *each])) for each in (settings, others)}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("device", "count"), [(NEURON, 2), (["cluster.threads=1"], 1)], ids=["neuron", "cpu"]
)
def test_key_of_a_program_depends_on_the_ranks_of_groups_where_the_compiler_has_them(device, count):
    sizes = (["cluster.devices_per_node=4", f"parallel.tensor={tensor}"] for tensor in (2, 4))
    assert len({keys.graph(resolve.load(PAIR, [*device, *size]), "digest") for size in sizes}) == count


def test_pairs_and_single_records_have_different_graphs_keys_at_equal_row_counts():
    found = {
        keys.graphs(resolve.load(PAIR, ["cluster.threads=1", *each]))
        for each in ([*SFT, "train.micro_batch_size=2"], [*PAIRS, "train.micro_batch_size=1"])
    }
    assert len(found) == 2


def test_other_code_or_compilers_change_the_graphs_key(monkeypatch):
    profile = resolve.load(PAIR)
    before = keys.graphs(profile)
    monkeypatch.setattr(keys, "compiler_versions", lambda: {"torch": "99"})
    other = keys.graphs(profile)
    monkeypatch.undo()
    monkeypatch.setattr(keys, "code_digest", lambda *packages: "changed")
    assert len({before, other, keys.graphs(profile)}) == 3


def test_the_code_digest_follows_any_file_of_a_package(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    before = keys.code_digest("some_package")
    (package / "notes.txt").write_text("no code")
    assert keys.code_digest("some_package") == before
    (package / "layers.py").write_text("x = 2")
    assert keys.code_digest("some_package") != before


def test_metrics_follow_the_modules_beside_them_and_identities_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    Path("own.py").write_text("from package.helper import scale\nimport torch\n")
    Path("package/helper.py").write_text("import deeper\n")
    Path("deeper.py").write_text("scale = 1\n")
    Path("unrelated.py").write_text("")
    evaluated, identity = keys._function("own:metric", helpers=True), keys._function("own:metric")
    Path("unrelated.py").write_text("x = 1")
    assert keys._function("own:metric", helpers=True) == evaluated
    Path("deeper.py").write_text("scale = 2\n")
    assert keys._function("own:metric", helpers=True) != evaluated
    assert keys._function("own:metric") == identity


def test_capacity_changes_the_key_of_reference_probabilities():
    tight, loose = (resolve.load("tiny-moe", [f"train.capacity_factor={value}"]) for value in (0.5, "null"))
    assert keys.reference(tight, "w", "d") != keys.reference(loose, "w", "d")


def test_sequence_length_changes_the_dataset_key_but_no_tokens_key():
    assert keys.dataset(["a", "b"], 256) != keys.dataset(["a", "b"], 128)
    assert keys.dataset(["a", "b"], 256) != keys.dataset(["b", "a"], 256)
    shard = {"tokenizer": "a", "source": "a", "held_out": 0.05, "append_eos": True}
    changes = {"tokenizer": "b", "source": "b", "held_out": "train", "append_eos": False}
    changed = [{**shard, name: value} for name, value in changes.items()]
    assert len({keys.tokens(**each) for each in (shard, *changed)}) == 5


def test_tokenizer_key_depends_on_its_source():
    made = [
        {"contents": "a"},
        {"contents": "b"},
        {"repository": "a", "commit": "b"},
        {"texts": ["a"], "size": 4},
    ]
    assert len({keys.tokenizer(**content) for content in made}) == len(made)
