"""The tokenizer, and the vocabulary size of Megatron's model.

Megatron pads the tokenizer's vocabulary to a multiple of make_vocab_size_divisible_by × tensor degree. The padded rows are part
of its softmax, so they are part of the model here too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profiles.files import state_files
from profiles.huggingface.config import read_config_json
from profiles.nxdt import architecture, published
from profiles.nxdt.published import Published
from profiles.nxdt.rules import is_hugging_face
from profiles.nxdt.translation import Effect, Translation

TYPE, DIVISOR = "data.tokenizer.type", "model.make_vocab_size_divisible_by"
GPT2 = "GPT2BPETokenizer"
# Vocabulary sizes by a substring of the tokenizer's name; the first match counts.
NAMED = {"gpt2": 50257, "llama3": 128256, "mixtral": 32000, "mistral": 32000, "llama": 32000}
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def translate(translation: Translation, config: Path | None, model: Published | None) -> None:
    """Set the tokenizer, and for Megatron's model the vocabulary size.

    Args:
        config: config.json given by the user.
        model: the published model whose numbers are used; None if they are the config's own.
    """
    _source(translation, config, model)
    for name in (
        "library",
        "delimiter",
        "sentencepiece_legacy",
        "use_fast",
        "model",
        "vocab_file",
        "merge_file",
    ):
        translation.report(f"data.tokenizer.{name}", Effect.HARMLESS, "read from the tokenizer's files")
    if not is_hugging_face(translation):
        _padded_size(translation, config)


def _source(translation: Translation, config: Path | None, model: Published | None) -> None:
    named = translation.path(TYPE) or translation.path("data.tokenizer")
    key = TYPE if translation.has(TYPE) else "data.tokenizer"
    if named is None and translation.has(key):  # unresolved
        translation.report(key, Effect.TO_DO, "set tokenizer.source")
    files = [translation.path(f"data.tokenizer.{name}") for name in ("vocab_file", "merge_file", "model")]
    folders = {str(Path(file).parent) for file in files if file}
    if folders and (named is None or "/" not in named):
        if len(folders) > 1:
            note = f"its files are in {len(folders)} folders; copy them to one and set tokenizer.source"
            translation.translate(key, {"tokenizer.source": folders.pop()}, note, Effect.TO_DO)
            return
        named = folders.pop()
    elif named == GPT2:
        named = "openai-community/gpt2"
    if named is not None:
        absent = named.startswith(("/", ".", "~")) and not state_files.is_dir(Path(named))
        note = "not on this machine" if absent else ""
        translation.translate(
            key, {"tokenizer.source": named}, note, Effect.TO_DO if absent else Effect.TRANSLATED
        )
        return
    path = config or translation.path("model.model_config")
    folder = translation.folder / Path(path) if path else None
    if folder is not None:
        folder = folder if state_files.is_dir(folder) else folder.parent
    if folder is not None and (model is None or any(state_files.exists(folder / name) for name in FILES)):
        translation.ours["tokenizer.source"] = str(folder)
    elif model is not None:
        line = translation.lines.get("model.model_config")
        note = f"{line.note}; its tokenizer is used too" if line else ""
        values = {"tokenizer.source": model.tokenizer}
        translation.translate("model.model_config", values, note, Effect.TO_DO)
    else:
        translation.report(TYPE, Effect.ERROR, "is missing; no other key names a tokenizer")


def _padded_size(translation: Translation, config: Path | None) -> None:
    size, origin, effect = _size(translation, config)
    if size is None:
        note = "is missing, and the tokenizer that determines it is not on this machine; set it, or pass --config FILE"
        translation.report("model.vocab_size", Effect.ERROR, note)
        return
    tensor = translation.integer("distributed_strategy.tensor_model_parallel_size", 1)
    multiple = translation.integer(DIVISOR, 128) * tensor
    padded = -(-size // multiple) * multiple
    note = f"{size} tokens {origin}, padded to a multiple of {multiple}"
    key = "model.vocab_size" if translation.has("model.vocab_size") else DIVISOR
    translation.translate(key, {"model.vocab_size": padded}, note, effect)
    translation.ours["model.vocab_size"] = padded
    if effect is Effect.TRANSLATED:
        translation.ours["tokenizer.vocabulary_size"] = size


def _size(translation: Translation, config: Path | None) -> tuple[int | None, str, Effect]:
    """Vocabulary size, its origin, and TO_DO if the user should check it."""
    sure, guessed = Effect.TRANSLATED, Effect.TO_DO
    if translation.has("model.vocab_size"):
        return translation.integer("model.vocab_size", 1), "as stated", sure
    if config is not None:
        return read_config_json(config, "--config")["vocab_size"], f"of {config}", sure
    files = (
        translation.path("data.tokenizer.vocab_file"),
        translation.path(TYPE) or translation.path("data.tokenizer"),
    )
    for file in files:
        if file and (size := _count(Path(file))):
            return size, f"in {file}", sure
    named = str(translation.path("data.tokenizer.model") or files[1] or "")
    if named == GPT2:
        return NAMED["gpt2"], "of GPT-2", sure
    plain = "".join(letter for letter in Path(named).name.lower() if letter.isalnum())
    for name, size in NAMED.items():
        if name in plain:
            return (
                size,
                f"of a tokenizer named {Path(named).name}, which is not on this machine: check it",
                guessed,
            )
    numbers = {name: value for name, value in architecture.stated(translation).items() if name != "norm_eps"}
    if len(matches := published.find(numbers)) == 1:
        match = matches[0].published
        return match.model.vocab_size, f"of {match.name}, which has the same dimensions: check it", guessed
    return None, "", guessed


def _count(path: Path) -> int | None:
    """Tokens in a vocabulary file or a tokenizer's folder; None if unknown or not on this machine."""
    try:
        if state_files.is_file(path):
            return len(json.loads(state_files.contents(path)))
        if data := state_files.read(path / "tokenizer.json"):
            tokenizer = json.loads(data)
            vocabulary: Any = tokenizer["model"]["vocab"]
            ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
            largest: int = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))])
            return 1 + largest
        if data := state_files.read(path / "config.json"):
            size = json.loads(data).get("vocab_size")
            return size if isinstance(size, int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
