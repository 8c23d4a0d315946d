"""Data sources (token-id folders, Megatron's indexed files, fine-tuning records) and sequence length."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from profiles.nxdt.translation import Effect, Translation

PREFIX, SPLITS = "data.data_prefix", "data.splits_string"
RESETS = ("data.reset_position_ids", "data.reset_attention_mask")


def translate(found: Translation, objective: str) -> None:
    """Set the sources, the validation split, document masks and the sequence length."""
    _sequence_length(found)
    _document_masks(found, objective)
    sources = (
        _megatron(found) if found.has(PREFIX) or found.has_section(PREFIX) else _folders(found, objective)
    )
    if all(source.get("use") == "validation" for source in sources):
        note = "no other key names training data; set data.sources"
        found.report("data.train_dir", Effect.TO_DO, note)
        use = {"use": "train"} if sources else {}
        sources = [_source(str(found.get("data.train_dir", "TRAINING_DATA")), objective) | use, *sources]
    found.ours["data.sources"] = sources
    found.report("data.test_dir", Effect.HARMLESS, "there is no test split")
    if (count := found.get("data.dev_choose_samples")) is not None:
        note = f"all records are used; to use only the first {count}, cut the files: head -n {count}"
        found.report("data.dev_choose_samples", Effect.TO_DO, note)


def _sequence_length(found: Translation) -> None:
    """data.seq_length takes precedence; model.encoder_seq_length is that of samples already cut to it."""
    data, model = "data.seq_length", "model.encoder_seq_length"
    for key in (model, data):
        if found.has(key):
            found.translate(key, {"train.sequence_length": found.integer(key, 1)})
    if found.has(data) and found.get(model, found.get(data)) != found.get(data):
        found.report(model, Effect.DIFFERS, f"samples have {data} {found.get(data)}")


def _document_masks(found: Translation, objective: str) -> None:
    positions, attention = (found.flag(key, False) for key in RESETS)
    if positions != attention:
        note = "is not supported without its counterpart: train.document_masks resets positions and attention together"
        found.report(RESETS[0 if positions else 1], Effect.ERROR, note)
    for key in RESETS:
        if objective == "pretrain":
            found.translate(key, {"train.document_masks": attention})
        else:
            found.report(key, Effect.HARMLESS, "packed records always have document masks")


def _megatron(found: Translation) -> list[dict[str, Any]]:
    """Sources from [weight, prefix, weight, prefix, …] or [prefix, …], or from such lists by split."""
    sources: list[dict[str, Any]] = []
    if PREFIX in found.theirs:
        sources = _prefixes(found, PREFIX, "split")
    for split, use in (("train", "train"), ("validation", "validation"), ("test", None)):
        key = f"{PREFIX}.{split}"
        if use is None:
            found.report(key, Effect.HARMLESS, "there is no test split")
        elif found.has(key):
            sources += _prefixes(found, key, use)
    if found.has(SPLITS):
        _splits(found)
    return sources


def _prefixes(found: Translation, key: str, use: str) -> list[dict[str, Any]]:
    entries = found.get(key)
    entries = entries if isinstance(entries, list) else [entries]
    weights: list[float] = []
    prefixes: list[str] = []
    for entry in entries:
        try:
            weights.append(float(entry))
        except (TypeError, ValueError):
            prefixes.append(str(entry))
    if not prefixes or len(weights) not in (0, len(prefixes)):
        found.report(key, Effect.ERROR, "is not a list of weights and prefixes, [weight, prefix, …]")
        return []
    sources: list[dict[str, Any]] = []
    for number, prefix in enumerate(prefixes):
        source: dict[str, Any] = {"kind": "megatron", "path": prefix, "use": use}
        if len(prefixes) > 1 and weights and use != "validation":
            source["weight"] = weights[number]
        if use == "split":
            del source["use"]
        sources.append(source)
    absent = [prefix for prefix in prefixes if "://" not in prefix and not glob.glob(f"{prefix}*.idx")]
    note = "the common prefix of .bin and .idx"
    note = f"{absent[0]}.idx and .bin are not on this machine" if absent else note
    found.translate(key, {"data.sources": []}, note, Effect.TO_DO if absent else Effect.TRANSLATED)
    return sources


def _splits(found: Translation) -> None:
    """Shares of train, validation and test documents: all but the training share is for validation."""
    try:
        shares = [float(share) for share in str(found.get(SPLITS)).replace("/", ",").split(",")]
        fraction = round(1 - shares[0] / sum(shares), 6)
    except (ValueError, ZeroDivisionError):
        found.report(SPLITS, Effect.ERROR, "is not a list of shares such as 980,10,10")
        return
    note = "the last documents are held out, as in Megatron; validation and test are one split"
    if not fraction:
        fraction, note = 0.01, "a hundredth of the documents is held out: every run is evaluated"
    found.translate(SPLITS, {"data.validation_fraction": fraction}, note)


def _folders(found: Translation, objective: str) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = []
    for key, use in (("data.train_dir", "train"), ("data.val_dir", "validation")):
        path = found.path(key)
        if path is None:
            held_out = "a hundredth of the documents is held out for validation"
            note = held_out if use == "validation" else "not set"
            found.report(key, Effect.HARMLESS, note)
            continue
        sources.append({**_source(path, objective), "use": use})
        absent = "://" not in path and not Path(path).exists()
        note = "token ids in its column input_ids" if objective == "pretrain" else "records"
        note = "not on this machine" if absent else note
        found.translate(key, {"data.sources": []}, note, Effect.TO_DO if absent else Effect.TRANSLATED)
    if [source["use"] for source in sources] == ["train"]:
        sources[0].pop("use")
    return sources


def _source(path: str, objective: str) -> dict[str, Any]:
    """A source of token ids to pretrain on, or of records."""
    if objective == "pretrain":
        return {"kind": "tokens", "path": path, "text": "input_ids"}
    return {"kind": "files", "path": path}
