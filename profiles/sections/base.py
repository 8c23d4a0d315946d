"""Base class of all sections, and the types of their numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
LARGEST = 2**24  # of a tensor dimension, so that products of two fit 64-bit integers
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no type conversion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )
