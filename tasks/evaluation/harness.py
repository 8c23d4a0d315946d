"""Command that runs language-model tasks on a Hugging Face model by lm-evaluation-harness.

Usage: `python -m tasks.evaluation.harness --model FOLDER --task NAME --output FILE`. Runs as a separate job, to keep its imports
and memory out of the flow's process. Writes one JSON file atomically: {results, versions, harness}, metrics and version of each
task and the version of lm-eval; or the reason why it cannot run, {unavailable} if that may be temporary, else {rejected}. Without
`--model`, it only checks the tasks' names and writes {unknown}: null, or [name, reason, nearest names]. Needs the extra lm-eval.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.arguments import Parser
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.files.retries import seconds_to_wait

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGE = "lm_eval"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="tasks.evaluation.harness")
    parser.add_argument("--model", help="folder of a Hugging Face model; without it, only check the names")
    parser.add_argument("--task", action="append", required=True, help="name of a task or group; repeatable")
    parser.add_argument("--include", help="folder with task files, in addition to those of lm-eval")
    parser.add_argument("--limit", type=int, help="maximum number of examples per task")
    parser.add_argument("--batch-size", default="8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=options.include)
    unknown = unknown_task(options.task, manager.all_tasks)
    result: dict[str, Any]
    if options.model is None:
        result = {"unknown": unknown}
    elif unknown:
        result = {"rejected": str(ProfileError("task", *unknown))}
    else:
        result = evaluate(options, manager)
    state_files.write(options.output, json.dumps(result, indent=1))
    return 0


def unknown_task(names: list[str], known: list[str]) -> tuple[str, str, list[str]] | None:
    """The first name of a task that lm-eval does not have, the reason and the nearest names."""
    for name in (name for name in names if name not in known):
        nearest = difflib.get_close_matches(name, known)
        return name, f"lm-eval {version(PACKAGE)} has no such task", nearest
    return None


def evaluate(options: argparse.Namespace, manager: TaskManager) -> dict[str, Any]:
    """Run the tasks; returns the contents of the output file."""
    from lm_eval import simple_evaluate

    try:
        found = simple_evaluate(
            model="hf",
            model_args={"pretrained": options.model, "trust_remote_code": False},
            tasks=options.task,
            task_manager=manager,
            limit=options.limit,
            batch_size=options.batch_size,
            device=options.device,
            log_samples=False,
        )
    except Exception as error:  # after the retries of the hub's own client
        # By name: httpx, or whatever the hub client uses instead.
        names = {kind.__name__ for kind in type(error).__mro__}
        if not names & {"OSError", "TransportError"}:
            raise
        reason = f"the data of {', '.join(options.task)} cannot be read ({type(error).__name__}: {error})"
        advice = "without a network, use tasks whose data is in local files, or fill HF_HOME beforehand"
        return {"unavailable" if is_temporary(error) else "rejected": f"{reason}; {advice}"}
    results = {task: metrics_of(values) for task, values in found["results"].items()}
    return {"results": results, "versions": found["versions"], "harness": version(PACKAGE)}


def is_temporary(error: BaseException | None) -> bool:
    """Whether reading the data again may succeed, judging by the error and those that it follows from."""
    from huggingface_hub import is_offline_mode

    offline = is_offline_mode()  # `datasets` reports it as the same ConnectionError as an outage of the hub
    while error is not None:
        if seconds_to_wait(error) is not None and not (offline and isinstance(error, ConnectionError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Numeric task metrics: `acc,none` -> `acc`, `exact_match,strict` -> `exact_match/strict`."""
    found = {}
    for key, value in values.items():
        if isinstance(value, int | float) and "," in key:
            name, _, filtered = key.partition(",")
            found[name if filtered == "none" else f"{name}/{filtered}"] = float(value)
    return found


if __name__ == "__main__":
    sys.exit(main())
