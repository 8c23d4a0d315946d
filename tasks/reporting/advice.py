"""Warnings that metrics alone do not show: data, tokenizer, time between checkpoints, overfitting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from profiles.errors import counted
from profiles.schema import Profile
from profiles.sections.data import WORTHWHILE_PASSES
from tasks.reporting.format import format_duration, format_number

MAX_REPEATED = 2 * 3600  # seconds of training between checkpoints
STOP_STEPS = 3  # a stop takes effect after the step in progress and those that are queued by then
RISE = 0.02  # above the lowest validation loss, as a share of it; less is noise


def training_tokens(profile: Profile) -> int:
    """Tokens that a run reads: repeated ones, padding and both rows of pairs included."""
    return (profile.train.steps or 0) * profile.step_tokens


def tokens_of_pass(profile: Profile, dataset: Mapping[str, Any]) -> int:
    """Tokens that one pass over a dataset reads, counted as in `training_tokens`."""
    rows: int = dataset.get("samples", 0) * profile.rows_per_sample
    tokens: int = rows * profile.train.sequence_length or dataset["tokens"]
    return tokens


def data_warnings(profile: Profile, tokenizer: Mapping[str, Any], dataset: Mapping[str, Any]) -> list[str]:
    """Warnings that follow from the summaries of the tokenizer and the dataset step."""
    return [
        *_missing(profile, dataset),
        *_tokenizer(profile, tokenizer),
        *passes_warning(profile, tokens_of_pass(profile, dataset)),
    ]


def _missing(profile: Profile, dataset: Mapping[str, Any]) -> Iterator[str]:
    if count := dataset.get("missing"):
        unusable = f"that are unusable for objective.kind {profile.objective.kind}"
        reason = unusable if profile.objective.traits.reads_records else "without text"
        files = dataset.get("incomplete_files", {})
        names = [f"{name} ({missing:,})" for name, missing in files.items()]
        if more := dataset.get("incomplete", 0) - len(files):
            names.append(counted(more, "more file"))
        yield f"left out {counted(count, 'record')} {reason}{': ' if names else ''}{', '.join(names)}"


def _tokenizer(profile: Profile, summary: Mapping[str, Any]) -> Iterator[str]:
    wanted, size = profile.tokenizer.vocabulary_size, summary["vocabulary_size"]
    if profile.tokenizer.source == "train" and wanted and size < wanted:
        yield (
            f"the tokenizer has {size:,} tokens instead of {wanted:,}: the text has no further pairs to merge; add text, or "
            f"set tokenizer.vocabulary_size and model.vocab_size to {size}"
        )


def passes_warning(profile: Profile, tokens: float) -> Iterator[str]:
    """A warning if the run reads this many tokens of training data too often; else nothing."""
    passes = training_tokens(profile) / tokens
    if round(passes) > WORTHWHILE_PASSES:  # the last batch of an epoch is filled up
        steps = profile.train.last_step
        worthwhile = format_number(int(WORTHWHILE_PASSES * steps / passes))
        yield (
            f"{steps:,} steps read the data about {format_number(passes)} times; after {WORTHWHILE_PASSES} passes, "
            f"repetition improves the loss less and less; add data, or train at most {worthwhile} steps"
        )


def interruption_warnings(profile: Profile, step_seconds: float | None) -> Iterator[str]:
    """Warnings if a failure or a stop would repeat much training, given the planned time of a step."""
    if step_seconds is None:
        return
    every, steps = profile.checkpoint.every, profile.train.steps or 0
    if (every or steps) * step_seconds > MAX_REPEATED and steps > 1:
        between = format_duration((every or steps) * step_seconds)
        suitable = max(1, int(MAX_REPEATED / 2 / step_seconds))
        yield (
            f"checkpoint.every = {every}: a failure repeats up to {between} of training; set it to about "
            f"{suitable:,}"
        )
    if not profile.checkpoint.on_stop:
        return
    needed, cluster = STOP_STEPS * step_seconds, profile.cluster
    given = {"grace": cluster.grace} | ({"time_left": cluster.time_left} if cluster.time else {})
    for name, seconds in given.items():
        if seconds < needed:
            yield (
                f"cluster.{name} = {seconds}: a stop saves only after up to {STOP_STEPS} more steps, which take "
                f"{format_duration(needed)}; set it to at least {round(2 * needed)}"
            )


def lower_evaluation(lowest: Mapping[str, Any] | None, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of metrics.jsonl with the lower validation loss; the later one if they differ in tokens."""
    if lowest is None or lowest.get("validation_tokens") != row.get("validation_tokens"):
        return row
    return min(lowest, row, key=itemgetter("validation_loss"))


def rise_warning(lowest: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> str:
    """Warning if the last evaluation's loss is above the lowest, else ""; takes rows of metrics.jsonl."""
    if lowest is None or last is None or lowest["validation_loss"] <= 0:
        return ""
    rise = last["validation_loss"] / lowest["validation_loss"] - 1
    if rise <= RISE:
        return ""
    return (
        f"the validation loss rose by {rise:.0%}, from {lowest['validation_loss']:.4f} at step {lowest['step']:,} to "
        f"{last['validation_loss']:.4f} at step {last['step']:,}: the model overfits or diverges; train fewer steps, add data, "
        "or lower train.learning_rate"
    )
