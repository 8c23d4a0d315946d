"""Names of the files of a run folder, `runs/<run>/` in the store.

Training and the flow write them, everything else reads them. docs/caching.md has a table of their contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IDENTITY = "run.json"  # identity of the run, its id, and its parent if it was forked
LOCKFILE = "lock.json"  # what the profile's references resolve to
INPUTS = "inputs.json"  # identity, and the keys of tokenizer, dataset and initial weights
ARTIFACTS = "artifacts.json"  # keys of the artifacts that the run's steps used, by kind
PROFILE = "profile.yaml"  # the resolved profile
PLAN = "plan.json"
FORECAST = "forecast.json"  # of the loss, if the run is the target of a ladder
CHECKPOINTS = "checkpoints"  # folder of step_<n> folders
METRICS = "metrics.jsonl"  # a row for each step
EVALUATIONS = "evaluations.jsonl"  # results of evaluated checkpoints
INITIAL_EVALUATION = "before.json"  # evaluation of the weights that fine-tuning starts from
EXPERT_LOADS = "expert_loads.json"  # tokens that chose each expert in one step, by layer
EVENTS = "events.jsonl"  # failures and anomalies
ATTEMPTS = "attempts.jsonl"  # starts and ends of jobs
ATTEMPT = "attempt"  # number of the current training attempt, the only one that may complete checkpoints
RESUMED = "resumed.json"  # the request to resume that training applied
FLOW_RUN = "flow-run"  # id of the flow run that uses the folder, or used it last
GRAPHS = "graphs"  # the graph cache, unpacked
LOGS = "logs"  # log, handle and stacks of each job
TENSORBOARD = "tensorboard"
EXPORT = "export"  # the Hugging Face model
REPORT = "report.html"
REPORT_JSON = "report.json"
ALERTS = "alerts.json"  # the alerts that were emitted
TRACKERS = "trackers"  # folder of what each tracker was sent
STAND_IN = "stand_in.json"  # of a continual series: what its stand-in sources resolve to
PROMOTED = (
    "standing.json"  # of a continual series: the latest promoted model; the name is that of the first version
)
NOT_PROMOTED = "rejected.json"  # of a continual round
ROUND = "round.json"  # of a continual round: its losses before and after, and whether it was promoted


def checkpoint(step: int) -> str:
    """The folder of a checkpoint (parallel/checkpoint/locations.py), relative to the run folder."""
    return f"{CHECKPOINTS}/step_{step}"


def owner(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's marker records as `run`, from the contents of IDENTITY; empty if unknown."""
    return {key: record[key] for key in ("identity", "id") if key in record}


def is_other_run(owner: Any, record: Mapping[str, Any]) -> bool:
    """Whether an `owner` is another run than that of the contents of IDENTITY.

    Earlier versions recorded no `id`, and no `run` in markers: what is unknown may be the same.
    """
    known = owner.keys() & record.keys() & {"identity", "id"} if isinstance(owner, dict) else ()
    return any(owner[key] != record[key] for key in known)
