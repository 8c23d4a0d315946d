"""Runs by name: open a run folder (one flow run at a time), fetch existing runs, read run records."""

from __future__ import annotations

import errno
import json
import logging
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modeling.training.learning_rate import same_until
from modeling.training.recovery.resume import ResumeRequest
from profiles import resolve
from profiles.check import with_value
from profiles.errors import ProfileError, closest, format_value, names_in
from profiles.files import folders, run_files, state_files
from profiles.files.jsonl import LogFollower, is_event, last_row
from profiles.recompute import AUTO
from profiles.schema import Profile, Train
from tasks.keys import NOT_MATHEMATICS, POSITION, SCHEDULE, train_values
from tasks.launchers import create, latest_jobs
from tasks.store import activities
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.backends.backend import NAME
from tasks.store.backends.folder import FolderBackend
from tasks.store.run_folder import REPLACED, Parent, RunFolder
from tasks.store.store import Store

log = logging.getLogger(__name__)

# Of inputs.json, with their types.
INPUT_KEYS = {"identity": str, "tokenizer": str | None, "dataset": str | None}


class RunExists(ProfileError):
    """The name belongs to a run with different mathematics.

    Attributes:
        step: its latest checkpoint.
        forkable: whether a run of this profile can start from that checkpoint.
        settings: overrides of `train` that differ from the run's; a fork, which starts from its profile, needs them.
        commands: (description, command) of each solution; empty if unknown.
    """

    def __init__(
        self, name: str, differences: Sequence[str], step: int, forkable: bool, settings: Sequence[str] = ()
    ) -> None:
        changes = "; ".join(differences)
        reason = f"a run of this name is at step {step:,} with other settings ({changes})"
        super().__init__("name", name, reason)
        self.step, self.forkable, self.settings = step, forkable, settings
        self.commands: Sequence[tuple[str, str]] = ()

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.suggestions()])

    def suggestions(self) -> list[str]:
        """A line for each solution, and one with its command."""
        return [line for does, command in self.commands for line in (f"  {does}", f"    {command}")]


def open_run(
    store: Store,
    profile: Profile,
    identity: str,
    flow_run: str,
    inputs: Mapping[str, str | None],
    *,
    parent: Parent | None = None,
    replace: bool = False,
) -> Path:
    """The folder of a run, created or resumed; the caller holds the lock of its name (activities.py).

    A run of the same name and identity is resumed; the learning rate's schedule may change for its remaining steps. A run with
    different mathematics is moved to `<name>~N` if it has no checkpoint or `replace` is true.

    Args:
        inputs: keys of what it starts from; see `read_inputs`.
        parent: the run that it was forked from.

    Raises:
        RunExists: a run with different mathematics has the name.
        ProfileError: that run still has an active job or is being read, its profile cannot be read, or the request to resume it
            has no effect.
    """
    run = store.run_folder(profile.name)
    stored = run.stored_identity
    if stored is not None:
        folder = run.prepare(stored)
        existing = _stored_profile(run, required=not replace)
        if found := differences(run, existing, profile, folder, identity, inputs):
            if not replace:
                _require_nothing_trained(run, existing, profile, found)
            _require_no_active_job(profile, existing, folder)
            with activities.without_readers(store, run.name):
                log.warning("run %s: moved the existing run to %s", run.name, run.move_aside())
        elif existing and (changed := _different_train(existing.train, profile.train, SCHEDULE)):
            _require_no_active_job(profile, existing, folder)  # it would continue with the old schedule
            log.info("run %s: the schedule of the remaining steps changes: %s", run.name, "; ".join(changed))
        elif existing and stored == identity:
            reject_resume_of_finished(run, profile, folder)
            _warn_of_active_job(existing, profile, folder)
    folder = run.prepare(identity, parent)
    # In the store too: another machine compares them before it continues the run.
    run.write(run_files.PROFILE, resolve.dump(profile).encode())
    run.write(run_files.INPUTS, json.dumps({"identity": identity, **inputs}, indent=1).encode())
    record_flow_run(folder, flow_run)
    return folder


def check_name(store: Store, profile: Profile) -> None:
    """Raise RunExists, before any work, if settings alone show a run of other mathematics with the name."""
    run = store.run_folder(profile.name)
    if not state_files.exists(run.path / run_files.PROFILE) or run.stored_identity != run.identity:
        return  # not on this machine; `open_run` compares it later
    existing = _stored_profile(run)
    found = _setting_differences(existing, profile)
    found += _schedule_differences(existing, profile, latest_checkpoint(run))
    if found:
        _require_nothing_trained(run, existing, profile, found)


