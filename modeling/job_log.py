"""Log of a job module: messages as lines of text, warnings marked."""

from __future__ import annotations

import logging
from typing import TextIO

WARNING = "warning: "  # before each warning


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{WARNING}{text}" if record.levelno == logging.WARNING else text


def configure(stream: TextIO, level: int = logging.INFO) -> None:
    """Write messages of at least this level to a stream, unless logging is already set up."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Lines())
    logging.basicConfig(level=level, handlers=[handler])
