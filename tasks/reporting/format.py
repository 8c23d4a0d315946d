"""Numbers as text, one function for each kind, such as durations or bytes; columns of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

INITIAL = "validation loss of the initial weights"  # on the whole split


def format_duration(seconds: float) -> str:
    """0.42 -> '0.4 s', 75 -> '1:15', 4000 -> '1:06:40'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_age(seconds: float) -> str:
    """40 -> '40 s', 300 -> '5 min', 7200 -> '2 h', 200000 -> '2 d'."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def format_time(moment: str) -> str:
    """'2026-03-01T10:00:07+00:00', in UTC -> '2026-03-01 10:00 UTC'."""
    return f"{moment[:16].replace('T', ' ')} UTC"


def format_count(count: int) -> str:
    """2714304 -> '2.71 million'."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"


def format_bytes(size: float) -> str:
    """57016320 -> '54.4 MiB', 1060110336 -> '1,011 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{format_number(size)} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def format_number(number: float) -> str:
    """Three significant digits, or the integer: 0.98765 -> '0.988', 1011.4 -> '1,011'."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def format_share(share: float) -> str:
    """Format a share as a percentage, such as 5% or 0.5%."""
    return f"{100 * share:.3g}%"


def format_step_time(seconds: float) -> str:
    """0.0123 -> '12.3 ms', 5.81 -> '5.81 s', 349 -> '5:49'."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)


def format_perplexity(perplexity: float) -> str:
    """1020.28 -> '1,020.3'."""
    return f"{perplexity:,.1f}"


def format_mesh(degrees: Mapping[str, int]) -> str:
    """Axes above 1, outermost first, then experts, which share data × context: 'pipeline 2 × tensor 8'."""
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1}
    experts = f", experts over {axes.pop('expert')}" if "expert" in axes else ""
    return (" × ".join(f"{axis} {degree}" for axis, degree in axes.items()) or "one process") + experts


def validation_name(batches: int | None) -> str:
    """'validation loss' on the whole split, or on the batches that evaluations during training use."""
    return (
        "validation loss" if batches is None else f"validation loss on {batches} batch{'es' * (batches > 1)}"
    )


def format_flops(count: float) -> str:
    """12900000000 -> '12.9 GFLOP'."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:,.3g} EFLOP"


def format_interval(ends: Sequence[float], form: str = ".4f", word: str = "–") -> str:
    """[4.3, 5.0239] -> '4.3000 – 5.0239'."""
    low, high = ends
    return f"{low:{form}} {word} {high:{form}}"


def format_value(value: object) -> str:
    """A value of a summary: 1234 -> '1,234', 0.5 -> '0.5000', anything else by str()."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def without_empty_columns(
    titles: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """The titles and rows of a table without the columns that are empty in all rows."""
    kept = [index for index in range(len(titles)) if any(row[index] for row in rows)]
    return [titles[index] for index in kept], [[row[index] for index in kept] for row in rows]