def _stored_profile(run: RunFolder, *, required: bool = False) -> Profile | None:
    """The profile of an existing run; None if it has none that this version can read.

    Args:
        required: reject a run that has a checkpoint without one: its learning rates could change unnoticed.
    """
    path = run.path / run_files.PROFILE
    try:
        return resolve.load(str(path))
    except ProfileError as error:
        log.warning("%s: %s", path, error)
        if required and latest_checkpoint(run):
            reason = f"{path} cannot be read, so its learning rates cannot be compared; restore or correct it: {error}"
            raise ProfileError("name", run.name, reason) from error
        return None


def reject_resume_of_finished(run: RunFolder, profile: Profile, folder: Path) -> None:
    """Reject a new request to resume a finished run: nothing would be trained."""
    request = ResumeRequest.of(profile.checkpoint)
    if (
        request == ResumeRequest()
        or profile.train.steps is None
        or latest_checkpoint(run) < profile.train.steps
    ):
        return
    applied = state_files.read_json(folder / run_files.RESUMED) or {}
    if applied.get("request") != asdict(request):
        reason = "the run is finished, so it does not resume; start another run from one of its checkpoints"
        choice = f"trainshed fork {run.name}@STEP NAME"
        raise ProfileError("checkpoint.resume", profile.checkpoint.resume, reason, [choice])


def latest_checkpoint(run: RunFolder) -> int:
    """Step of a run's latest checkpoint; 0 without one."""
    return max(run.checkpoint_steps(), default=0)


def _require_nothing_trained(
    run: RunFolder, existing: Profile | None, profile: Profile, differences: Sequence[str]
) -> None:
    """Raise RunExists if the existing run has a checkpoint."""
    if reached := latest_checkpoint(run):
        settings = _train_overrides(existing, profile) if existing else ()
        raise RunExists(run.name, differences, reached, can_fork(existing, profile, reached), settings)


def _train_overrides(existing: Profile, profile: Profile) -> list[str]:
    """Overrides that give the train section of one profile the values of another."""
    theirs, ours = (each.train.model_dump(mode="json", by_alias=True) for each in (existing, profile))
    changed = {key: value for key, value in ours.items() if value != theirs[key]}
    return [f"train.{key}={format_value(value, longest=None)}" for key, value in changed.items()]


def differences(
    run: RunFolder,
    existing: Profile | None,
    profile: Profile,
    folder: Path,
    identity: str | None,
    inputs: Mapping[str, str | None],
) -> list[str]:
    """What makes a profile's run another one than the existing run; empty if it is the same.

    Args:
        existing: the run's profile; None if it cannot be read.
        folder: of the run.
        identity: of the profile's run; None if it is not known yet, but another one.
        inputs: keys of what the profile's run starts from.
    """
    found = []
    if run.stored_identity != identity:
        known = state_files.read_json(folder / run_files.INPUTS) or {}
        others = [f"another {kind}" for kind, key in inputs.items() if known.get(kind) != key]
        found = _setting_differences(existing, profile) + others
        found = found or ["it was forked from another run, or made by another version of Trainshed"]
    return found + _schedule_differences(existing, profile, latest_checkpoint(run))


def _setting_differences(existing: Profile | None, profile: Profile) -> list[str]:
    """Keys of the profile that make the mathematics differ, apart from the schedule."""
    if existing is None:
        return []
    names = profile.train.__class__.model_fields.keys() - NOT_MATHEMATICS - SCHEDULE
    there, here = existing.model.model_dump(mode="json"), profile.model.model_dump(mode="json")
    model = _different_values("model", there, here, here)
    there, here = existing.data.model_dump(mode="json"), profile.data.model_dump(mode="json")
    data = _different_values("data", there, here, ["schedule"])
    return model + _different_train(existing.train, profile.train, names) + data


def _schedule_differences(existing: Profile | None, profile: Profile, step: int) -> list[str]:
    """Keys of the schedule, if they change the learning rate of a step up to this one."""
    if existing is None or profile.train.steps is None or same_until(existing.train, profile.train, step):
        return []
    return _different_train(existing.train, profile.train, SCHEDULE - {"epochs"})


def can_fork(existing: Profile | None, profile: Profile, step: int) -> bool:
    """Whether a run of this profile can start from that checkpoint of the existing run."""
    steps = profile.train.steps  # unknown if it trains for epochs of data that has not been counted
    if existing is None or existing.model != profile.model or (steps is not None and steps <= step):
        return False
    return all(getattr(existing.train, name) == getattr(profile.train, name) for name in POSITION)


