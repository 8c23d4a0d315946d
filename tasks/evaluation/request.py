"""What an evaluation is asked for: a run, a step and overrides, checked before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profiles import resolve
from profiles.errors import ProfileError
from profiles.files import run_files, state_files
from profiles.schema import Profile
from tasks import keys
from tasks.store.store import Store


def split(text: str) -> tuple[str, int | None]:
    """Name and step of RUN or RUN@STEP. Raises ProfileError for a step that is not a number."""
    name, at, step = text.partition("@")
    if at and not step.isdecimal():
        raise ProfileError("run", text, "is neither RUN nor RUN@STEP", [name])
    return name, int(step) if at else None


def load_profile(folder: Path, overrides: Sequence[str]) -> Profile:
    """The run's profile with overrides. Raises ProfileError for invalid ones, and for those of its inputs."""
    path = str(folder / run_files.PROFILE)
    profile = resolve.load(path, overrides, folder.name)
    if overrides:
        resolve.check(profile)
        _require_same_inputs(resolve.load(path, (), folder.name), profile)
    return profile


def write_profile(folder: Path, job: str, profile: Profile) -> Path:
    """Write the profile of a job into a run folder, named by its contents: others may still load theirs."""
    text = resolve.dump(profile)
    file = folder / run_files.LOGS / f"{job}-{keys.digest(text)[:8]}.yaml"
    state_files.make_folder(file.parent)
    state_files.write(file, text)
    return file


def _require_same_inputs(of_run: Profile, profile: Profile) -> None:
    """Raise ProfileError for overrides of data, tokenizer or initial weights, which are the run's."""
    for section in ("data", "tokenizer", "init"):
        there, here = (getattr(each, section).model_dump(by_alias=True) for each in (of_run, profile))
        for name, value in here.items():
            if value != there[name] and name != "cache_gigabytes":
                reason = "cannot be changed for an evaluation, which uses the artifacts of the run; remove this override"
                raise ProfileError(f"{section}.{name}", None, reason)


def require_checkpoint(store: Store, run: str, step: int | None, *, follow: bool) -> None:
    """Raise ProfileError if there is nothing to evaluate."""
    steps = store.run_folder(run).checkpoint_steps()
    if step is not None and step not in steps:
        nearest = [f"{run}@{each}" for each in sorted(steps, key=lambda each: abs(each - step))[:3]]
        raise ProfileError("run", f"{run}@{step}", f"has no complete checkpoint of step {step}", nearest)
    if not steps and not follow:
        raise ProfileError("run", run, f"has no complete checkpoint in {store.uri}")
