"""The report of a run: `report.html`, one file that needs no network, and `report.json`, the same facts for programs.

What ran, what became of each step, the curves, plan against measurement, graphs, data, incidents, evaluation, samples of
what the model writes, and how to load it.
"""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from modeling.planning import planner
from modeling.tracing import traced_plan
from profiles.schema import Profile
from tasks.reporting import html as page
from tasks.reporting.chart import Series, line_chart
from tasks.reporting.format import duration, in_bytes, in_flops, in_words, number
from tasks.reporting.history import History
from tasks.reporting.outcome import Outcome
from tasks.store.artifacts import Artifact
from tasks.store.runs import INPUTS, read_events, read_inputs
from tasks.store.store import Store

FACTS = "report.json"
PART = "export"  # of the run's folder
LEFT_OUT = {"missing": "without text", "short": "too short", "duplicates": "duplicates"}  # of documents
PARTS = {  # of a step's time, by their keys in the metrics
    "data_wait_seconds": "waiting for data",
    "forward_backward_seconds": "forward and backward",
    "optimizer_seconds": "optimizer",
    "communication_seconds": "of these, waiting for other ranks",
}


def run(
    profile: Profile,
    folder: Path,
    plan: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    outcomes: Sequence[Outcome],
) -> Path:
    """Write `<run>/report.html` and `report.json`, whole or not at all, from the run's folder and what the steps say.

    Args:
        plan: `Plan.to_json()`.
        evaluation: the evaluation artifact's summary.
    """
    history = History.read(folder)
    facts = {
        "run": profile.name,
        "description": profile.description,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions(),
        "plan": dict(plan),
        "traced": traced_figures(profile, outcomes),
        "measured": measured(profile, history),
        "evaluation": {key: value for key, value in evaluation.items() if key != "samples"},
        "samples": _texts(_vocabulary(folder), evaluation.get("samples", [])),
        "steps": [asdict(outcome) for outcome in outcomes],
        "events": read_events(folder),
        "export": str(folder / PART) if (folder / PART).is_dir() else None,
    }
    _write(folder / FACTS, json.dumps(facts, indent=1))
    return _write(
        folder / "report.html", html(profile, facts, history, (folder / "profile.yaml").read_text())
    )


