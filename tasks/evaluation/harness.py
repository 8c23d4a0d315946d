"""Command that runs language-model tasks on a Hugging Face model by lm-evaluation-harness.

Usage: `python -m tasks.evaluation.harness --model FOLDER --task NAME --output FILE`. Runs as a separate job, to keep its imports
and memory out of the flow's process. Writes one JSON file atomically: {results, versions, harness}, metrics and version of each
task and the version of lm-eval; or {rejected}, the reason why it cannot run. Needs the extra `lm-eval`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from profiles import state_files

PACKAGE = "lm_eval"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tasks.evaluation.harness")
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--task", action="append", required=True, help="name of a task or group; repeatable")
    parser.add_argument("--include", help="folder with task files, beside those of lm-eval")
    parser.add_argument("--limit", type=int, help="maximum number of examples per task")
    parser.add_argument("--batch-size", default="8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    state_files.write(options.output, json.dumps(evaluate(options), indent=1))
    return 0


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Run the tasks; returns the contents of the output file."""
    import httpx
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=options.include)
    known = set(manager.all_tasks)
    for name in options.task:
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), 3)
            hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
            return {"rejected": f"lm-eval {version(PACKAGE)} has no task {name}{hint}"}
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
    except (OSError, httpx.TransportError) as error:  # after the retries of the hub's own client
        reason = f"the data of {', '.join(options.task)} cannot be read ({type(error).__name__}: {error})"
        advice = "without a network, use tasks whose data is in local files, or fill HF_HOME beforehand"
        return {"rejected": f"{reason}; {advice}"}
    results = {task: metrics_of(values) for task, values in found["results"].items()}
    return {"results": results, "versions": found["versions"], "harness": version(PACKAGE)}


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
