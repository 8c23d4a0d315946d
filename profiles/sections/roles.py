"""Roles: what a change of a profile's key changes, so which steps it runs again.

A section has a role, `default_role`; a field with another one has it in its annotation. `tasks/keys.py` takes from it what
belongs to a run's identity, and `role_tables.py` the tables of docs/caching.md. The keys of the tokenizer, the dataset and the
checkpoint are computed in the `key` methods of tasks/steps and of tasks/tokenization/dataset_plan.py: roles state what these do,
and a test compares them. Change both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from profiles.schema import Profile
    from profiles.sections.base import Section

# The parts of a run that have a key of their own, in the order of a run: artifacts, and the run's identity (`identity`), learning
# rate schedule (`schedule`) and name (`name`). For each, the parts whose keys its own key contains.
CONTAINS: Mapping[str, tuple[str, ...]] = {
    "tokenizer": (),
    "tokens": ("tokenizer",),
    "dataset": ("tokens",),
    "checkpoint": (),
    "graphs": (),
    "reference": ("dataset", "checkpoint"),
    "identity": ("tokenizer", "dataset", "checkpoint"),
    "schedule": (),
    "name": (),
    "train": ("identity", "schedule", "name"),
    "evaluate": ("identity", "schedule", "name"),
    "export": ("identity", "schedule", "name"),
}


@dataclass(frozen=True)
class Condition:
    """A property of a profile without which a key has no effect."""

    text: str  # as it follows the name of a step
    holds: Callable[[Profile], bool]


ALWAYS: tuple[Condition, ...] = ()
ON_CUDA = Condition("on `cuda`", lambda profile: profile.cluster.device == "cuda")
ON_NEURON = Condition("on `neuron`", lambda profile: profile.cluster.device == "neuron")
WITH_EXPERTS = Condition("with experts", lambda profile: profile.model.num_experts is not None)
WITH_MULTI_TOKEN = Condition(
    "with multi-token prediction", lambda profile: len(profile.model.prediction_layers) > 0
)
WITH_RECORDS = Condition("for records", lambda profile: profile.objective.traits.reads_records)
WITH_REFERENCE = Condition("for `dpo`", lambda profile: profile.objective.traits.needs_reference)
WITH_WEIGHTS = Condition("with `init.from`", lambda profile: profile.init.from_ is not None)
IF_TRAINED = Condition("if it is trained", lambda profile: profile.tokenizer.source == "train")


@dataclass(frozen=True)
class Role:
    """What a key of the profile is a part of.

    Attributes:
        parts: names in `CONTAINS` whose keys contain it, each with the conditions of which one must hold; none: always.
    """

    parts: tuple[tuple[str, tuple[Condition, ...]], ...] = ()

    @classmethod
    def of(cls, *always: str, **conditional: Condition | tuple[Condition, ...]) -> Role:
        """A role by its parts: those that contain the key always, and those that do under conditions."""
        given = {
            name: each if isinstance(each, tuple) else (each,) for name, each in conditional.items()
        } | dict.fromkeys(always, ALWAYS)
        return cls(tuple((name, given[name]) for name in CONTAINS if name in given))

    def __contains__(self, part: str) -> bool:
        return part in dict(self.parts)

    def direct(self, profile: Profile) -> set[str]:
        """The parts whose keys contain the key of the profile themselves."""
        return {name for name, given in self.parts if not given or any(each.holds(profile) for each in given)}

    @property
    def makes_another_run(self) -> bool:
        """Whether a change makes another run, rather than continuing the run in another way."""
        return bool(closure({name for name, _ in self.parts}) & {"identity", "name"})


def closure(parts: set[str]) -> set[str]:
    """The parts, and those whose keys contain one of theirs."""
    found: set[str] = set()
    for name, contained in CONTAINS.items():
        if name in parts or found.intersection(contained):
            found.add(name)
    return found


def roles(section: type[Section]) -> dict[str, Role]:
    """The role of each key of a section."""
    found = {}
    for name, field in section.model_fields.items():
        found[field.alias or name] = own_role(field) or section.default_role
    return found


def own_role(field: FieldInfo) -> Role | None:
    """The role in a field's annotation, which holds for the keys of sections in it; None without one."""
    return next((each for each in field.metadata if isinstance(each, Role)), None)


def keys_of(section: type[Section], part: str, *, other: bool = False) -> frozenset[str]:
    """Keys of a section that a part's key contains, at least under a condition; `other`: the other keys."""
    return frozenset(name for name, role in roles(section).items() if (part in role) != other)


NONE = Role()  # how a run is executed, watched and stored
NAME = Role.of("name")
MODEL = Role.of("identity", "graphs", checkpoint=WITH_WEIGHTS, reference=WITH_REFERENCE)
INITIALIZATION = Role.of("identity", graphs=ON_NEURON)  # its rates decide which parameters share a bucket
TOKENIZER = Role.of("tokenizer")
VOCABULARY = Role.of(tokenizer=IF_TRAINED)
TEXT = Role.of("tokens", tokenizer=IF_TRAINED)  # which documents are in a split, and what they contain
TOKENS = Role.of("tokens")
ORDER = Role.of("dataset")
WEIGHTS = Role.of("checkpoint")
OBJECTIVE = Role.of("identity", "tokens", "graphs", tokenizer=IF_TRAINED)
RECORDS = Role.of("identity", "tokens", graphs=ON_NEURON)
PACKING = Role.of("identity", "dataset", "graphs")
REFERENCE = Role.of("graphs", reference=WITH_REFERENCE)
SCHEDULE = Role.of("schedule")
MATHEMATICS = Role.of("identity", graphs=ON_NEURON)
SAMPLES = Role.of("identity")
COMPILED_MATHEMATICS = Role.of("identity", "graphs")
PRECISION = Role.of("identity", "graphs", reference=WITH_REFERENCE)
EXPERTS = Role.of("identity", graphs=(WITH_EXPERTS, ON_NEURON))
MULTI_TOKEN = Role.of(identity=WITH_MULTI_TOKEN)
CAPACITY = Role.of("identity", graphs=(WITH_EXPERTS, ON_NEURON), reference=WITH_REFERENCE)
LENGTH = Role.of("identity", "dataset", "graphs", tokens=WITH_RECORDS)
GRAPHS = Role.of("graphs")  # topology, and what compiles
EXPERT_PLACEMENT = Role.of(graphs=WITH_EXPERTS)
KERNELS = Role.of(graphs=(ON_CUDA, ON_NEURON))
SAFEGUARDS = Role.of(graphs=ON_NEURON)  # how training is checked, logged and guarded
SHARDING = SAFEGUARDS
EVALUATION = Role.of("evaluate")
MULTI_TOKEN_EVALUATION = Role.of("evaluate", graphs=WITH_MULTI_TOKEN)
METRICS = Role.of("evaluate", graphs=ON_NEURON)
