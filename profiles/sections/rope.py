"""Kinds of RoPE scaling for `model.rope_scaling`; modeling/models/rope.py has the formulas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from profiles.errors import ProfileError
from profiles.sections import roles
from profiles.sections.base import Count, Section


class LinearRope(Section):
    """Linear RoPE scaling: position interpolation (arXiv 2306.15595)."""

    default_role = roles.MODEL

    rope_type: Literal["linear"]
    """kind of scaling"""
    factor: float = Field(ge=1)
    """divides every frequency"""


class Llama3Rope(Section):
    """Llama 3.1 RoPE scaling: only low frequencies are scaled."""

    default_role = roles.MODEL

    rope_type: Literal["llama3"]
    """kind of scaling"""
    factor: float = Field(ge=1)
    """divides low frequencies"""
    low_freq_factor: float = Field(gt=0)
    """wavelengths above original length / this are scaled"""
    high_freq_factor: float = Field(gt=0)
    """wavelengths below original length / this are unchanged"""
    original_max_position_embeddings: Count
    """context length of pretraining"""

    @model_validator(mode="after")
    def _ordered(self) -> Llama3Rope:
        if self.low_freq_factor >= self.high_freq_factor:
            reason = f"is not above low_freq_factor {self.low_freq_factor}"
            raise ProfileError("high_freq_factor", self.high_freq_factor, reason)
        return self


class YarnRope(Section):
    """YaRN RoPE scaling (arXiv 2309.00071): low frequencies are divided, queries and keys scaled."""

    default_role = roles.MODEL

    rope_type: Literal["yarn"]
    """kind of scaling"""
    factor: float = Field(ge=1)
    """divides low frequencies"""
    beta_fast: float = Field(default=32.0, gt=0)
    """dimensions with more rotations than this are unchanged"""
    beta_slow: float = Field(default=1.0, gt=0)
    """dimensions with fewer rotations than this are divided by the factor"""
    truncate: bool = True
    """round the bounds between these dimensions to whole numbers"""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """multiplies queries and keys; null: 0.1 · ln(factor) + 1"""
    mscale: Annotated[float, Field(ge=0)] | None = None
    """weight of ln(factor) in the default of attention_factor (deepseek_v3)"""
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    """weight of ln(factor) in the divisor of that default; its square multiplies attention scores (deepseek_v3)"""
    original_max_position_embeddings: Count
    """context length of pretraining"""


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope, Field(discriminator="rope_type")]
