"""What inference needs beside weights: the trained chat template and the generation config."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from profiles.files import state_files
from profiles.huggingface.config import TOKEN_IDS
from tasks.steps.checkpoint import GENERATION
from tasks.store.artifacts import Artifact
from tasks.tokenization.chat_templates import ChatTemplate, own_templates
from tasks.tokenization.tokenizer_files import TEMPLATE, special_token_id

log = logging.getLogger(__name__)
TOKENIZER_CONFIG = "tokenizer_config.json"


def of_weights(weights: Artifact | None) -> dict[str, Any]:
    """The generation config of initial weights, from the checkpoint step; empty if they have none."""
    return (weights.summary.get(GENERATION) if weights else None) or {}


def install_template(folder: Path, template: str | None, tokenizer: Tokenizer) -> list[int]:
    """Make a chat template the tokenizer's, and let it pad; returns the ids that end the template's turns.

    Args:
        folder: of the export, with the tokenizer's files.
        template: its source; None: the tokenizer's own, if it has one.
    """
    path = folder / TOKENIZER_CONFIG
    settings = json.loads(state_files.contents(path))
    if template is not None:
        (folder / TEMPLATE).write_text(template)
        settings.pop("chat_template", None)
    elif not own_templates(folder):
        return []
    if not settings.get("pad_token") and settings.get("eos_token"):
        settings["pad_token"] = settings["eos_token"]  # batches of prompts are padded
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    stops = ChatTemplate(folder).stop_tokens(tokenizer)
    if stops is None:
        log.warning(
            "the chat template rejects a question with an answer, so that the token that ends a turn is unknown: "
            "generation stops at EOS only"
        )
    elif not stops:
        log.warning(
            "the chat template ends no turn with a token of the tokenizer: generation stops at EOS only"
        )
    return stops or []


def configs(
    folder: Path, tokenizer: Tokenizer, given: Mapping[str, Any], stops: Sequence[int] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The token ids of an export's config.json, and its generation_config.json.

    Args:
        folder: with the tokenizer's files.
        given: generation_config.json of the initial weights; everything but token ids is kept.
        stops: ids that also end generation.
    """
    # Null for a token that the tokenizer lacks; if omitted, transformers' defaults for the architecture would apply.
    ids: dict[str, Any] = {
        name: special_token_id(folder, tokenizer, name.removesuffix("_id")) for name in TOKEN_IDS
    }
    bos, eos, pad = TOKEN_IDS
    before, own = given.get(eos), ids[eos]
    ends = before if isinstance(before, list) else [before] if before is not None else []
    added = tokenizer.get_added_tokens_decoder()

    def is_kept(token: Any) -> bool:
        """Whether an id of the initial weights still has its meaning.

        In another tokenizer it may be the id of an ordinary word.
        """
        return own in (None, *ends) or token in added

    if lost := [token for token in ends if not is_kept(token)]:
        log.warning(
            "generation_config.json: eos_token_id %s is dropped: no special token of the tokenizer", lost
        )
    found = [*dict.fromkeys([*filter(is_kept, ends), *([] if own is None else [own]), *stops])]
    ids[eos] = found if isinstance(before, list) or len(found) > 1 else found[0] if found else None
    generation = {**{name: given[name] for name in given if name != "_from_model_config"}, **ids}
    for name in (bos, pad):
        if ids[name] is None and given.get(name) is not None and is_kept(given[name]):
            generation[name] = given[name]
    return ids, generation
