"""Data sources (token-id folders, Megatron's indexed files, fine-tuning records) and sequence length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from profiles.files import folders, state_files
from profiles.nxdt.translation import Effect, Translation

PREFIX, SPLITS = "data.data_prefix", "data.splits_string"
RESETS = ("data.reset_position_ids", "data.reset_attention_mask")


def translate(translation: Translation, objective: str) -> None:
    """Set the sources, the validation split, document masks and the sequence length."""
    _sequence_length(translation)
    _document_masks(translation, objective)
    sources = (
        _megatron(translation)
        if translation.has(PREFIX) or translation.has_section(PREFIX)
        else _folders(translation, objective)
    )
    if all(source.get("use") == "validation" for source in sources):
        note = "no other key names training data; set data.sources"
        translation.report("data.train_dir", Effect.TO_DO, note)
        use = {"use": "train"} if sources else {}
        sources = [
            _source(str(translation.get("data.train_dir", "TRAINING_DATA")), objective) | use,
            *sources,
        ]
    translation.ours["data.sources"] = sources
    translation.report("data.test_dir", Effect.HARMLESS, "there is no test split")
    if (count := translation.get("data.dev_choose_samples")) is not None:
        note = f"all records are used; to use only the first {count}, cut the files: head -n {count}"
        translation.report("data.dev_choose_samples", Effect.TO_DO, note)


def _sequence_length(translation: Translation) -> None:
    """data.seq_length takes precedence; model.encoder_seq_length is that of samples already cut to it."""
    data, model = "data.seq_length", "model.encoder_seq_length"
    for key in (model, data):
        if translation.has(key):
            translation.translate(key, {"train.sequence_length": translation.integer(key, 1)})
    if translation.has(data) and translation.get(model, translation.get(data)) != translation.get(data):
        translation.report(model, Effect.DIFFERS, f"samples have {data} {translation.get(data)}")


def _document_masks(translation: Translation, objective: str) -> None:
    positions, attention = (translation.flag(key, False) for key in RESETS)
    if positions != attention:
        note = "is not supported without its counterpart: train.document_masks resets positions and attention together"
        translation.report(RESETS[0 if positions else 1], Effect.ERROR, note)
    for key in RESETS:
        if objective == "pretrain":
            translation.translate(key, {"train.document_masks": attention})
        else:
            translation.report(key, Effect.HARMLESS, "packed records always have document masks")


def _megatron(translation: Translation) -> list[dict[str, Any]]:
    """Sources from [weight, prefix, weight, prefix, …] or [prefix, …], or from such lists by split."""
    sources: list[dict[str, Any]] = []
    if PREFIX in translation.theirs:
        sources = _prefixes(translation, PREFIX, "split")
    for split, use in (("train", "train"), ("validation", "validation"), ("test", None)):
        key = f"{PREFIX}.{split}"
        if use is None:
            translation.report(key, Effect.HARMLESS, "there is no test split")
        elif translation.has(key):
            sources += _prefixes(translation, key, use)
    if translation.has(SPLITS):
        _splits(translation)
    return sources


def _prefixes(translation: Translation, key: str, use: str) -> list[dict[str, Any]]:
    entries = translation.get(key)
    entries = entries if isinstance(entries, list) else [entries]
    weights: list[float] = []
    prefixes: list[str] = []
    for entry in entries:
        try:
            weights.append(float(entry))
        except (TypeError, ValueError):
            prefixes.append(str(entry))
    if not prefixes or len(weights) not in (0, len(prefixes)):
        translation.report(key, Effect.ERROR, "is not a list of weights and prefixes, [weight, prefix, …]")
        return []
    sources: list[dict[str, Any]] = []
    for number, prefix in enumerate(prefixes):
        source: dict[str, Any] = {"kind": "megatron", "path": prefix, "use": use}
        if len(prefixes) > 1 and weights and use != "validation":
            source["weight"] = weights[number]
        if use == "split":
            del source["use"]
        sources.append(source)
    absent = [prefix for prefix in prefixes if "://" not in prefix and not _has_index(prefix)]
    note = "the common prefix of .bin and .idx"
    note = f"{absent[0]}.idx and .bin were not found on this machine" if absent else note
    translation.translate(key, {"data.sources": []}, note, Effect.TO_DO if absent else Effect.TRANSLATED)
    return sources


def _has_index(prefix: str) -> bool:
    """Whether an index of this prefix is found here; not where its folders are missing, or closed."""
    try:
        pattern = os.path.join(os.getcwd(), f"{prefix}*.idx")[1:]
        return next(folders.find(Path("/"), pattern), None) is not None
    except OSError:
        return False


def _splits(translation: Translation) -> None:
    """Shares of train, validation and test documents: all but the training share is for validation."""
    try:
        shares = [float(share) for share in str(translation.get(SPLITS)).replace("/", ",").split(",")]
        fraction = round(1 - shares[0] / sum(shares), 6)
    except (ValueError, ZeroDivisionError):
        translation.report(SPLITS, Effect.ERROR, "is not a list of shares such as 980,10,10")
        return
    note = "the last documents are held out, as in Megatron; validation and test are one split"
    if not fraction:
        fraction, note = 0.01, "a hundredth of the documents is held out: every run is evaluated"
    translation.translate(SPLITS, {"data.validation_fraction": fraction}, note)


def _folders(translation: Translation, objective: str) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = []
    for key, use in (("data.train_dir", "train"), ("data.val_dir", "validation")):
        path = translation.path(key)
        if path is None:
            held_out = "a hundredth of the documents is held out for validation"
            note = held_out if use == "validation" else "not set"
            translation.report(key, Effect.HARMLESS, note)
            continue
        sources.append({**_source(path, objective), "use": use})
        absent = "://" not in path and not state_files.exists(Path(path))
        note = "token ids in its column input_ids" if objective == "pretrain" else "records"
        note = "not on this machine" if absent else note
        translation.translate(key, {"data.sources": []}, note, Effect.TO_DO if absent else Effect.TRANSLATED)
    if [source["use"] for source in sources] == ["train"]:
        sources[0].pop("use")
    return sources


def _source(path: str, objective: str) -> dict[str, Any]:
    """A source of token ids to pretrain on, or of records."""
    if objective == "pretrain":
        return {"kind": "tokens", "path": path, "text": "input_ids"}
    return {"kind": "files", "path": path}
