"""Choices of conversion's options: formats, NxD layouts, forms of Q, K and V. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

NxDLayout = Literal["trn1", "trn2"]
QKVForm = Literal["separate", "fused", "coalesced"]
MODEL_FORMATS = ("hf", "nxd", "trainshed")
FORMATS = (*MODEL_FORMATS, "peft")  # PEFT's is for LoRA adapters only
NXD_LAYOUTS = get_args(NxDLayout)
QKV_FORM_NAMES = get_args(QKVForm)
