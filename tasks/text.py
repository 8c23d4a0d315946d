"""Figures as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """0.42 -> '0.4 s', 75 -> '1:15', 4000 -> '1:06:40'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
