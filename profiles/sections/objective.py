"""The sections `objective` and `lora`, and what distinguishes the objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from profiles.sections import roles
from profiles.sections.base import Count, Fraction, Section

# Layers that `lora.targets` may name, with the projections in each, which it may name too, as Hugging Face does.
LORA_PROJECTIONS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
# Each target's layer.
LORA_LAYERS = {target: layer for layer, parts in LORA_PROJECTIONS.items() for target in (layer, *parts)}
if TYPE_CHECKING:
    LoraTarget = str  # a type checker cannot read choices from LORA_LAYERS
else:
    LoraTarget = Literal[*LORA_PROJECTIONS, *(part for parts in LORA_PROJECTIONS.values() for part in parts)]

TEMPLATES = ("chatml", "llama3")  # chat templates by name
PAIR_METRICS = ("accuracy", "margin", "kl")  # means over preference pairs in an evaluation
_RECORDS = frozenset({"template", "packing", "too_long"})  # keys of `objective` for records, and for pairs
_PAIRS = _RECORDS | {"maximum_prompt_length", "truncation", "beta"}


@dataclass(frozen=True)
class Traits:
    """What distinguishes an objective: its samples, keys and loss."""

    # Texts, all of whose tokens are trained on; records, of which the answers are; or pairs of records that differ in the answer.
    sample_kind: Literal["texts", "records", "pairs"]
    keys: frozenset[str] = frozenset()  # of `objective` that have an effect, besides `kind`
    packs: bool = False  # records, if `packing` is null
    needs_reference: bool = False  # its loss is relative to a reference model, the initial weights
    odds_ratio: bool = False  # its loss is that of ORPO, which covers prompts too
    no_rounds: str = ""  # why continual pretraining does not support it; empty: it does

    @property
    def reads_records(self) -> bool:
        """Whether documents are records with fields, rather than texts."""
        return self.sample_kind != "texts"

    @property
    def pairs(self) -> bool:
        """Whether a sample is a preference pair, whose loss is not one of tokens."""
        return self.sample_kind == "pairs"

    @property
    def rows(self) -> int:
        """Sequences per sample."""
        return 2 if self.pairs else 1


OBJECTIVES: Mapping[str, Traits] = {
    "pretrain": Traits("texts"),
    "sft": Traits("records", _RECORDS | {"turns"}, packs=True),
    "dpo": Traits(
        "pairs",
        _PAIRS | {"loss", "precompute_reference", "label_smoothing"},
        needs_reference=True,
        no_rounds="its loss is relative to a reference model, which each round would replace, so that no gate could compare the "
        "loss before and after",
    ),
    "orpo": Traits(
        "pairs",
        _PAIRS,
        odds_ratio=True,
        no_rounds="its loss is of the odds of pairs, and the gates on old and new text are on losses of tokens",
    ),
}


class Objective(Section):
    """Training objective: continue text, answer prompts, or prefer one answer to another."""

    default_role = roles.MATHEMATICS

    kind: Annotated[Literal["pretrain", "sft", "dpo", "orpo"], roles.OBJECTIVE] = "pretrain"
    """pretrain: continue text; sft: supervised fine-tuning on completions (records with messages, prompt and completion, or
    instruction, input or both with output); dpo, orpo: preference pairs (prompt, chosen, rejected)"""
    template: Annotated[str | None, roles.RECORDS] = Field(default=None, min_length=1)
    """sft, dpo, orpo: chat template of messages: chatml, llama3 or a Jinja file; null: the tokenizer's"""
    turns: Annotated[Literal["all", "last"], roles.RECORDS] = "all"
    """sft: turns of the assistant that the loss covers; last: each conversation's last one, for templates that render earlier
    turns differently, such as those of Qwen3 and GPT-OSS"""
    packing: Annotated[bool | None, roles.PACKING] = None
    """sft, dpo, orpo: pack records into samples, with document masks; false: one record a sample, padded; null: true for sft,
    false for pairs. A sample is one row of train.sequence_length, of pairs two"""
    too_long: Annotated[Literal["truncate", "drop"], roles.RECORDS] = "truncate"
    """sft, dpo, orpo: what to do with records longer than train.sequence_length"""
    maximum_prompt_length: Annotated[Count | None, roles.RECORDS] = None
    """dpo, orpo: tokens that a prompt keeps if its record is too long; null: half of train.sequence_length"""
    truncation: Annotated[Literal["keep_start", "keep_end"], roles.RECORDS] = "keep_end"
    """dpo, orpo: which end of a prompt is kept if its record is too long"""
    beta: float = Field(default=0.1, gt=0)
    """dpo: weight of the KL penalty; orpo: weight of the odds-ratio loss"""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """dpo: loss of a pair's margin"""
    precompute_reference: Annotated[bool, roles.REFERENCE] = True
    """dpo: compute the reference model's log-probabilities once, in a step of the flow; false: in each training step, with a
    frozen copy of the initial weights, or with LoRA without the updates"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo, sigmoid: assumed probability that a pair's preference is wrong"""

    @property
    def traits(self) -> Traits:
        """What distinguishes this kind of objective from others."""
        return OBJECTIVES[self.kind]


class Lora(Section):
    """LoRA (arXiv 2106.09685): train low-rank updates of some weights and freeze the others."""

    default_role = roles.COMPILED_MATHEMATICS

    rank: Count | None = None
    """rank of the updates; null: no LoRA, all weights are trained"""
    alpha: float = Field(default=16.0, gt=0)
    """scale of the updates: alpha / rank"""
    dropout: Fraction = 0.0
    """dropout of the updates' inputs, in training"""
    targets: list[LoraTarget] = Field(default=["qkv", "output", "gate_up", "down"], min_length=1)
    """layers with updates: qkv, output (attention's output projection, o_proj), gate_up, down, or their projections; the parts
    of qkv and of gate_up share the first factor, unless named individually"""
