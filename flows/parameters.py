"""The parameters of flows as Prefect's form shows them: shipped profiles to choose from, or a path."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from profiles import resolve

ProfileName = Annotated[
    Annotated[Literal[tuple(resolve.names())], Field(title="shipped profile")]  # type: ignore[valid-type]
    | Annotated[str, Field(title="path of a YAML file")],
    Field(description="One of the profiles that come with Trainshed, or the path of a YAML file."),
]

RunName = (
    Annotated[str, Field(title="a name of its own")] | Annotated[None, Field(title="the profile's name")]
)
