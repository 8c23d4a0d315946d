"""Run folders: which checkpoints in them are whole, and artifacts that point into them.

A run folder is mutable, an artifact is not. Training and export leave their files in the run folder and publish an
artifact that holds a manifest of them, so that they are verified like any other before they are trusted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.launchers import create, latest_jobs
from tasks.launchers.log_follower import LogFollower
from tasks.store.backends import Folder
from tasks.store.manifest import Damaged, Manifest
from tasks.store.store import VERIFIED, Artifact, Store, identity_of

log = logging.getLogger(__name__)

MARKER = "complete.json"
POINTER = "points-to.json"
INPUTS = "inputs.json"
ATTEMPT = "attempt"  # file with the number of the start that may complete checkpoints
FLOW_RUN = "flow-run"  # file with the id of the flow run that works in the folder, or did last


@contextmanager
def opened(store: Store, profile: Profile, identity: str, flow_run: str) -> Iterator[Path]:
    """The run's folder with its profile, in which no other flow run works for the block: who comes later waits.

    Raises:
        ProfileError: the folder is of another run of that name, of which a job lives on: two must not write into one folder.
    """
    with store.lock("run", profile.name):
        _refuse_to_take_from_the_living(store, profile, identity)
        folder = store.run(profile.name, identity)
        Folder(folder).write("profile.yaml", resolve.dump(profile).encode())
        note_flow_run(folder, flow_run)
        yield folder


def note_flow_run(folder: Path, flow_run: str) -> None:
    """Say that a flow run works in this folder, so that who cancels it finds its jobs."""
    Folder(folder).write(FLOW_RUN, flow_run.encode())


def worked_in(store: Store, name: str, flow_run: str) -> list[Path]:
    """Folders of a run, and of rounds of its series, in which a flow run was the last to work; the one it came to last first."""
    own = store.run_directory(name)
    notes = [own / FLOW_RUN, *own.parent.glob(f"{name}-round-*/{FLOW_RUN}")]
    found = [note for note in notes if note.exists() and note.read_text() == flow_run]
    return [note.parent for note in sorted(found, key=lambda note: note.stat().st_mtime_ns, reverse=True)]


def _refuse_to_take_from_the_living(store: Store, profile: Profile, identity: str) -> None:
    folder = store.run_directory(profile.name)
    if identity_of(folder) in (None, identity):
        return
    try:
        cluster = resolve.load(str(folder / "profile.yaml")).cluster
    except ProfileError:  # of another version, or damaged
        cluster = profile.cluster
    launcher = create(cluster.launcher, cluster)
    for handle in latest_jobs(folder / "logs"):
        if where := launcher.location(handle):
            reason = (
                f"the run of this name is another one (model, data or training), and its {handle.job.name} still runs as "
                f"{where}; end that first, or give this one another name"
            )
            raise ProfileError("name", profile.name, reason, [f"{profile.name}-2"])


def checkpoints(store: Store, folder: Path) -> list[int]:
    """Steps of the complete checkpoints of the run in this folder, oldest first."""
    files = store.run_files(folder.name, "checkpoints")
    marked = (PurePosixPath(file).parent.name for file in files if PurePosixPath(file).name == MARKER)
    return sorted(int(name.removeprefix("step_")) for name in marked)


def existing(store: Store, name: str) -> Path:
    """The folder of a run that there is, brought from its mirror in the store where this machine has none.

    Raises:
        ProfileError: the store has no such run, or not yet what others need to know of it.
    """
    folder = store.run_directory(name)
    note = store.storage.read(f"runs/{folder.name}/run.json")
    if note is None:
        raise ProfileError("run", name, f"there is no such run in {store.uri}")
    store.run(name, json.loads(note)["identity"])
    missing = [file for file in ("profile.yaml", INPUTS) if not (folder / file).exists()]
    if missing:
        reason = f"{missing[0]} is neither in {folder} nor in the mirror of {store.uri}: name the folder that its runs lie in"
        raise ProfileError("work_dir", str(store.work_dir), reason)
    return folder


def note_inputs(folder: Path, identity: str, tokenizer: Artifact, dataset: Artifact) -> None:
    """Keep with a run what it was made from, for those who go on from it."""
    inputs = {"identity": identity, "tokenizer": tokenizer.key, "dataset": dataset.key}
    Folder(folder).write(INPUTS, json.dumps(inputs, indent=1).encode())


def inputs(folder: Path) -> dict[str, str]:
    """Identity of a run, and keys of its tokenizer and its dataset. Raises FileNotFoundError where there is no such run."""
    return json.loads((folder / INPUTS).read_text())


def publish(
    store: Store, kind: str, key: str, folder: Path, part: str, summary: Mapping[str, Any]
) -> Artifact:
    """An artifact that points to one part of a run folder, for instance `export`; of a remote one the sizes are noted."""
    if lies_remote(store, part):
        manifest = Manifest.listed(store.run_files(folder.name, part), kind, key)
    else:
        manifest = Manifest.of(folder / part, kind, key, {}, ())
    with store.publish(kind, key, {**summary, "part": part}) as staging:
        (staging / POINTER).write_bytes(manifest.to_bytes())
    return store.expect(kind, key)


def find(store: Store, kind: str, key: str, folder: Path) -> Artifact | None:
    """The artifact, if what it points to is there and whole; else it is removed, which one line says."""
    artifact = store.find(kind, key)
    if artifact is None:
        return None
    target = folder / artifact.summary["part"]
    try:
        manifest = Manifest.from_bytes((store.path(artifact) / POINTER).read_bytes(), kind, key)
        if lies_remote(store, artifact.summary["part"]):
            manifest.verify_sizes(store.run_files(folder.name, artifact.summary["part"]))
        else:
            manifest.verify_sizes(Folder(target).files(""))
            manifest.verify_contents(target, VERIFIED)
    except Damaged as damage:
        log.warning("%s: %s of %s; it will be made again", kind, damage, target)
        # A damaged checkpoint is none to resume from.
        store.remove_run_file(folder.name, f"{artifact.summary['part']}/{MARKER}")
        store.remove(kind, key)
        return None
    return artifact


def lies_remote(store: Store, part: str) -> bool:
    """Whether a part of a run is in the remote store alone."""
    return store.is_remote() and part.startswith("checkpoints/")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; none where there is no such file."""
    return LogFollower(folder / "metrics.jsonl").rows()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """What went wrong on the way: the rows of a run's events.jsonl; none where there is no such file."""
    return LogFollower(folder / "events.jsonl").rows()
