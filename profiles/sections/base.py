"""Base class of all sections, and the types of their numbers and names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field

from profiles.sections.roles import Role

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
MAX_SIZE = 2**24  # tensor dimension; products of two fit 64-bit integers
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Natural = Annotated[int, Field(ge=0, le=2**31 - 1)]
Wide = Annotated[int, Field(ge=1, le=2**63 - 1)]
Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
T = TypeVar("T")
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
CONDITION = r"^[A-Za-z_]\w* *(<=|>=) *[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no type conversion.

    The docstring below a key is its description in docs/profiles.md.
    """

    default_role: ClassVar[Role]  # of the keys whose annotations have none
    page: ClassVar[str] = "docs/profiles.md"  # lists the keys; of the section at the top of a file

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )


def required(value: T | None) -> T:
    """A value that is set wherever it is read, such as a key that a profile's rules require."""
    assert value is not None
    return value


def sections_in(annotation: Any) -> list[type[Section]]:
    """The section classes in a type: the type itself, a list's entries, a union's members."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]
