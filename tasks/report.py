"""Report step: `report.html`, one self-contained file, and `report.json`, the same facts to parse.

They hold the outcome of each step, the curves, planned against measured values, graphs, data, incidents, evaluation, generated
samples, and how to load the exported model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from modeling.planning.planner import Plan
from modeling.tracing import traced_plan
from profiles import resolve
from profiles.files import run_files, state_files
from profiles.schema import Profile
from tasks.evaluation import results
from tasks.experiments import forecasts
from tasks.inputs import EXPORT
from tasks.reporting import advice, run_report
from tasks.reporting.history import History
from tasks.reporting.outcome import Outcome
from tasks.step import Context, Step
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.backends.folder import FolderBackend
from tasks.store.runs import INPUT_KEYS, read_events
from tasks.store.store import Store

log = logging.getLogger(__name__)

INITIAL = {"validation_loss": int | float, "perplexity": int | float | None, "metrics": dict}


@dataclass
class ReportStep(Step):
    """Writes the run's report, and uploads the run folder, which is then complete, to a remote store."""

    plan: Plan
    evaluation: Artifact
    outcomes: Sequence[Outcome]
    gates: Sequence[Sequence[str]] = ()  # of a round of continual pretraining: a table, its headings first

    kind = "report"
    name = "report"

    def title(self, profile: Profile) -> str:
        return f"report on {profile.name}"

    def key(self, context: Context) -> None:
        """Runs every time."""

    def make(self, context: Context, key: str) -> Artifact:
        folder, store = context.run_folder, context.store
        plan, evaluation = self.plan.to_json(), self.evaluation.summary
        ended = [outcome for outcome in self.outcomes if outcome.how != "running"]  # all but this step
        path = write_report(context.profile, folder, plan, evaluation, ended, self.gates)
        store.run_folder(folder.name).sync().upload()
        return Artifact(self.id(key), str(path))


def write_report(
    profile: Profile,
    folder: Path,
    plan: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    gates: Sequence[Sequence[str]] = (),
) -> Path:
    """Write report.json and report.html to the run folder, each atomically; returns report.html's path."""
    history, tokenizer = History.read(folder), _tokenizer_file(folder)
    before = read_initial_evaluation(folder) or {}
    facts = {
        "run": profile.name,
        "description": profile.description,
        "parent": (state_files.read_json(folder / run_files.IDENTITY) or {}).get("parent"),  # of a fork
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": _versions(),
        "plan": dict(plan),
        "traced": _traced(profile, outcomes),
        "measured": history.measurements(profile),
        "evaluation": {key: value for key, value in evaluation.items() if key != "samples"},
        "before": {key: value for key, value in before.items() if key != "samples"},
        "samples": _decode_samples(tokenizer, evaluation.get("samples", [])),
        "samples_before": _decode_samples(tokenizer, before.get("samples", [])),
        "steps": [asdict(outcome) for outcome in outcomes],
        "events": read_events(folder),
        "experts": _experts(folder, history),
        "gates": [list(line) for line in gates],
        "forecast": _forecast(profile, folder, evaluation),
        "evaluations": _evaluations(folder),
        "warnings": _warnings(profile, outcomes, history),
        "export": str(folder / EXPORT) if state_files.exists(folder / EXPORT) else None,
    }
    return _write(profile, folder, facts, history)


def read_initial_evaluation(folder: Path) -> dict[str, Any] | None:
    """The evaluation of the weights that a fine-tuning run started from.

    None for other runs, and None with a warning if it is corrupted.
    """
    return state_files.read_json(folder / run_files.INITIAL_EVALUATION, INITIAL, INITIAL)


def update_evaluations(folder: Path) -> Path | None:
    """Rewrite a run's report with the checkpoint evaluations made since; None if it has no report yet."""
    facts = state_files.read_json(folder / run_files.REPORT_JSON)
    if facts is None:
        return None
    facts["evaluations"] = _evaluations(folder)
    try:
        profile = resolve.load(str(folder / run_files.PROFILE))
        facts["forecast"] = _forecast(profile, folder, facts["evaluation"])
        return _write(profile, folder, facts, History.read(folder))
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # also of an earlier version
        reason = f"corrupted, or of another version ({type(error).__name__}: {error})"
        log.warning("%s: %s; run %s again to rewrite it", folder / run_files.REPORT_JSON, reason, folder.name)
        return None


