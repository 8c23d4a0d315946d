"""HTML page of a run's report, rendered from report.json, the history and the resolved profile."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from profiles.errors import counted
from profiles.schema import Profile
from tasks.reporting import html
from tasks.reporting.advice import tokens_of_pass, training_tokens
from tasks.reporting.chart import LINE_STYLES, Series, heat_map, line_chart
from tasks.reporting.format import (
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_interval,
    format_mesh,
    format_number,
    format_perplexity,
    format_step_time,
    format_time,
    format_value,
)
from tasks.reporting.history import History

# Documents and records.
DROPPED = {
    "missing": "without text or unusable",
    "short": "too short",
    "too_long": "too long",
    "duplicates": "duplicates",
}
MAX_CHARTS = 6  # of evaluations of checkpoints
STEP_PARTS = {  # of the step time, by metrics key
    "data_wait_seconds": "waiting for data",
    "forward_backward_seconds": "forward and backward",
    "optimizer_seconds": "optimizer",
    "communication_seconds": "waiting for other ranks (included above)",
}


def render(profile: Profile, facts: Mapping[str, Any], history: History, resolved_profile: str) -> str:
    """Render the page from the contents of report.json, the metrics and the YAML of the resolved profile."""
    summaries = {step["step"]: step["summary"] for step in facts["steps"]}
    steps, gates = "".join(map(_step, facts["steps"])), facts.get("gates")
    return html.page(
        profile.name,
        profile.description,
        [
            html.section("", html.key_figures(_key_figures(profile, facts))),
            html.section("Warnings", *(html.paragraph(f"{text}.") for text in facts["warnings"])),
            html.section("Steps", f'<ol class="dag">{steps}</ol>'),
            html.section("Loss", *_loss(profile, facts, history)),
            html.section("Learning rate and gradient norm", _optimization(history)),
            html.section(
                "Validation loss by data source",
                line_chart(history.source_series(), x_label="step", y_label="validation loss"),
            ),
            html.section("Evaluations of checkpoints", *_checkpoints(facts.get("evaluations", []))),
            html.section("Throughput and memory", *_throughput(history)),
            html.section("Experts", *_experts(facts["experts"])),
            html.section("Planned and measured", _planned(facts["plan"], facts["measured"])),
            html.section("Incidents", *_incidents(facts)),
            html.section(
                "Evaluation on the whole validation split",
                _evaluation(profile, facts["evaluation"], facts["before"]),
            ),
            html.section("Gates of the round", html.table(gates[0], gates[1:]) if gates else ""),
            html.section("Forecast and outcome", forecast_against_outcome(facts.get("forecast"))),
            html.section("Samples", *_samples(facts)),
            html.section(
                "Exported model", _export(facts["export"], facts["samples"]) if facts["export"] else ""
            ),
            html.section("Data", _data(profile, summaries)),
            html.section("Compiled graphs", *_graphs(summaries.get("graphs", {}), facts)),
            html.section(
                "Environment",
                html.properties({**facts["versions"], "report written": facts["written"]}),
                html.details("Resolved profile", html.code_block(resolved_profile)),
            ),
        ],
    )


def _key_figures(profile: Profile, facts: Mapping[str, Any]) -> dict[str, str]:
    measured = facts["measured"]
    shown = {
        "validation loss": f"{facts['evaluation']['validation_loss']:.4f}",
        **_perplexity(facts["evaluation"]),
        "parameters": format_count(facts["plan"]["parameters"]),
        "training tokens": format_count(measured["tokens"]),
        "training time": format_duration(measured["training_seconds"]),
        "rank" if profile.world_size == 1 else "ranks": f"{profile.world_size:,}",
    }
    if measured["tokens_per_second"]:
        shown["tokens per second"] = f"{measured['tokens_per_second']:,.0f}"
    if measured["mfu"]:
        shown["model FLOPs utilization"] = f"{measured['mfu']:.1%}"
    return shown


def _perplexity(evaluation: Mapping[str, Any]) -> dict[str, str]:
    value = evaluation["perplexity"]
    return {} if value is None else {"perplexity": format_perplexity(value)}


def _step(outcome: Mapping[str, Any]) -> str:
    how, seconds = outcome["how"], outcome["seconds"]
    timing = ""
    if seconds is not None and how != "skipped":
        timing = f" · {format_duration(seconds)}" + (" when first run" if how == "cached" else "")
    if outcome["retries"]:
        timing += f" · {outcome['retries'] + 1} attempts"
    note = f"<small>{escape(outcome['note'])}</small>" if outcome["note"] else ""
    return (
        f'<li class="{escape(how)}"><b>{escape(outcome["step"])}</b>'
        f"<small>{escape(how)}{timing}</small>{note}</li>"
    )


def _loss(profile: Profile, facts: Mapping[str, Any], history: History) -> list[str]:
    """The chart and, below that of a fork, which of its steps another run trained."""
    chart = line_chart(history.loss_series(profile), x_label="step", y_label="loss")
    if not (parent := facts.get("parent")):
        return [chart]
    note = (
        f"Forked from {parent['run']}@{parent['step']}: that run trained the steps up to {parent['step']:,}."
    )
    return [chart, html.paragraph(note, muted=True)]


def _optimization(history: History) -> str:
    lines = [
        Series("learning rate", "smooth", history.curve("learning_rate")),
        Series("gradient norm", "training", history.curve("gradient_norm")),
    ]
    return _beside(lines)


def _beside(lines: Sequence[Series]) -> str:
    """Charts of one line each, side by side."""
    shown = [line for line in lines if line.points]
    charts = [line_chart([line], x_label="step", y_label=line.label, from_zero=True) for line in shown]
    return html.columns(*charts)


def _checkpoints(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Charts of the metrics of evaluated checkpoints, and a table by step."""
    names = dict.fromkeys(name for row in evaluations for name in row if name != "step")
    # Metrics of lm-eval, TASK/METRIC, have the harness's names.
    shown = {name: name if "/" in name else name.replace("_", " ") for name in names if "_stderr" not in name}
    charts = []
    for number, (name, label) in enumerate([*shown.items()][:MAX_CHARTS]):
        points = [(row["step"], row[name]) for row in evaluations if name in row]
        if len(points) > 1:
            line = Series(label, f"line-{number % LINE_STYLES + 1}", points, dots=True)
            charts.append(line_chart([line], x_label="step", y_label=label))
    rows = [
        (f"{row['step']:,}", *(_with_error(row, name) if name in row else "" for name in shown))
        for row in evaluations
    ]
    return [html.columns(*charts) if charts else "", html.table(("step", *shown.values()), rows)]


