"""Roles of keys: which cache keys a change of each key of a profile changes, compared with its role."""

import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from profiles import resolve
from profiles.schema import Profile
from profiles.sections import families
from profiles.sections.base import Section, sections_in
from profiles.sections.roles import Role, closure, own_role, roles
from tasks import inputs, keys
from tasks.sources.shard import Shard
from tasks.step import Context
from tasks.steps.checkpoint import CheckpointStep
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store
from tasks.tokenization import dataset_plan
from tests.profiles.pair import PAIR

FILES = "[{kind: files, path: a, weight: 1.0}, {kind: files, path: b, weight: 2.0}]"
LINEAR = "model.rope_scaling={rope_type: linear, factor: 2.0}"
LLAMA3 = (
    "model.rope_scaling={rope_type: llama3, factor: 2.0, low_freq_factor: 1.0, high_freq_factor: 4.0, "
    "original_max_position_embeddings: 64}"
)
YARN = "model.rope_scaling={rope_type: yarn, factor: 2.0, original_max_position_embeddings: 64}"
MIXED = (f"data.sources={FILES}", "data.schedule=[{step: 9, weights: [1, 1]}]")
SCALED = ("model.parametrization=completep", "model.base_hidden_size=64", "model.base_num_hidden_layers=2")
STARTED = ("init.from=org/model", "tokenizer.source=org/model")
PAIRS = ("objective.kind=dpo", *STARTED, "objective.template=chatml")
BASES = (
    (PAIR, *MIXED, LINEAR, "continual.stand_in=[{kind: files, path: c}]"),
    (PAIR, "cluster.device=cuda", "cluster.accelerator=h100", "train.steps=null", "train.epochs=1"),
    (PAIR, "cluster.device=neuron", "cluster.accelerator=trn2", YARN, *SCALED, "train.optimizer=muon"),
    ("tiny-moe", "cluster.threads=1", "train.optimizer=muon"),
    ("deepseek-v3", "train.recompute=none", *PAIRS),
    ("deepseek-v3-h200", "train.recompute=none", "model.num_nextn_predict_layers=1"),
    (PAIR, "objective.kind=sft", *STARTED, "lora.rank=4"),
    (PAIR, *PAIRS, LLAMA3, "train.precision=fp8"),
)
# Families with keys of `model` that others lack; only these keys are changed.
FAMILIES = (
    ("granite", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    ("smollm3", "no_rope_layer_interval"),
    ("qwen2", "sliding_window", "max_window_layers"),
    ("stablelm", "partial_rotary_factor"),
)
# Values of keys whose choices their types do not list.
OTHERS = {
    "model.architecture": "mistral",
    "objective.template": "llama3",
    "init.nxd_layout": "trn2",
    "compile.backend": "neuron",
    "train.recompute": "full",
    "tokenizer.source": "org/other",
    "data.sources.0.use": "train",
    "data.schedule.0.weights": [1.0, 2.0],
    "compile.enabled": False,
}
ACCELERATORS = {"cuda": "h200", "neuron": "trn1"}


def walk(
    section: Section, path: str = "", given: Role | None = None
) -> Iterator[tuple[str, Any, FieldInfo, Role]]:
    """Path, value, field and role of each key of a profile; of a list of sections, those of its first one."""
    known = roles(type(section))
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), field.alias or name
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(value, Section):
            yield from walk(value, f"{path}{key}.", given or own_role(field))
        elif isinstance(first, Section):
            yield from walk(first, f"{path}{key}.0.", given or own_role(field))
        elif not sections_in(field.annotation):
            yield f"{path}{key}", value, field, given or known[key]