def _write(profile: Profile, folder: Path, facts: Mapping[str, Any], history: History) -> Path:
    settings = state_files.contents(folder / run_files.PROFILE).decode()
    page = run_report.render(profile, facts, history, settings)
    for name, text in {run_files.REPORT_JSON: json.dumps(facts, indent=1), run_files.REPORT: page}.items():
        FolderBackend(folder).write(name, text.encode())
    return folder / run_files.REPORT


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    """Metrics of each checkpoint that was evaluated separately from training, in order of steps."""
    return [{"step": step, **metrics} for step, metrics in results.read(folder).items()]


def _warnings(profile: Profile, outcomes: Sequence[Outcome], history: History) -> list[str]:
    summaries = {outcome.step: outcome.summary for outcome in outcomes}
    found = []
    if {"tokenizer", "dataset"} <= summaries.keys():
        found += advice.data_warnings(profile, summaries["tokenizer"], summaries["dataset"])
    rise = advice.rise_warning(history.lowest_evaluation, history.last_evaluation)
    return [*found, *([rise] if rise else [])]


def _traced(profile: Profile, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Memory and FLOPs of each pipeline rank from its traced graphs; empty if nothing was traced."""
    summary = next((outcome.summary for outcome in outcomes if outcome.step == "graphs"), {})
    if "traced" not in summary:
        return []
    return [asdict(rank) for rank in traced_plan.traced_ranks(profile, summary["traced"])]


def _experts(folder: Path, history: History) -> dict[str, Any] | None:
    """Last expert metrics, and each expert's load by layer at one step; None for a model without experts."""
    row = history.last or {}
    if "expert_load_max" not in row:
        return None
    names = ("balance_loss", "router_z_loss", "expert_load_max", "dropped_choices")
    types = {"step": int, "loads": list}
    loads = state_files.read_json(folder / run_files.EXPERT_LOADS, types, types) or {
        "step": None,
        "loads": [],
    }
    return {**{name: row.get(name) for name in names}, **loads}


def _forecast(profile: Profile, folder: Path, evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """The run's held-out loss compared with the earlier forecast for its length; None without one."""
    file = folder / run_files.FORECAST
    text = state_files.read_text(file)
    forecast = forecasts.parse(text, file) if text else None
    if forecast is None:
        return None
    metrics = forecasts.metrics_of(folder, evaluation["metrics"], evaluation["step"])
    tokens = evaluation["step"] * profile.step_tokens
    return forecasts.outcome(forecast, tokens, evaluation["validation_loss"], metrics)


def _versions() -> dict[str, str]:
    """Versions of Trainshed (with its commit, in a checkout), torch, Prefect, Python, and the system."""
    return {
        "Trainshed": version("trainshed") + _commit(),
        "torch": version("torch"),
        "Prefect": version("prefect"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _commit() -> str:
    checkout = Path(__file__).parents[1]
    if not state_files.exists(checkout / ".git"):
        return ""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f", commit {result.stdout.strip()}" if result.returncode == 0 else ""


def _tokenizer_file(folder: Path) -> Path | None:
    """tokenizer.json of the run: from its export, else from the tokenizer's artifact in the store."""
    folders = [folder / EXPORT]
    if key := (state_files.read_json(folder / run_files.INPUTS, INPUT_KEYS) or {}).get("tokenizer"):
        artifacts = Store(str(folder.parents[1])).artifacts
        with contextlib.suppress(FileNotFoundError):
            folders.append(artifacts.path(Artifact(ArtifactId("tokenizer", key))))
    files = (folder / "tokenizer.json" for folder in folders)
    return next(filter(state_files.exists, files), None)


def _decode_samples(file: Path | None, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Prompts and continuations up to EOS as text; empty without a tokenizer."""
    if not samples or file is None:
        return []
    from tasks.tokenization.tokenizer_files import load, special_token_id

    tokenizer = load(file.parent)
    named = state_files.exists(file.with_name("tokenizer_config.json"))
    eos = special_token_id(file.parent, tokenizer, "eos_token") if named else None
    decoded = []
    for sample in samples:
        prompt = tokenizer.decode(sample["prompt"], skip_special_tokens=False)
        new = [*takewhile(lambda token: token != eos, sample["text"])]
        # Decoded together: a token's text may depend on the one before it.
        text = tokenizer.decode([*sample["prompt"], *new], skip_special_tokens=False)
        decoded.append({"prompt": prompt, "text": text.removeprefix(prompt)})
    return decoded
