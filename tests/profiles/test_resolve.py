"""Resolving profiles: names, files, extends and overrides; round trip to YAML."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles import resolve
from profiles.errors import ProfileError
from profiles.renamed_keys import RENAMED
from profiles.schema import Profile
from tests.hub import Hub

MINIMAL = {
    "model": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    },
    "tokenizer": {"source": "train", "vocabulary_size": 512},
    "data": {"sources": [{"kind": "python-docs"}]},
    "train": {"steps": 10, "global_batch_size": 4, "sequence_length": 32, "learning_rate": 0.001},
    "cluster": {"device": "cpu"},
}


def write(path: Path, **sections) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(sections))
    return path


def rejection(*arguments, **more) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        resolve.load(*arguments, **more)
    assert str(caught.value).count("\n") == len(caught.value.others)
    return caught.value


@pytest.mark.parametrize("name", resolve.names())
def test_shipped_profiles_resolve(name):
    profile = resolve.load(name)
    assert profile.name == name
    assert profile.description


def test_profiles_for_h100_are_those_for_h200_with_what_their_overlay_has():
    for model, changes in (
        ("llama3-8b", {"parallel.data_sharding": "fsdp"}),
        ("deepseek-v3", {"cluster.nodes": 64, "parallel.pipeline": 16, "train.recompute": "full"}),
    ):
        expected = resolve.load(f"{model}-h200", [f"{key}={value}" for key, value in changes.items()])
        resolve.load(f"{model}-h100", ["cluster.accelerator=b200"])  # changes no later one
        h100 = resolve.load(f"{model}-h100", ["cluster.accelerator=h200"], name=expected.name)
        assert h100.model_copy(update={"description": expected.description}) == expected
    profile = resolve.load("llama3-8b-h100")
    assert profile.cluster.accelerator == "h100"
    assert profile.description == "Llama 3 8B from scratch on English Wikipedia, on one node of 8 H100"


def test_minimal_file_gets_name_and_defaults(tmp_path):
    profile = resolve.load(str(write(tmp_path / "mine.yaml", **MINIMAL)))
    assert profile.name == "mine"
    assert (profile.model.head_dim, profile.model.num_key_value_heads) == (16, 4)
    assert (profile.parallel.tensor, profile.train.seed) == (1, 1234)
    resolve.check(profile)


def test_extends_merges_keys_and_replaces_lists(tmp_path):
    write(
        tmp_path / "base.yaml",
        **MINIMAL,
        description="the base",
        parallel={"tensor": 2, "data_sharding": "none"},
    )
    write(tmp_path / "middle.yaml", extends="./base.yaml", train={"steps": 20})
    child = write(
        tmp_path / "deep" / "child.yaml",
        extends="../middle.yaml",
        parallel={"tensor": 4},
        data={"sources": [{"kind": "files", "path": "x"}]},
    )
    profile = resolve.load(str(child))
    assert (profile.name, profile.description) == ("child", "")
    assert (profile.parallel.tensor, profile.parallel.data_sharding) == (4, "none")
    assert (profile.train.steps, profile.train.sequence_length) == (20, 32)
    assert [source.path for source in profile.data.sources] == [str(child.with_name("x"))]


def test_paths_are_relative_to_the_file_that_sets_them(tmp_path, monkeypatch):
    """Those in overrides, and in a resolved profile, to the working folder."""
    monkeypatch.chdir(tmp_path)
    for file in (
        "configs/data/a.txt",
        "configs/tok/tokenizer.json",
        "mine/chat.jinja",
        "org/name/config.json",  # a copy of the repository
        "shared/b.bin",
        "shared/b.idx",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("text")
    sources = [
        {"kind": "files", "path": path} for path in ("data/*.txt", "./data", str(tmp_path), "s3://bucket/a")
    ]
    sources.append({"kind": "megatron", "path": "../shared/b"})
    base = {"extends": "tiny", "data": {"sources": sources}, "tokenizer": {"source": "tok"}}
    (tmp_path / "configs/base.yaml").write_text(yaml.safe_dump(base))
    child = {"extends": "../configs/base.yaml", "objective": {"kind": "sft", "template": "chat.jinja"}}
    child |= {"init": {"from": "org/name"}, "continual": {"include": "tasks"}}
    (tmp_path / "mine/child.yaml").write_text(yaml.safe_dump(child))
    profile = resolve.load("mine/child.yaml", ["data.sources.3.path=data/c"])
    assert [source.path for source in profile.data.sources] == [
        *("configs/data/*.txt", "configs/data", str(tmp_path), "data/c", "configs/../shared/b"),
    ]
    found = profile.tokenizer.source, profile.init.from_, profile.objective.template
    assert found == ("configs/tok", "org/name", "mine/chat.jinja")
    assert profile.continual.include == "mine/tasks"
    stored = tmp_path / "store/runs/child/profile.yaml"
    stored.parent.mkdir(parents=True)
    stored.write_text(resolve.dump(profile))
    assert resolve.load(str(stored)) == profile


def test_file_extends_a_shipped_profile(tmp_path):
    linear = {"rope_type": "linear", "factor": 2.0}
    child = write(tmp_path / "linear.yaml", extends="llama3.1-8b", model={"rope_scaling": linear})
    assert resolve.load(str(child)).model.rope_scaling.model_dump() == linear
    profile = resolve.load(str(write(tmp_path / "longer.yaml", extends="tiny", train={"steps": 999})))
    assert (profile.name, profile.train.steps) == ("longer", 999)
    assert profile.model == resolve.load("tiny").model


def test_circular_extends_is_rejected(tmp_path):
    first = write(tmp_path / "first.yaml", extends="./second.yaml")
    write(tmp_path / "second.yaml", extends="./first.yaml")
    error = rejection(str(first))
    assert error.key == "extends"
    assert "first → second → first" in error.reason


def test_overrides_are_yaml_and_the_last_one_wins():
    overrides = [
        "train.steps=7",
        "train.steps=8",
        "train.learning_rate=3e-4",  # which PyYAML alone takes for text
        "compile.enabled=false",
        "checkpoint.async=true",
        "init.from=org/weights",
        "train.betas=[0.8, 0.9]",
        "train.clip=null",
        "data.sources.0={kind: files, path: 'a=b.txt'}",
        "continual.gates.0.rise_at_most=0.05",  # of a list that no file sets
    ]
    profile = resolve.load("tiny", overrides)
    assert (profile.train.steps, profile.train.learning_rate) == (8, 3e-4)
    assert (profile.compile.enabled, profile.checkpoint.async_, profile.init.from_) == (
        False,
        True,
        "org/weights",
    )
    assert (profile.train.betas, profile.train.clip) == ((0.8, 0.9), None)
    assert [(gate.on, gate.rise_at_most) for gate in profile.continual.gates] == [
        ("old", 0.05),
        ("new", None),
    ]
    assert profile.data.sources[0].path == "a=b.txt"


def test_run_name_replaces_profile_name():
    assert resolve.load("tiny", name="first-try").name == "first-try"
    assert rejection("tiny", name="../elsewhere").key == "name"
    assert rejection("tiny", name="tiny~1").key == "name"


@pytest.mark.parametrize(
    ("override", "key", "value", "reason", "choices"),
    [
        ("parallel.tenser=2", "parallel.tenser", 2, "no such key in parallel", ("parallel.tensor",)),
        (
            "train.batch_size=2",
            "train.batch_size",
            2,
            "no such key",
            ("train.global_batch_size", "train.micro_batch_size"),
        ),
        ("trian.steps=2", "trian", None, "no such key", ("train",)),
        ("learning_rate=1e-3", "learning_rate", 1e-3, "no such key", ("train.learning_rate",)),
        ("train.tensor=2", "train.tensor", 2, "no such key in train", ("parallel.tensor",)),
        ("checkpoint.async_=true", "checkpoint.async_", True, "no such key", ("checkpoint.async",)),
        (
            "model.norm_epsilon=1",
            "model.norm_epsilon",
            1,
            "no such key",
            ("model.norm_eps", "model.layer_norm_epsilon"),
        ),
        (
            "model.name=1",
            "model.name",
            1,
            "no such key in model; docs/profiles.md lists all",
            ("model.architecture", "model.hidden_size"),
        ),
        ("xx=1", "xx", 1, "no such key at the top level; docs/profiles.md lists all", ("name", "model")),
        ("data.sources.0.pth=x", "data.sources.0.pth", "x", "no such key", ("data.sources.0.path",)),
        ("train.steps=many", "train.steps", "many", "not a whole number", ()),
        ("train.steps='3'", "train.steps", "3", "not a whole number", ()),
        ("train.steps=1.5", "train.steps", 1.5, "not a whole number", ()),
        ("train.steps=true", "train.steps", True, "not a whole number", ()),
        ("train.steps=0", "train.steps", 0, "below 1", (1,)),
        ("train.learning_rate=fast", "train.learning_rate", "fast", "not a number", ()),
        ("train.learning_rate=.inf", "train.learning_rate", float("inf"), "not a finite number", ()),
        ("data.append_eos=1", "data.append_eos", 1, "not true or false", ()),
        ("compile.enabled=1", "compile.enabled", 1, "nor true or false", ("auto", "true", "false")),
        ("tokenizer.source=5", "tokenizer.source", 5, "not a string", ()),
        ("tokenizer.source=''", "tokenizer.source", "", "empty", ()),
        ("train.betas=[0.9]", "train.betas", [0.9], "too few", ()),
        ("train.betas=[0.9, 1.5]", "train.betas.1", 1.5, "not below 1", ()),
        ("data.sources=[]", "data.sources", [], "too few", ()),
        ("parallel=4", "parallel", 4, "not a section", ()),
        ("train.precision=fp16", "train.precision", "fp16", "choices", ("float32", "bf16", "fp8")),
        ("cluster.device=gpu", "cluster.device", "gpu", "choices", ("cpu", "cuda", "neuron")),
        ("checkpoint.resume=latest", "checkpoint.resume", "latest", "whole number", ("newest", "none")),
        ("train.loss=my_loss", "train.loss", "my_loss", "module:function", ()),
        ("cluster.device=null", "cluster.device", None, "choices", ("cpu", "cuda", "neuron")),
        *((f"{old}=1", old, 1, f"was renamed; use {new}", ()) for old, new in RENAMED.items()),
    ],
)
def test_bad_value_is_rejected_with_key_reason_and_choices(override, key, value, reason, choices):
    error = rejection("tiny", [override])
    assert (error.key, error.value) == (key, value)
    assert reason in error.reason
    assert set(choices) <= set(error.choices)
    assert len(error.choices) <= 5


def test_message_is_one_line():
    assert str(rejection("tiny", ["train.precision=fp16"])) == (
        "train.precision = fp16: is not one of the choices; nearest valid: bf16, fp8, float32"
    )


@pytest.mark.parametrize("path", ["/scratch/" + "long/" * 40 + "a b.jsonl", Path("/" + "x" * 200)])
def test_path_is_shown_complete_and_other_long_values_are_cut(path):
    assert (
        str(ProfileError("data.sources.0.path", path, "is missing"))
        == f"data.sources.0.path = {path}: is missing"
    )
    assert "…" in str(ProfileError("data.sources", ["a/b"] * 40, "are wrong"))


def test_every_error_is_reported_with_its_reason():
    error = rejection("tiny", ["train.steps=x", "train.seed=y", "parallel.tenser=2"])
    assert str(error).splitlines() == [
        # A mistyped key first: it may be why another one is missing.
        "parallel.tenser = 2: there is no such key in parallel; nearest valid: parallel.tensor;",
        "also train.steps = x: is not a whole number;",
        "also train.seed = y: is not a whole number",
    ]


def test_missing_key_is_named(tmp_path):
    sections = {**MINIMAL, "train": {"steps": 1}}
    error = rejection(str(write(tmp_path / "short.yaml", **sections)))
    assert error.key == "train.global_batch_size"
    assert "is missing" in str(error)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.steps", "KEY.PATH=VALUE"),
        ("=3", "KEY.PATH=VALUE"),
        ("train..steps=3", "KEY.PATH=VALUE"),
        ("train.steps=[1", "not YAML"),
        ("train={steps: 1, steps: 2}", "duplicate key"),
        ("train.steps.more=3", "no keys"),
        ("data.sources.first.kind=files", "by number"),
        ("data.sources.7.kind=files", "a list of 1; address its entries by number"),
        ("continual.gates.2.on=old", "a list of 2; address its entries by number"),
        ("continual.stand_in.0.path=a", "an empty list; set all of it, continual.stand_in=[...]"),
        ("extends=tiny", "file"),
    ],
)
def test_malformed_override_is_rejected(override, reason):
    assert reason in str(rejection("tiny", [override]))


def test_unknown_profile_is_rejected_with_similar_names(tmp_path):
    assert rejection("tinny").choices[0] == "tiny"
    unlike = rejection("no-such-thing")
    assert (unlike.choices, "`trainshed profiles` lists them" in unlike.reason) == ((), True)
    write(tmp_path / "mine.yaml", **MINIMAL)
    assert rejection(str(tmp_path / "mime.yaml")).choices == (str(tmp_path / "mine.yaml"),)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("train: [", "line 2, column 1"),
        ("train: {}\ntrain: {}", "duplicate key train"),
        ("{a: 1}: 3", "line 1, column 1: a list or a mapping is not a valid key"),
        ("? [a, b]\n: 3", "line 1, column 3: a list or a mapping is not a valid key"),
        ("- a list", "not a mapping"),
        ("", "not a mapping"),
        ("train: \x00", "not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_invalid_profile_file_is_rejected(tmp_path, content, reason):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    error = rejection(str(path))
    assert error.value == str(path)
    assert reason in error.reason


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_profile_is_utf8_with_or_without_a_byte_order_mark(tmp_path, encoding):
    (tmp_path / "mine.yaml").write_bytes("# é\nextends: tiny\ndescription: naïve\n".encode(encoding))
    if encoding == "utf-8-sig":
        assert resolve.load(str(tmp_path / "mine.yaml")).description == "naïve"
    else:
        assert "is not UTF-8 text at byte" in rejection(str(tmp_path / "mine.yaml")).reason


def test_resolved_profile_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        resolve.load("tiny").train.steps = 5


TEXT = st.text(min_size=1, max_size=20)
NUMBER = st.floats(min_value=0, max_value=0.5)
CHANGES = {
    "description": st.text(max_size=40),
    "tokenizer": st.fixed_dictionaries({"source": TEXT, "revision": st.none() | TEXT}),
    "data": st.fixed_dictionaries(
        {
            "sources": st.lists(
                st.fixed_dictionaries({"kind": st.just("files"), "path": TEXT}), min_size=1, max_size=3
            ),
            "text": TEXT,
            "validation_fraction": NUMBER,
        }
    ),
    "init": st.fixed_dictionaries({"from": st.none() | TEXT}),
    "checkpoint": st.fixed_dictionaries(
        {"resume": st.sampled_from(["newest", "none"]) | st.integers(0, 2**31 - 1), "async": st.booleans()}
    ),
    "train": st.fixed_dictionaries(
        {
            "steps": st.integers(1, 2**31 - 1),
            "global_batch_size": st.integers(1, 2**31 - 1),
            "sequence_length": st.integers(1, 2**24),
            "learning_rate": NUMBER,
            "betas": st.lists(NUMBER, min_size=2, max_size=2),
            "clip": st.none() | st.floats(min_value=1e-300, max_value=1e300),
        }
    ),
}


@settings(max_examples=50)
@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_dump_and_load_round_trip(tmp_path_factory, changes):
    profile = Profile.model_validate({"name": "drawn", **MINIMAL, **changes})
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(resolve.dump(profile))
    assert resolve.load(str(path)) == profile
    assert yaml.safe_load(path.read_text())["name"] == "drawn"  # by any other reader too


def test_profiles_of_existing_runs_are_read_with_the_former_names_of_their_keys(tmp_path):
    overrides = ["train.minimum_rate_steps=3", "train.check_replicas_every=7", "checkpoint.weights_only=true"]
    profile = resolve.load("tiny", overrides)
    written = resolve.dump(profile)
    for old, new in RENAMED.items():
        written = written.replace(f"  {new.partition('.')[2]}: ", f"  {old.partition('.')[2]}: ")
    assert written != resolve.dump(profile)
    path = tmp_path / "profile.yaml"
    path.write_text(written)
    assert resolve.load(str(path)) == profile
    path.write_text("{extends: tiny, train: {minimum_steps: 3}}")  # by hand
    assert "use train.minimum_rate_steps" in rejection(str(path)).reason


@pytest.mark.parametrize(
    "value", ["1e5", "3e-4", "-1E+2", "1_0e3", "8e2cd01", "yes", "null", "1:30", "0x10", "=", "~", "\x85"]
)
def test_strings_that_look_like_other_types_stay_strings(tmp_path, value):
    path = tmp_path / "text.yaml"
    path.write_text(resolve.dump(resolve.load("tiny").model_copy(update={"description": value})))
    assert resolve.load(str(path)).description == value


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}


@pytest.mark.parametrize("place", ["config.json", ".", "org/name"])
def test_model_config_is_a_file_folder_or_repository(place, tmp_path, monkeypatch):
    text = json.dumps(CONFIG)
    with Hub() as hub:
        hub.patch(monkeypatch, tmp_path / "hub-cache")
        hub.commit("org/name", {"config.json": text.encode()})
        if place != "org/name":
            (tmp_path / "config.json").write_text(text)
        rest = {name: section for name, section in MINIMAL.items() if name != "model"}
        base = write(tmp_path / "base.yaml", **rest, model={"config": place, "num_hidden_layers": 5})
        below = write(tmp_path / "sub" / "below.yaml", extends="../base.yaml", model={"rope_theta": 1e4})
        assert resolve.load(str(base)).model.num_hidden_layers == 5
        resolved = resolve.load(str(below), ["model.vocab_size=600"])
    model = resolved.model
    numbers = (model.hidden_size, model.num_hidden_layers, model.rope_theta, model.vocab_size)
    assert numbers == (64, 5, 1e4, 600)
    assert model.rope_scaling.factor == 4
    (tmp_path / "config.json").unlink(missing_ok=True)  # once resolved, nobody asks for it again
    (tmp_path / "resolved.yaml").write_text(resolve.dump(resolved))
    assert resolve.load(str(tmp_path / "resolved.yaml")) == resolved


def test_unreachable_hub_is_not_a_profile_error(tmp_path, monkeypatch, waits):
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    with Hub() as hub:
        hub.patch(monkeypatch, tmp_path / "hub-cache")
        hub.faults, hub.broken = [(503, {})], True
        with pytest.raises(ConnectionError, match="org/name: the hub is unreachable"):
            resolve.load("tiny", ["model.config=org/name"])
    assert not waits  # beyond the client's own: a person waits


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("org/none", "neither a local folder nor a hub repository"),
        ("org/empty", "has no config.json"),
        ("org/empty@0123", "no such revision"),
    ],
)
def test_repository_without_config_json_is_rejected(config, reason, tmp_path, monkeypatch):
    with Hub() as hub:
        hub.patch(monkeypatch, tmp_path / "hub-cache")
        hub.commit("org/empty", {"README.md": b""})
        error = rejection("tiny", [f"model.config={config}"])
    assert (error.key, reason in str(error)) == ("model.config", True)


def test_device_is_no_config():
    with pytest.raises(ProfileError, match="is not a regular file"):
        resolve.load("tiny", ["model.config=/dev/zero"])
