"""Types of flow parameters, from which Prefect's UI makes its form: a choice of shipped profiles, or a path."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from profiles import resolve

ProfileName = Annotated[
    Annotated[Literal[tuple(resolve.names())], Field(title="shipped profile")]  # type: ignore[valid-type]
    | Annotated[str, Field(title="path of a YAML file")],
    Field(description="A shipped profile's name, or the path of a YAML file."),
]

RunName = Annotated[str, Field(title="name")] | Annotated[None, Field(title="the profile's name")]

ForkedFrom = Annotated[str, Field(title="RUN or RUN@STEP")] | Annotated[None, Field(title="no other run")]
