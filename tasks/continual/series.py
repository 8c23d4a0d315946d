"""The promoted model of a continual series, and promotion of its successor.

A series is named after the run that started it. `runs/<name>/standing.json` in the store names the model that was promoted last
and the datasets whose held-out text all models are evaluated on. It is written atomically and last, so a failed round changes
nothing. The data ledger (store/ledger.py) records what that model and its ancestors were trained on.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace

from profiles.errors import ProfileError
from profiles.files import run_files, yaml_text
from profiles.schema import Profile
from tasks.continual import ancestors
from tasks.continual.ancestors import Ancestors
from tasks.continual.held_out import FIRST, HeldOut, by_hash_of_run
from tasks.continual.schedule import constant_rate_steps
from tasks.inputs import EXPORT
from tasks.steps.checkpoint import CheckpointStep
from tasks.steps.dataset import DatasetStep, read_file
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Promoted:
    """Promoted model of a series, with the tokenizer and dataset of the series' first run.

    Attributes:
        held_out: key of the dataset whose validation split has the sets that it and its ancestors held out; "": that of the first
            run has them.
        latest: number of the latest round that was promoted, if an earlier one was promoted again.
    """

    run: str
    identity: str
    round: int
    tokenizer: str
    dataset: str
    held_out: str = ""
    latest: int = 0

    @property
    def latest_round(self) -> int:
        return max(self.round, self.latest)

    @property
    def next_round(self) -> int:
        return self.latest_round + 1


def promoted_model(store: Store, name: str) -> Promoted | None:
    """The promoted model of a series; None until its first run has been trained and exported.

    Reads the store only: commands that show a series make no local copy of its runs.
    """
    try:
        run = store.run_folder(name)
    except ValueError:  # a path, for example: no run can have that name
        return None
    # If it is corrupted, this raises: ignoring it would restart the series from round 0.
    if (recorded := run.require_json(run_files.PROMOTED)) is not None:
        return Promoted(**recorded)
    inputs = run.require_json(run_files.INPUTS)
    if inputs is None or not run.files(EXPORT) or ledger.find(store, inputs["identity"]) is None:
        return None
    try:
        steps = yaml_text.parse_sections(run.read(run_files.PROFILE) or b"", ["train"])["train"]["steps"]
    except (ValueError, LookupError, TypeError) as error:
        location = store.backend.location(f"runs/{name}/{run_files.PROFILE}")
        raise ProfileError("profile", location, f"cannot be read; restore or correct it: {error}") from error
    if steps not in run.checkpoint_steps():
        return None  # exported before training finished
    return Promoted(name, inputs["identity"], 0, inputs["tokenizer"], inputs["dataset"])


def record_not_promoted(store: Store, name: str, alert: str = "") -> None:
    """Record that a round's model was evaluated and not promoted, and the digest of its alert."""
    store.run_folder(name).write(run_files.NOT_PROMOTED, json.dumps({"alert": alert}).encode())


def last_alert(store: Store, name: str) -> str:
    """Digest of the alert that was sent about a round that was not promoted; empty without one."""
    return str(store.run_folder(name).read_json(run_files.NOT_PROMOTED).get("alert", ""))


def was_not_promoted(store: Store, name: str) -> bool:
    """Whether a round's model was evaluated and not promoted."""
    return store.run_folder(name).read(run_files.NOT_PROMOTED) is not None


def recorded_inputs(store: Store, name: str) -> dict[str, str] | None:
    """What a round trains on and starts from (runs.read_inputs); None before it has begun to train."""
    return store.run_folder(name).require_json(run_files.INPUTS)


def latest_step(store: Store, promoted: Promoted) -> int:
    """Step of the promoted model's latest checkpoint. Raises ProfileError if it has none."""
    run = store.run_folder(promoted.run)
    if steps := run.checkpoint_steps():
        return steps[-1]
    reason = f"the promoted model has no checkpoint in {run.location(run_files.CHECKPOINTS)}, from which a round starts"
    raise ProfileError("name", promoted.run, f"{reason}; restore it there")


def start_step(store: Store, promoted: Promoted, *, trunk: bool) -> int:
    """Step of the checkpoint that a round starts from: the latest, or a trunk's before the decay.

    Raises ProfileError if there is none.
    """
    latest = latest_step(store, promoted)
    if not trunk:
        return latest
    train = runs.load_profile(runs.fetch(store, promoted.run)).train
    if found := constant_rate_steps(train, store.run_folder(promoted.run).checkpoint_steps()):
        return found[-1]
    reason = f"needs a checkpoint of {promoted.run} from before its learning rate decays, and it has none; train the first run"
    reason += " with train.schedule=constant, or with train.constant_steps and checkpoint.keep_every"
    raise ProfileError("continual.schedule", "trunk", reason, ["rewarm"])


def frozen_weights(store: Store, profile: Profile) -> Artifact | None:
    """The initial weights of a series with LoRA, which every round updates; None without LoRA.

    Raises ProfileError if they are not in the store any more.
    """
    if not profile.lora.rank:
        return None
    inputs = recorded_inputs(store, profile.name)
    if inputs is None or not inputs["checkpoint"]:
        raise ProfileError(
            "lora.rank", profile.lora.rank, f"the initial weights of {profile.name} are unknown"
        )
    return runs.require_artifact(store, profile.name, CheckpointStep.id(inputs["checkpoint"]))


def ancestors_of(store: Store, promoted: Promoted) -> Ancestors:
    """The runs that the promoted model descends from."""
    return ancestors.find(store, promoted.identity, promoted.dataset)


def held_out_sets(store: Store, name: str, promoted: Promoted) -> HeldOut:
    """The sets that the promoted model and its ancestors held out; the store may lack their shards.

    Raises ProfileError if the list of them is not in the store any more.
    """
    key = promoted.held_out or promoted.dataset
    try:
        contents = read_file(store, Artifact(DatasetStep.id(key)))
    except FileNotFoundError as error:
        reason = f"the dataset {key}, which lists what the series holds out, is not in the store any more"
        raise ProfileError("name", name, f"{reason}; restore artifacts/dataset from a backup") from error
    if promoted.held_out:
        own = HeldOut.of(contents)
    else:
        own = HeldOut.from_sources(FIRST, contents, by_hash_of_run(store, name))
    return own + ancestors_of(store, promoted).held_out(own)


def promote(
    store: Store, name: str, promoted: Promoted, run: str, identity: str, dataset: Artifact
) -> Promoted:
    """Make the model of a round, trained on a dataset, the promoted one of its series."""
    after = replace(
        promoted, run=run, identity=identity, round=promoted.next_round, held_out=dataset.key, latest=0
    )
    set_promoted(store, name, after)
    return after


def set_promoted(store: Store, name: str, promoted: Promoted) -> None:
    """Record the promoted model of a series, atomically."""
    contents = json.dumps(asdict(promoted), indent=1).encode()
    store.backend.write(f"runs/{name}/{run_files.PROMOTED}", contents)
