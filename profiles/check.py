"""Runs the rules between a profile's keys, and those for local files before a run; needs no device.

An error offers only choices with which the profile satisfies the other rules too; if a rule cannot compute its valid values, the
nearest ones are found by trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from profiles import user_functions
from profiles.errors import ProfileError
from profiles.rules import (
    cluster,
    continual,
    credentials,
    data_sources,
    experts,
    hyperparameters,
    objectives,
    parallel,
    pretrained,
    trackers,
)
from profiles.schema import Profile
from profiles.sections.base import MAX_SIZE

Rule = Callable[[Profile], None]  # raises ProfileError
SEARCH_STEPS = 1024  # of the search for valid values below and above an invalid one


def check(profile: Profile) -> None:
    """Check that a profile can be planned.

    Raises:
        ProfileError: the first broken topology rule, as later ones depend on it, and every other broken rule.
    """
    credentials.check(profile)  # alone, because errors of other rules repeat values
    errors = []
    if broken := _broken(profile, TOPOLOGY):
        rule, error = broken
        errors.append(error.with_choices(_topology_choices(profile, rule, error)))
    for rule in INDEPENDENT:
        if broken := _broken(profile, [rule]):
            errors.append(broken[1])
    if errors:
        raise errors[0].along_with(errors[1:])


def _broken(profile: Profile, rules: Iterable[Rule]) -> tuple[Rule, ProfileError] | None:
    """The first of these rules that a profile breaks, and how."""
    for rule in rules:
        try:
            rule(profile)
        except ProfileError as error:
            return rule, error
    return None


def broken_rule(profile: Profile) -> ProfileError | None:
    """The first error of `check`, but without choices, which take far longer to find."""
    broken = _broken(profile, (*TOPOLOGY, *INDEPENDENT))
    return broken[1] if broken else None


def passes(profile: Profile, rules: Iterable[Rule] | None = None) -> bool:
    """Whether a profile satisfies rules; by default those for parallel degrees, batch sizes and cluster."""
    return _broken(profile, TOPOLOGY if rules is None else rules) is None


def get_value(profile: Profile, key: str) -> Any:
    """The value of `section.name`."""
    return attrgetter(key)(profile)


def with_value(profile: Profile, key: str, value: Any) -> Profile:
    """A copy of the profile with another value of `section.name`."""
    section, name = key.split(".")
    return profile.model_copy(update={section: getattr(profile, section).model_copy(update={name: value})})


def check_start(profile: Profile) -> None:
    """Check that a run can start from this machine with its local files, which planning does not need.

    Raises:
        ProfileError: every reason why it cannot.
    """
    errors = [broken[1] for rule in START if (broken := _broken(profile, [rule]))]
    if errors:
        raise errors[0].along_with(errors[1:])


# Rules for parallel degrees, batch sizes and the cluster, in order.
TOPOLOGY = (
    cluster.check,
    parallel.check_tensor,
    parallel.check_pipeline,
    parallel.check_context,
    parallel.check_data_parallel,
    parallel.check_sharding,
    experts.check,
    parallel.check_batch,
    parallel.check_microbatches,
    hyperparameters.check_recompute,
)
INDEPENDENT = (
    cluster.check_trace,
    hyperparameters.check_precision,
    hyperparameters.check_qk_clip,
    hyperparameters.check_schedule,
    pretrained.check_vocabulary,
    cluster.check_compilation,
    data_sources.check,
    data_sources.check_schedule,
    continual.check,
    objectives.check,
    experts.check_multi_token,
    trackers.check,
    cluster.check_launcher,
)
# Rules for starting a run: hardware, launcher, and files on this machine.
START = (
    cluster.check_trainable,
    experts.check_static_shapes,
    cluster.check_launcher_installed,
    objectives.check_start,
    pretrained.check_tokenizer,
    pretrained.check_initial_weights,
    data_sources.check_files,
    continual.check_files,
    user_functions.check,
    trackers.check_installed,
)
# Keys whose nearest valid values are searched, with keys that may be changed instead.
SEARCHED: dict[str, tuple[str, ...]] = {
    "parallel.tensor": (),
    "parallel.pipeline": (),
    "parallel.shard_degree": (),
    "train.sequence_length": ("parallel.context",),
    "train.global_batch_size": (),
    "cluster.devices_per_node": ("parallel.pipeline", "parallel.context", "parallel.tensor"),
    "cluster.nodes": ("parallel.pipeline", "parallel.context", "parallel.tensor"),
}


def _topology_choices(profile: Profile, rule: Rule, error: ProfileError) -> list[Any]:
    """Values of the invalid key, and `key=value` for others, with which all topology rules hold.

    If no single change is enough: changes that satisfy the rules up to this one, each with the next change it requires.
    """
    if found := list(_candidates(profile, error, TOPOLOGY)):
        return [text for text, _ in found]
    pairs = []
    for text, changed in _candidates(profile, error, TOPOLOGY[: TOPOLOGY.index(rule) + 1]):
        if not (broken := _broken(changed, TOPOLOGY)):
            continue
        further = broken[1]
        for second, _ in list(_candidates(changed, further, TOPOLOGY))[:1]:
            pairs.append(f"{text} with {second if '=' in str(second) else f'{further.key}={second}'}")
    return pairs


def _candidates(
    profile: Profile, error: ProfileError, rules: Sequence[Rule]
) -> Iterator[tuple[Any, Profile]]:
    """Changes that satisfy the rules, nearest first, and the changed profiles."""
    if error.choices or error.key not in SEARCHED:
        offered = [(error.key, choice) for choice in error.choices]
    else:
        keys = (error.key, *SEARCHED[error.key])
        offered = [(key, value) for key in keys for value in _nearest(profile, key, rules)]
    for key, choice in offered:
        if key.count(".") != 1:  # an entry of a list
            yield choice, profile
            continue
        changed = with_value(profile, key, None if choice == "null" else choice)
        if passes(changed, rules):
            yield (choice if key == error.key else f"{key}={choice}"), changed


def _nearest(profile: Profile, key: str, rules: Sequence[Rule]) -> list[int]:
    """The nearest values of a key, below and above its own, that satisfy the rules."""
    value = get_value(profile, key)
    step = {
        "train.global_batch_size": profile.train.micro_batch_size * max(1, profile.data_parallel),
        "train.sequence_length": 2 * profile.parallel.context if profile.parallel.context > 1 else 1,
    }.get(key, 1)
    multiple = value // step
    below = range(multiple - (value % step == 0), max(0, multiple - SEARCH_STEPS), -1)
    above = range(multiple + 1, min(multiple + SEARCH_STEPS, MAX_SIZE // step + 1))
    found = (
        next((n * step for n in direction if passes(with_value(profile, key, n * step), rules)), None)
        for direction in (below, above)
    )
    return [nearest for nearest in found if nearest]
