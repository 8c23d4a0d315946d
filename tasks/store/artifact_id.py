"""Name of an artifact: what kind it is and the key of its contents."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.store.backends.backend import NAME, checked_name


@dataclass(frozen=True, order=True)
class ArtifactId:
    """Name of an artifact, the same in every store that has it."""

    kind: str  # which step made it
    key: str  # hash of everything that determines its contents

    @classmethod
    def parse(cls, text: str) -> ArtifactId:
        """The id that is written `<kind>/<key>`. Raises ValueError for another text."""
        kind, _, key = text.partition("/")
        if not (NAME.fullmatch(kind) and NAME.fullmatch(key)):
            raise ValueError(f"{text!r}: is not the name of an artifact; expected <kind>/<key>")
        return cls(kind, key)

    @property
    def path(self) -> str:
        """Path of the artifact's folder in a store. Raises ValueError for an invalid kind or key."""
        return f"artifacts/{checked_name(self.kind)}/{checked_name(self.key)}"

    @property
    def file_name(self) -> str:
        """Name of the artifact's locks and records, which are files of one folder."""
        return f"{self.kind}-{self.key}"

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"
