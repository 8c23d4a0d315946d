"""What conversion shares with code that imports no torch: choices of options, NxD's newest checkpoint."""

from __future__ import annotations

from typing import Literal, get_args

NxDLayout = Literal["trn1", "trn2"]
QKVForm = Literal["separate", "fused", "coalesced"]
MODEL_FORMATS = ("hf", "nxd", "trainshed")
FORMATS = (*MODEL_FORMATS, "peft")  # PEFT's is for LoRA adapters only
NXD_LAYOUTS = get_args(NxDLayout)
QKV_FORM_NAMES = get_args(QKVForm)
NEWEST = "newest"  # file with the name of an NxD training run's newest checkpoint


def read_newest(data: bytes, path: str) -> str:
    """The name in the contents of NEWEST; `path` is for errors. Raises ValueError."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: corrupted: the name of a checkpoint is expected, and it is not UTF-8"
        ) from error
