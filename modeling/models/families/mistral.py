"""Mistral 7B (arXiv 2310.06825): Llama with sliding-window attention.

The query at position i sees the keys at i - w + 1 to i in every layer, w = `Model.window`, so after L layers a token depends on
the last L·w. Shapes as in `llama.py`.
"""

from __future__ import annotations

from modeling.models.families import llama


class Mistral(llama.Llama):
    """Mistral, or one pipeline stage of it; arguments as for `LanguageModel`."""