def _different_train(one: Train, other: Train, names: Iterable[str]) -> list[str]:
    """The keys of the train section, among these, whose effective values differ."""
    return _different_values("train", train_values(one), train_values(other), names)


def _different_values(
    section: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    """`key is value there, value here` for each of the names that differs."""
    return [
        f"{section}.{name} is {format_value(theirs.get(name))} there, {format_value(ours.get(name))} here"
        for name in sorted(names)
        if ours.get(name) != theirs.get(name)
    ]


def record_flow_run(folder: Path, flow_run: str) -> None:
    """Record that a flow run uses this folder, so that its cancellation finds the jobs."""
    FolderBackend(folder).write(run_files.FLOW_RUN, flow_run.encode())


def folders_of_flow_run(store: Store, name: str, flow_run: str) -> list[Path]:
    """Folders of a run, and of the rounds of its series, that a flow run used last; the latest first."""
    folder = store.run_folder(name).path
    used = _used_by(flow_run, [folder, *folders.matches(folder.parent, f"{name}-round-*")])
    return sorted(used, key=lambda each: (each / run_files.FLOW_RUN).stat().st_mtime_ns, reverse=True)


def scratch_folders_of_flow_run(store: Store, flow_run: str) -> list[Path]:
    """Scratch folders of the store that a flow run uses or used last."""
    return _used_by(flow_run, folders.matches(store.work_dir / "work", "*"))


def _used_by(flow_run: str, parents: Iterable[Path]) -> list[Path]:
    """Those of the folders whose record names this flow run; a link to itself in one's place has none."""
    records = ((folder, folder / run_files.FLOW_RUN) for folder in parents)
    return [
        folder
        for folder, record in records
        if state_files.is_file(record) and state_files.read_text(record) == flow_run
    ]


def _require_no_active_job(profile: Profile, existing: Profile | None, folder: Path) -> None:
    """Raise ProfileError if the existing run in this folder has an active job."""
    for job, where in _active_jobs(existing or profile, folder):
        reason = (
            f"a run of this name has other settings (model, data or training), and its {job} job is still active "
            f"as {where}; end it first, or choose another name"
        )
        raise ProfileError("name", profile.name, reason, [f"{profile.name}-2"])


def _warn_of_active_job(existing: Profile, profile: Profile, folder: Path) -> None:
    """Name the settings that an active job of the run, to which the flow re-attaches, does not apply."""
    if existing.cluster.launcher != profile.cluster.launcher:
        return  # the other launcher's system may not exist here
    there, here = (each.model_dump(mode="json", exclude={"cluster"}) for each in (existing, profile))
    sections = [name for name in here if isinstance(here[name], dict)]
    changed = [
        difference
        for name in sections
        for difference in _different_values(name, there[name], here[name], here[name])
    ]
    if not changed:
        return
    message = "the %s job is active as %s and keeps its settings: %s; end it to apply them"
    try:
        for job, where in _active_jobs(existing, folder):
            log.warning(message, job, where, "; ".join(changed))
    except Exception as error:  # of any launcher; the job is found again before another is submitted
        log.debug("cannot list the active jobs: %r", error)


def _active_jobs(profile: Profile, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and place of each active job of the run in this folder."""
    launcher = create(profile.cluster)
    for handle in latest_jobs(folder / run_files.LOGS):
        if where := launcher.location(handle):
            yield handle.job.name, where


def recorded_compilation(store: Store, profile: Profile) -> Profile:
    """The profile, with `compile.enabled` as decided when the run began if it is `auto` now."""
    sections = store.run_folder(profile.name).sections() if profile.compile.enabled == AUTO else {}
    section = sections.get("compile")
    enabled = section.get("enabled") if isinstance(section, dict) else None
    # Compiled and eager steps round differently, so that a resumed run would not repeat its losses.
    return with_value(profile, "compile.enabled", enabled) if isinstance(enabled, bool) else profile


def fetch(store: Store, name: str) -> Path:
    """Folder of an existing run, downloaded if not local.

    Raises ProfileError if the store lacks a part, or the profile cannot be read.
    """
    run = existing_run(store, "run", name)
    identity = run.stored_identity
    if identity is None:
        raise unknown_run(store, "run", name)
    folder = run.prepare(identity)
    needed = (run_files.PROFILE, run_files.INPUTS)
    if missing := next((file for file in needed if not state_files.exists(folder / file)), None):
        reason = f"{missing} is neither in {folder} nor in {store.uri}; set the work_dir in which the run was started"
        raise ProfileError("work_dir", str(store.work_dir), reason)
    load_profile(folder)  # its own errors name no file
    return folder


def load_profile(folder: Path) -> Profile:
    """The profile of an existing run. Raises ProfileError, which names the file, if it is damaged."""
    path = folder / run_files.PROFILE
    try:
        return resolve.load(str(path))
    except ProfileError as error:
        if error.value == str(path):
            raise
        reason = f"cannot be read; restore or correct it: {error}"
        raise ProfileError("profile", str(path), reason) from error


def require_artifact(store: Store, run: str, id: ArtifactId) -> Artifact:
    """An artifact that an existing run used. Raises ProfileError if it is missing or corrupted."""
    if (found := store.artifacts.find(id, hash_limit=0)) is None:
        reason = f"its {id} is missing or corrupted in {store.uri}; start the run again, which makes it again"
        raise ProfileError("run", run, reason)
    return found


def existing_run(store: Store, key: str, name: str) -> RunFolder:
    """The folder of a run that a user names. Raises ProfileError if no run can have that name."""
    try:
        return store.run_folder(name)
    except ValueError as error:  # a path, for example
        raise unknown_run(store, key, name) from error


def files_by_run(store: Store) -> dict[str, dict[str, int]]:
    """Files of each run of the store, with their sizes; without files of other programs."""
    runs: dict[str, dict[str, int]] = defaultdict(dict)
    for path, size in store.backend.files("runs").items():
        name, separator, file = path.partition("/")
        if separator:
            runs[name][file] = size
    return {name: files for name, files in runs.items() if NAME.fullmatch(REPLACED.sub("", name))}


def find_folder(store: Store, name: str, identity: str) -> RunFolder | None:
    """The folder of a run by its identity: that of its name, or that of a replaced run, `<name>~N`.

    Raises CorruptedState or PermissionError for a folder that may be it, if no other one is.
    """
    unreadable = None

    def candidates() -> Iterator[str]:
        yield name
        names = sorted(store.backend.entries("runs"))
        yield from (each for each in names if REPLACED.sub("", each) == name != each)

    for each in candidates():
        try:
            if (run := store.run_folder(each)).stored_identity == identity:
                return run
        except (state_files.CorruptedState, PermissionError) as error:
            unreadable = unreadable or error
    if unreadable:
        raise unreadable
    return None


def unknown_run(store: Store, key: str, name: str) -> ProfileError:
    """The error for a run that the store does not have, with the nearest names that it has."""
    names = [entry for entry in store.backend.entries("runs") if not entry.startswith(".")]
    return no_such_run(key, name, store.location, names, store.uri)


def unknown_local_run(name: str, runs: Path) -> ProfileError:
    """As `unknown_run`, for a folder of run folders on this machine."""
    known = names_in(runs, f"*/{run_files.PROFILE}")
    return no_such_run("run", name, runs.absolute(), known, str(runs.parent) if runs.name == "runs" else None)


def no_such_run(
    key: str, name: str, where: str | Path, known: Iterable[str], store: str | None
) -> ProfileError:
    """The error for a run that is not there; `trainshed runs` lists those that are in a store."""
    reason = f"no such run in {where}"
    if store is not None:
        is_default = Path(store).absolute() == Path("store").absolute()
        option = "" if is_default else f" --store {shlex.quote(store)}"
        reason += f"; `trainshed runs{option}` lists them"
    return ProfileError(key, name, reason, closest(name, known, 3))


def read_inputs(folder: Path) -> dict[str, str | None]:
    """A run's `identity`, and the keys of its `tokenizer`, `dataset` and `checkpoint`.

    The last one is None from scratch; in a continual round, it is a digest of the promoted model's checkpoint.

    Raises:
        FileNotFoundError: nothing is recorded.
        CorruptedState: the file is corrupted.
    """
    path = folder / run_files.INPUTS
    if (data := state_files.read(path)) is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    advice = "start the run again, which rewrites it"
    return state_files.require_json(data, path, INPUT_KEYS, ["identity"], advice)


def last_training_row(folder: Path) -> dict[str, Any] | None:
    """Row of the last training step in a run's metrics.jsonl, read from its end; None if there is none."""
    return last_row(folder / run_files.METRICS, "loss")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run's events.jsonl (failures and anomalies); empty if there is no such file."""
    return list(LogFollower(folder / run_files.EVENTS).rows(is_event))
