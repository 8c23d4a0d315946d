"""Numbers as text: durations, counts, bytes and FLOPs."""

from __future__ import annotations


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


def format_count(count: int) -> str:
    """2714304 -> '2.71 million'."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"


def format_bytes(size: float) -> str:
    """57016320 -> '54.4 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def format_flops(count: float) -> str:
    """12900000000 -> '12.9 GFLOP'."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:,.3g} EFLOP"


def format_value(value: object) -> str:
    """A value of a summary: 1234 -> '1,234', 0.5 -> '0.5000', anything else by str()."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