def traced_figures(profile: Profile, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Of every place of the pipeline, as its graphs were traced; empty where none were."""
    summary = next((outcome.summary for outcome in outcomes if outcome.step == "graphs"), {})
    return (
        [asdict(rank) for rank in traced_plan.ranks(profile, summary["traced"])]
        if "traced" in summary
        else []
    )


def measured(profile: Profile, history: History) -> dict[str, Any]:
    """What training came to, in figures; None where a figure was not measured."""
    return {
        "steps": len(history.steps),
        "loss": history.steps[-1]["loss"] if history.steps else None,
        "tokens": len(history.steps) * profile.train.global_batch_size * profile.train.sequence_length,
        "training_seconds": sum(row.get("step_seconds", 0.0) for row in history.steps),
        "step_seconds": history.usual("step_seconds"),
        "tokens_per_second": history.usual("tokens_per_second"),
        "mfu": history.usual("mfu"),
        "memory_bytes": history.highest("memory_bytes"),
        "skipped": history.skipped,
        "cold_compiles": history.highest("cold_compiles"),
    }


def html(profile: Profile, facts: Mapping[str, Any], history: History, resolved: str) -> str:
    """The page of a report's facts."""
    summaries = {step["step"]: step["summary"] for step in facts["steps"]}
    return page.page(
        profile.name,
        profile.description,
        [
            page.section("", page.figures(_figures(profile, facts))),
            page.section("Steps", f'<ol class="dag">{"".join(map(_step, facts["steps"]))}</ol>'),
            page.section("Loss", line_chart(history.losses(), x_label="step", y_label="loss")),
            page.section("Speed and memory", *_speed(history)),
            page.section("Plan and measurement", _plan(profile, facts["plan"], facts["measured"])),
            page.section("Incidents", *_incidents(facts)),
            page.section("Evaluation", _evaluation(facts["evaluation"])),
            page.section("What it writes", *_samples(facts["samples"])),
            page.section("The model", _model(facts["export"]) if facts["export"] else ""),
            page.section(
                "Data", _data(profile, summaries.get("dataset", {}), summaries.get("tokenizer", {}))
            ),
            page.section("Graphs", *_graphs(summaries.get("graphs", {}), facts)),
            page.section(
                "What ran",
                page.facts({**facts["versions"], "report written": facts["written"]}),
                page.unfold("The resolved profile", page.code(resolved)),
            ),
        ],
    )


def versions() -> dict[str, str]:
    """What this ran on: Trainshed (and its commit, in a checkout), torch, Prefect, Python, the system."""
    return {
        "Trainshed": version("trainshed") + _commit(),
        "torch": version("torch"),
        "Prefect": version("prefect"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _commit() -> str:
    home = Path(__file__).parents[1]
    if not (home / ".git").exists():
        return ""
    describe = ["git", "-C", str(home), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(describe, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f", commit {found.stdout.strip()}" if found.returncode == 0 else ""


def _figures(profile: Profile, facts: Mapping[str, Any]) -> dict[str, str]:
    real = facts["measured"]
    shown = {
        "validation loss": f"{facts['evaluation']['validation_loss']:.4f}",
        "perplexity": f"{facts['evaluation']['perplexity']:,.1f}",
        "parameters": in_words(facts["plan"]["parameters"]),
        "tokens trained on": in_words(real["tokens"]),
        "training time": duration(real["training_seconds"]),
        "processes": f"{profile.world_size}",
    }
    if real["tokens_per_second"]:
        shown["tokens a second"] = f"{real['tokens_per_second']:,.0f}"
    if real["mfu"]:
        shown["model FLOPs utilization"] = f"{real['mfu']:.1%}"
    return shown


def _step(outcome: Mapping[str, Any]) -> str:
    how, seconds = outcome["how"], outcome["seconds"]
    took = ""
    if seconds is not None and how != "skipped":
        took = f" · took {duration(seconds)} when made" if how == "cached" else f" · {duration(seconds)}"
    if outcome["retries"]:
        took += f" · {outcome['retries'] + 1} attempts"
    note = f"<small>{escape(outcome['note'])}</small>" if outcome["note"] else ""
    return (
        f'<li class="{escape(how)}"><b>{escape(outcome["step"])}</b>'
        f"<small>{escape(how)}{took}</small>{note}</li>"
    )


def _speed(history: History) -> list[str]:
    speed = Series("tokens a second", "smooth", history.curve("tokens_per_second"))
    peak = Series("memory of rank 0, GiB", "validation", history.curve("memory_bytes", 2.0**-30))
    charts = [
        line_chart([line], x_label="step", y_label=line.label, from_zero=True)
        for line in (speed, peak)
        if line.points
    ]
    whole = history.usual("step_seconds")
    parts = {"a step, median": f"{whole:.3f} s"} if whole else {}
    for key, name in PARTS.items():
        part = history.usual(key)
        if part is not None and whole:
            parts[name] = f"{part:.3f} s ({part / whole:.0%})"
    return [page.beside(*charts), page.facts(parts)]


def _plan(profile: Profile, plan: Mapping[str, Any], real: Mapping[str, Any]) -> str:
    """What was expected beside what came."""

    def row(name: str, expected: Any, came: Any, show: Any) -> tuple[str, ...]:
        cells = [show(value) if value else "unknown" for value in (expected, came)]
        share = f"{came / expected:.0%}" if expected and came else ""
        return name, *cells, share

    host = planner.host_bytes(profile)
    totals = [sum(stage["bytes"].values()) + host for stage in plan.get("stages", ())]
    memory = "memory of the fullest rank" + (", interpreter and libraries included" if host else "")
    rows = [
        row("time a step", plan.get("step_seconds"), real["step_seconds"], lambda value: f"{value:.3g} s"),
        row(
            "tokens a second",
            plan.get("tokens_per_second"),
            real["tokens_per_second"],
            lambda value: f"{value:,.0f}",
        ),
        row("model FLOPs utilization", plan.get("mfu"), real["mfu"], lambda value: f"{value:.1%}"),
        row(memory, max(totals, default=None), real["memory_bytes"], in_bytes),
    ]
    rows = [row for row in rows if set(row[1:3]) != {"unknown"}]
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    parameters = page.facts({"mesh": mesh, "parameters": f"{plan['parameters']:,}"})
    return parameters + page.grid(("", "planned", "measured", "of the plan"), rows)


def _incidents(facts: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
            str(event.get("step", "")),
            ": ".join(part for part in (event["event"], event.get("reason")) if part),
        )
        for event in facts["events"]
    ]
    found = [page.grid(("time (UTC)", "step", "what happened"), rows)] if rows else []
    if facts["measured"]["skipped"]:
        found.append(page.paragraph(f"Steps skipped: {facts['measured']['skipped']}."))
    return found or [page.paragraph("None: no retry, no skipped step.", quiet=True)]


def _evaluation(found: Mapping[str, Any]) -> str:
    """The figures, and those of the user's metrics, which runs of former versions lack."""
    shown = {name.replace("_", " "): number(value) for name, value in found.items() if name != "metrics"}
    shown["perplexity"] = f"{found['perplexity']:,.1f}"
    own = {name: number(value) for name, value in found.get("metrics", {}).items()}
    return page.facts(shown | own)


def _vocabulary(folder: Path) -> Path | None:
    """The tokenizer of a run that lies in its store: the export's, or where nothing is exported what the run was made from."""
    places = [folder / PART]
    if (folder / INPUTS).exists():
        artifacts = Store(str(folder.parents[1])).artifacts
        with contextlib.suppress(FileNotFoundError):
            places.append(artifacts.path(Artifact("tokenizer", read_inputs(folder)["tokenizer"], "", {})))
    files = (place / "tokenizer.json" for place in places)
    return next((file for file in files if file.exists()), None)


def _texts(vocabulary: Path | None, samples: Sequence[Mapping[str, Sequence[int]]]) -> list[dict[str, str]]:
    """Samples of token ids as text; none where there is no tokenizer to read them with."""
    if not samples or vocabulary is None:
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(vocabulary))
    texts = []
    for sample in samples:
        prompt = tokenizer.decode(sample["prompt"], skip_special_tokens=False)
        whole = tokenizer.decode([*sample["prompt"], *sample["text"]], skip_special_tokens=False)
        texts.append({"prompt": prompt, "text": whole.removeprefix(prompt)})
    return texts


def _samples(samples: Sequence[Mapping[str, str]]) -> list[str]:
    return [
        f'<blockquote><span class="quiet">{escape(sample["prompt"])}</span>{escape(sample["text"].rstrip())}</blockquote>'
        for sample in samples
    ]


def _model(export: str) -> str:
    program = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"folder = {export!r}\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        'tokens = tokenizer("The function returns", return_tensors="pt").input_ids\n'
        "print(tokenizer.decode(model.generate(tokens, max_new_tokens=40)[0]))\n"
    )
    return f"<p>In Hugging Face's format: <code>{escape(export)}</code></p>{page.code(program)}"


def _data(profile: Profile, corpus: Mapping[str, Any], vocabulary: Mapping[str, Any]) -> str:
    shown = {}
    if "vocabulary_size" in vocabulary:
        source = "trained on the text" if vocabulary.get("source") == "train" else vocabulary.get("source")
        shown["tokenizer"] = f"{vocabulary['vocabulary_size']:,} tokens, {source}"
    if "tokens" in corpus:
        shown["to train on"] = f"{corpus['tokens']:,} tokens in {corpus['documents']:,} documents"
        shown["held out"] = (
            f"{corpus['validation_tokens']:,} tokens in {corpus['validation_documents']:,} documents"
        )
        used = profile.train.steps * profile.train.global_batch_size * profile.train.sequence_length
        shown["passes over it"] = f"{used / max(1, corpus['tokens']):.2f}"
    if "bytes" in corpus:
        shown["text"] = f"{in_bytes(corpus['bytes'])}, {corpus['bytes_per_token']:.2f} bytes a token"
        left = [f"{corpus[key]:,} {what}" for key, what in LEFT_OUT.items() if corpus[key]]
        shown["left out"] = ", ".join(left) or "nothing"
        shown["shards"] = f"{corpus['shards']:,}"
    return page.facts(shown)


def _graphs(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    if not summary:
        return [page.paragraph("Training ran eager.", quiet=True)]
    if "note" in summary:
        return [page.paragraph(f"{summary['note']}.", quiet=True)]
    failed = f", {summary['failed']:,} of them failed" if summary["failed"] else ""
    shown = {
        "compiled": f"{summary['total']:,} graphs in {duration(summary['seconds'])}{failed}",
        "from the cache": f"{summary['from_cache']:,}",
    }
    cold = facts["measured"]["cold_compiles"]
    if cold is not None:
        shown["compiled again while training"] = f"{cold:.0f}"
    programs = [
        (
            entry["name"],
            f"{entry['graphs']}",
            entry["status"],
            f"{entry['seconds']:.1f} s" if entry["seconds"] is not None else "",
            in_bytes(entry["peak_bytes"]) if entry["peak_bytes"] else "",
        )
        for entry in summary["programs"]
    ]
    stages = [
        (
            f"stage {place}",
            in_bytes(planned["bytes"]["activations"]),
            in_bytes(came["activations"]),
            in_flops(planned["flops"]),
            in_flops(came["flops"]),
        )
        for place, (planned, came) in enumerate(zip(facts["plan"]["stages"], facts["traced"], strict=False))
    ]
    columns = ("", "activations, planned", "traced", "work a step, planned", "traced")
    return [
        page.facts(shown),
        page.grid(("program", "graphs", "status", "time", "memory"), programs),
        page.grid(columns, stages),
    ]


def _write(path: Path, text: str) -> Path:
    partial = path.with_suffix(f"{path.suffix}.partial")
    partial.write_text(text)
    return partial.replace(path)