def _with_error(row: Mapping[str, Any], name: str) -> str:
    """A metric, with its standard error if the task has one."""
    task, _, metric = name.rpartition("/")
    error = row.get(f"{task}/{metric}_stderr")
    return format_value(row[name]) + (f" ± {format_value(error)}" if error is not None else "")


def _throughput(history: History) -> list[str]:
    throughput = Series("tokens per second", "smooth", history.curve("tokens_per_second"))
    unit, size = ("MiB", 2**20) if (history.maximum("memory_bytes") or 0) < 2**30 else ("GiB", 2**30)
    memory = Series(f"memory of rank 0, {unit}", "validation", history.curve("memory_bytes", 1 / size))
    step_seconds = history.median("step_seconds")
    shown = {"step time, median": format_step_time(step_seconds)} if step_seconds else {}
    for key, name in STEP_PARTS.items():
        seconds = history.median(key)
        if seconds and step_seconds:  # none is spent in collectives by one process
            shown[name] = f"{format_step_time(seconds)} ({seconds / step_seconds:.0%})"
    return [_beside([throughput, memory]), html.properties(shown)]


def _experts(experts: Mapping[str, Any] | None) -> list[str]:
    """Balance at the last step, and a heat map of the load by layer and expert."""
    if experts is None:
        return []
    shown = {
        "heaviest expert over the mean, in the worst layer": f"{experts['expert_load_max']:.2f}",
        "balance loss, sum over layers": format_value(experts["balance_loss"]),
        "router z-loss, sum over layers": format_value(experts["router_z_loss"]),
        "dropped expert choices in the last step": f"{experts['dropped_choices']:,.0f}",
    }
    picture = heat_map(experts["loads"], row_label="layer", column_label="expert")
    return [html.properties(shown), picture]