def types_in(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from types_in(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from types_in(part)
    else:
        yield annotation


def another(profile: Profile, key: str, value: Any, field: FieldInfo) -> Any:
    """Another value of the key's type; None if the profile allows no other."""
    cluster = profile.cluster
    if key == "cluster.accelerator":
        return ACCELERATORS.get(cluster.device)
    if (key == "cluster.device" and cluster.accelerator) or (
        key == "compile.async_tensor" and cluster.device == "neuron"
    ):
        return None
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2 or 1
    if isinstance(value, float):
        return value * 2 or 0.5
    if isinstance(value, tuple):
        return tuple(part / 2 for part in value)
    for kind in types_in(field.annotation):
        if typing.get_origin(kind) is typing.Literal:
            return next((choice for choice in typing.get_args(kind)[::-1] if choice != value), None)
        if isinstance(value, str) and kind is str:
            return f"{value}2"
        if typing.get_origin(kind) is list:
            (entry,) = types_in(typing.get_args(kind)[0])
            return [*(value or ()), 1 if entry is int else "other:function"]
        if typing.get_origin(kind) is tuple:
            return (1, 2)
        if value is None and kind in (int, float, str, bool):
            return kind(1)
    raise NotImplementedError(key)


def changed(profile: Profile, key: str, value: Any) -> Profile:
    def replace(part: Any, names: list[str]) -> Any:
        if not names:
            return value
        name, *rest = names
        if isinstance(part, list):
            return [replace(part[0], rest), *part[1:]]
        fields = {field.alias or name: name for name, field in type(part).model_fields.items()}
        return part.model_copy(update={fields[name]: replace(getattr(part, fields[name]), rest)})

    return replace(profile, key.split("."))


@pytest.fixture
def cache_keys(tmp_path, monkeypatch):
    """A function that computes all cache keys of a profile whose sources have the contents of their names."""
    store = Store(str(tmp_path / "store"), tmp_path / "work")

    def shards(source, key, text, digests, token):
        digest = keys.digest([source.model_dump(mode="json", exclude={"weight", "use"}), text])
        return [Shard(key, "jsonl", digest, (key,), ("",))]

    # One family with the keys of all.
    everything, find = (
        replace(families.OWN["llama"], fields={name: name for name in keys.OF_FAMILIES}),
        families.find,
    )
    monkeypatch.setattr(families, "find", lambda name: everything if name == "llama" else find(name))
    monkeypatch.setattr(inputs.corpus, "shards_of_source", shards)
    monkeypatch.setattr(inputs.weights, "pin", lambda *a: {"digest": keys.digest(a[:2]), "commit": None})
    monkeypatch.setattr(inputs, "resolve_commit", lambda *a: keys.digest(a[:2]))
    monkeypatch.setattr(inputs, "is_folder", lambda source: False)
    monkeypatch.setattr(dataset_plan, "has_plain_added_tokens", lambda folder: False)
    monkeypatch.setattr(keys, "code_digest", lambda *packages: "code")
    monkeypatch.setattr(keys, "compiler_versions", dict)
    monkeypatch.setattr(type(store.artifacts), "path", lambda self, artifact: tmp_path)

    def compute(profile: Profile) -> dict[str, str]:
        context = Context(profile, store, tmp_path / profile.name)
        tokenizer = TokenizerStep().key(context)
        summary = {"vocabulary_size": 64, "bos": 0, "eos": 0, "source": "s", "templates": []}
        artifact = Artifact(ArtifactId("tokenizer", tokenizer), summary=summary)
        step = DatasetStep(artifact)
        dataset = step.key(context)
        checkpoint = CheckpointStep().key(context) if profile.init.from_ else None
        identity = keys.run_identity(profile, tokenizer, dataset, checkpoint)
        found = {
            "tokenizer": tokenizer,
            "tokens": keys.digest([step.plan(context).key(k) for k in range(len(step.plan(context).shards))]),
            "dataset": dataset,
            "checkpoint": checkpoint,
            "graphs": profile.compile.enabled and keys.graphs(profile),
            "identity": identity,
            "schedule": keys.training("run", "identity", profile.train),
            "name": keys.training(profile.name, "identity", None),
            "evaluate": keys.evaluation("run", "i", None, profile.evaluate),
        }
        if profile.precomputes_reference:
            found["reference"] = keys.reference(profile, checkpoint, dataset)
        return found

    return compute


def test_each_key_changes_the_cache_keys_that_its_role_names(cache_keys):
    reached, possible = {}, {}
    bases = [(resolve.load(name, overrides), "") for name, *overrides in BASES]
    for family, *names in FAMILIES:
        values = (f"model.architecture={family}", *(f"model.{name}=1" for name in names))
        bases.append((resolve.load(PAIR, [*values, *PAIRS]), tuple(f"model.{name}" for name in names)))
    for profile, only in bases:
        before = cache_keys(profile)
        for key, value, field, role in walk(profile):
            if not key.startswith(only):
                continue
            reached.setdefault(key, set())
            if (other := another(profile, key, value, field)) is None:
                continue
            after = cache_keys(changed(profile, key, other))
            differing = {part for part in before.keys() | after.keys() if before.get(part) != after.get(part)}
            assert differing <= closure(role.direct(profile)), (key, other, profile.name)
            reached[key] |= differing
            possible[key] = {part for part, _ in role.parts}
    assert {key: parts - reached[key] for key, parts in possible.items() if parts - reached[key]} == {}
    assert reached.keys() >= set(keys_of_all_sections(Profile))


def keys_of_all_sections(section: type[Section], path: str = "") -> Iterator[str]:
    """Paths of the keys of a section and of the sections in it, as `walk` names them."""
    for name, field in section.model_fields.items():
        key = f"{path}{field.alias or name}"
        inner = "0." if typing.get_origin(field.annotation) is list else ""
        sections = sections_in(field.annotation)
        for each in sections:
            yield from keys_of_all_sections(each, f"{key}.{inner}")
        if not sections:
            yield key
