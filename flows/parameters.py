"""Flow parameter types for the forms of Prefect's UI: a choice of shipped profiles, or a path."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from profiles import resolve

SHIPPED = tuple(resolve.names())

ProfileName = Annotated[
    Annotated[Literal[SHIPPED], Field(title="shipped profile")]  # type: ignore[valid-type]
    | Annotated[str, Field(title="path of a YAML file")],
    Field(description="A shipped profile's name, or the path of a YAML file."),
]

ProfileNames = Annotated[list[ProfileName], Field(min_length=1, title="profiles, in order")]

# The form offers no choice of "None"; Python callers may still pass None.
_Optional = Annotated[str, BeforeValidator(lambda value: value or "")]

# The form's own field "Run Name" names only Prefect's flow run. Prefect would replace a title set by `Field(title=...)`.
RunName = Annotated[_Optional, Field(json_schema_extra={"title": "name in the store"})]

NamePrefix = Annotated[_Optional, Field(json_schema_extra={"title": "prefix of the names in the store"})]

ForkedFrom = Annotated[_Optional, Field(json_schema_extra={"title": "fork of"})]

LastStep = Annotated[_Optional, Field(json_schema_extra={"title": "last step"})]