def forecast_against_outcome(forecast: Mapping[str, Any] | None) -> str:
    """The forecast that a ladder made before the run started, compared with the loss that the run reached."""
    if forecast is None:
        return ""
    shown = {
        "forecast of the validation loss": f"{forecast['loss']:.4f}",
        f"{forecast['share']:.0%} interval": format_interval(forecast["interval"], word="to"),
        "outcome": f"{forecast['outcome']:.4f}, {'inside' if forecast['within'] else 'outside'} the interval",
        "error": f"{forecast['error']:+z.2%}",
        "compute of the run over the largest rung's": f"{forecast['extrapolation']:.1f}",
        "forecast written, before the run started": format_time(forecast["written"]),
        "artifact": forecast["key"],
    }
    rows = [
        (
            name,
            f"{row['value']:.4f}",
            format_interval(row["interval"], word="to"),
            f"{row['outcome']:.4f}",
            "inside" if row["within"] else "outside",
        )
        for name, row in forecast.get("metrics", {}).items()  # absent in earlier versions
    ]
    return html.properties(shown) + html.table(
        ("metric", "forecast", "interval", "outcome", "outcome is"), rows
    )


def _planned(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Mesh, parameters and the basis of planned times, and a table of planned and measured values."""
    memory = "memory of the fullest rank"
    memory += ", with interpreter and libraries" if plan.get("host_bytes") else ""
    expected = {**plan, "memory_bytes": plan.get("needs_bytes")}
    rows = []
    for name, key, show in (
        ("step time", "step_seconds", format_step_time),
        ("tokens per second", "tokens_per_second", "{:,.0f}".format),
        ("model FLOPs utilization", "mfu", "{:.1%}".format),
        (memory, "memory_bytes", format_bytes),
    ):
        pair = expected.get(key), measured[key]
        if any(pair):
            ratio = f"{pair[1] / pair[0]:.0%}" if all(pair) else ""
            rows.append((name, *(show(value) if value else "unknown" for value in pair), ratio))
    model = {"mesh": format_mesh(plan["mesh"]), "parameters": f"{plan['parameters']:,}"}
    model["planned times"] = plan["basis"]
    return html.properties(model) + html.table(("", "planned", "measured", "measured / planned"), rows)


def _incidents(facts: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
            str(event.get("step", "")),
            ": ".join(part for part in (event["event"], event.get("reason")) if part),
        )
        for event in facts["events"]
    ]
    shown = [html.table(("time (UTC)", "step", "event"), rows)] if rows else []
    if facts["measured"]["skipped"]:
        shown.append(html.paragraph(f"Skipped steps: {facts['measured']['skipped']}."))
    return shown or [html.paragraph("No retries and no skipped steps.", muted=True)]


def _evaluation(profile: Profile, evaluation: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The evaluation; for fine-tuning, its results beside those of the initial weights."""
    counted = {_units(profile)[0]: evaluation["tokens"], "step": evaluation.get("step")}
    size = {name: format_value(value) for name, value in counted.items() if value is not None}
    results = _results(evaluation)
    if not before:
        return html.properties({**results, **size})
    earlier = _results(before)
    rows = [(name, earlier.get(name, ""), value) for name, value in results.items()]
    return html.properties(size) + html.table(("", "before", "after"), rows)


def _results(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """Loss, perplexity and metrics of an evaluation by name; runs of early versions have no metrics."""
    metrics = {name: format_value(value) for name, value in evaluation.get("metrics", {}).items()}
    loss = {"validation loss": format_value(evaluation["validation_loss"])}
    return {**loss, **_perplexity(evaluation), **metrics}


def _units(profile: Profile) -> tuple[str, str]:
    """What an evaluation and a dataset count: predicted tokens and documents, or pairs of answers."""
    return ("pairs", "pairs") if profile.objective.traits.pairs else ("predicted tokens", "documents")


def _samples(facts: Mapping[str, Any]) -> list[str]:
    """Generated samples; for fine-tuning, each beside that of the initial weights."""
    after, before = facts["samples"], facts["samples_before"]
    if not before or [sample["prompt"] for sample in before] != [sample["prompt"] for sample in after]:
        return [_sample(sample) for sample in after]
    pairs = [
        (_sample(one, "Before"), _sample(other, "After")) for one, other in zip(before, after, strict=True)
    ]
    return [
        html.columns(html.paragraph("Before"), html.paragraph("After"), only_wide=True),
        *(html.columns(*pair) for pair in pairs),
    ]


def _sample(sample: Mapping[str, str], heading: str = "") -> str:
    """A prompt and its continuation, with several empty lines as one; the heading on narrow pages."""
    prompt, text = escape(sample["prompt"]), escape(re.sub(r"\n{3,}", "\n\n", sample["text"].rstrip()))
    top = heading and f'<div class="only-narrow">{heading}</div>'
    return f'{top}<blockquote><span class="quiet">{prompt}</span>{text}</blockquote>'


def _export(folder: str, samples: Sequence[Mapping[str, str]]) -> str:
    """Code that loads the model and continues a prompt of the held-out data."""
    program = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"folder = {folder!r}\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
    )
    if samples:
        # A short one; one that was cut within a character ends with a replacement character.
        prompt = min((sample["prompt"] for sample in samples), key=lambda text: ("\ufffd" in text, len(text)))
        program += (
            f"prompt = {prompt!r}  # of the held-out data\n"
            'tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids\n'
            "print(tokenizer.decode(model.generate(tokens, max_new_tokens=40)[0]))\n"
        )
    return f"<p>In Hugging Face format: <code>{escape(folder)}</code></p>{html.code_block(program)}"


def _data(profile: Profile, summaries: Mapping[str, Mapping[str, Any]]) -> str:
    dataset, tokenizer, shown = summaries.get("dataset", {}), summaries.get("tokenizer", {}), {}
    if "vocabulary_size" in tokenizer:
        trained = tokenizer.get("source") == "train"
        source = "trained on the dataset" if trained else f"from {tokenizer.get('source')}"
        shown["tokenizer"] = f"{tokenizer['vocabulary_size']:,} tokens, {source}"
    if "tokens" in dataset:
        for split, prefix in (("training split", ""), ("validation split", "validation_")):
            shown[split] = f"{dataset[f'{prefix}tokens']:,} tokens"
            # The new data of a continual round has only tokens and shards.
            if f"{prefix}documents" in dataset:
                count = dataset[f"{prefix}documents"] // profile.rows_per_sample
                shown[split] += f" in {count:,} {_units(profile)[1]}"
        passes = training_tokens(profile) / max(1, tokens_of_pass(profile, dataset))
        shown["passes over the training split"] = format_number(passes)
    for change in profile.data.schedule:
        shown[f"mixture from step {change.step:,}"] = " : ".join(f"{weight:g}" for weight in change.weights)
    if "bytes" in dataset:
        shown["text"] = f"{format_bytes(dataset['bytes'])}, {dataset['bytes_per_token']:.2f} bytes per token"
        dropped = [f"{dataset[key]:,} {reason}" for key, reason in DROPPED.items() if dataset.get(key)]
        shown[f"dropped {_units(profile)[1]}"] = ", ".join(dropped) or "none"
        shown["shards"] = f"{dataset['shards']:,}"
    return html.properties(shown)


def _graphs(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    if not summary:
        return [html.paragraph("Training ran in eager mode.", muted=True)]
    if "note" in summary:
        return [html.paragraph(f"{summary['note']}.", muted=True)]
    failed = f", {summary['failed']:,} failed" if summary["failed"] else ""
    shown = {
        "compiled": f"{counted(summary['total'], 'graph')} in {format_duration(summary['seconds'])}{failed}",
        "from the cache": f"{summary['from_cache']:,}",
    }
    compiled_in_training = facts["measured"]["graph_cache_misses"]
    if compiled_in_training is not None:
        shown["compiled during training"] = f"{compiled_in_training:.0f}"
    programs = [
        (
            entry["name"],
            f"{entry['graphs']}",
            entry["status"],
            f"{entry['seconds']:.1f} s" if entry["seconds"] is not None else "",
            format_bytes(entry["peak_bytes"]) if entry["peak_bytes"] else "",
        )
        for entry in summary["programs"]
    ]
    stages = [
        (
            f"stage {stage}",
            format_bytes(planned["bytes"]["activations"]),
            format_bytes(traced["activations"]),
            format_flops(planned["flops"]),
            format_flops(traced["flops"]),
        )
        for stage, (planned, traced) in enumerate(zip(facts["plan"]["stages"], facts["traced"], strict=False))
    ]
    columns = ("", "activations, planned", "traced", "work per step, planned", "traced")
    return [
        html.properties(shown),
        html.table(("program", "graphs", "status", "time", "memory"), programs),
        html.table(columns, stages),
    ]
