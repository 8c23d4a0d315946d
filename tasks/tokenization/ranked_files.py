"""Tokenizers from ranked byte sequences: tiktoken's format (Llama 3 and 4) and Mistral's tekken.json.

Converted by transformers. A file in tiktoken's format lacks the pattern that splits words and the special tokens, which are those
of the model that it belongs to.
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
BOS, END = "<|begin_of_text|>", "<|end_of_text|>"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3_PATTERN = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA4_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SIZE, LLAMA4_SIZE = 128_000, 200_000  # tokens in the files, without special tokens
LLAMA3, LLAMA4 = ("llama", "mllama", "mllama_text_model"), ("llama4", "llama4_text")  # `model_type`
# Special tokens of the first tekken files, which do not list them.
EARLY_TEKKEN = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
TEKKEN_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def is_tiktoken(path: Path) -> bool:
    """Whether a file has tiktoken's format: lines of a token's bytes in Base64 and its rank."""
    with path.open("rb") as file:
        return LINE.fullmatch(file.readline(1 << 16)) is not None


def from_tiktoken(
    path: Path, model: Mapping[str, Any], *, has_special: bool
) -> tuple[Tokenizer, dict[str, str]]:
    """Tokenizer and special tokens of Llama 3 or 4, from its tokenizer.model.

    Args:
        model: its config.json; may be empty for the files that Meta published.
        has_special: whether other files declare the special tokens, which are then not added.

    Raises:
        ValueError: the file belongs to another model.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = _ranks(path)
    kind = model.get("model_type") or {LLAMA3_SIZE: "llama", LLAMA4_SIZE: "llama4"}.get(len(ranks))
    if kind not in (*LLAMA3, *LLAMA4):
        raise ValueError(
            f"it has {len(ranks):,} tokens in tiktoken's format; Llama 3 has {LLAMA3_SIZE:,}, Llama 4 {LLAMA4_SIZE:,}: "
            "convert another model's to tokenizer.json first"
        )
    pattern, special = (
        (LLAMA4_PATTERN, _llama4_special()) if kind in LLAMA4 else (LLAMA3_PATTERN, _llama3_special())
    )
    converter = TikTokenConverter(str(path), pattern)
    converter.load_tiktoken_bpe = lambda path: ranks  # which would need the package tiktoken
    tokenizer: Tokenizer = converter.converted()
    if has_special:
        return tokenizer, {}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    # Added with add_special_tokens=True, as by Llama's tokenizer.json.
    bos = [(BOS, tokenizer.token_to_id(BOS))]
    byte_level, template = (
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(f"{BOS} $A", special_tokens=bos),
    )
    tokenizer.post_processor = processors.Sequence([byte_level, template])
    return tokenizer, {"bos_token": BOS, "eos_token": END}


def from_tekken(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Tokenizer and special tokens of Mistral's tekken.json."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    content = json.loads(path.read_text())
    if content.get("special_tokens") is None:
        content["special_tokens"] = [{"rank": i, "token_str": name} for i, name in enumerate(EARLY_TEKKEN)]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as complete:
        json.dump(content, complete)
        complete.flush()
        tokenizer = MistralConverter(complete.name).converted()
    known = {
        name: token for name, token in TEKKEN_SPECIAL.items() if tokenizer.token_to_id(token) is not None
    }
    return tokenizer, known


def _ranks(path: Path) -> dict[bytes, int]:
    """Ranks of byte sequences, from a file in tiktoken's format."""
    found = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line:
            try:
                token, rank = line.split()
                found[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise ValueError(f"line {number} is not a token in Base64 and its rank: {error}") from error
    return found


def _llama3_special() -> list[str]:
    """The 256 special tokens of Llama 3.1 and later, of which Llama 3 has fewer names."""
    names = "reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id reserved_special_token_2"
    names += " start_header_id end_header_id eom_id eot_id python_tag"
    return [BOS, END, *(f"<|{name}|>" for name in names.split()), *_reserved("", 3, 245)]


def _llama4_special() -> list[str]:
    """The 2,048 special tokens of Llama 4."""
    basic = "fim_prefix fim_middle fim_suffix header_start header_end eom eot step"
    image = ["<|image_start|>", "<|image_end|>", *_reserved("vision_", 0, 2)]
    image += ["<|tile_x_separator|>", "<|tile_y_separator|>", *_reserved("vision_", 2, 4), "<|image|>"]
    image += [*_reserved("vision_", 6, 1), "<|patch|>", *_reserved("vision_", 7, 1041)]
    return [
        *(BOS, END, *(f"<|{name}|>" for name in basic.split())),
        *_reserved("text_post_train_", 0, 6),
        *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
        *_reserved("text_post_train_", 8, 61),
        *image,
        *(*_reserved("reasoning_", 0, 8), "<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
        *_reserved("", 0, 904),
    ]


def _reserved(prefix: str, start: int, count: int) -> list[str]:
    return [f"<|{prefix}reserved_special_token_{i}|>" for i in range(start, start + count)]
