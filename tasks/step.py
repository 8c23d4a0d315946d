"""The protocol of a step: one node of a flow's graph, which makes one artifact.

A step is a dataclass whose fields are the artifacts that it needs. Its key determines its result, so an artifact of that
kind and key that is complete in the store is reused. Flows run steps as Prefect tasks (`flows/runner/`); without a flow,
`step.run(context)` does the same in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from modeling.cores import usable_cores
from profiles.schema import Profile
from tasks.inputs import Inputs, resolve
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store

T = TypeVar("T")
R = TypeVar("R")
Rows = Sequence[Mapping[str, Any]]


def map_in_threads(function: Callable[[T], R], items: Sequence[T], names: Sequence[str]) -> Iterable[R]:
    """Map a function over items on one thread per core; yields the results in order of the items."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        yield from pool.map(function, items)


@dataclass(frozen=True)
class Context:
    """What a flow provides to its steps."""

    profile: Profile
    store: Store
    folder: Path | None = None  # the run folder; None until the run is open
    # What the profile's references resolve to; None: resolved on first use.
    resolved: Inputs | None = None
    # Hugging Face token, never logged or stored; None uses the environment's HF_TOKEN.
    token: str | None = field(default=None, repr=False)
    flow_run: str = ""  # id of the flow run, recorded with the jobs that it starts
    # Reports what the step is doing and the fraction done (0 to 1, or None if unknown).
    progress: Callable[[str, float | None], None] = lambda message, fraction: None
    watch: Callable[[], None] = lambda: None  # called several times a second while a job of the step runs
    # Publishes a table (key, title, rows) as an artifact of the flow run.
    table: Callable[[str, str, Rows], None] = lambda key, title, rows: None
    # Calls a function for each item concurrently; takes the function, the items and their display names.
    map: Callable[[Callable[[T], R], Sequence[T], Sequence[str]], Iterable[R]] = map_in_threads

    @cached_property
    def inputs(self) -> Inputs:
        """What the run is made from: the resolved tokenizer, sources and initial weights."""
        return self.resolved or resolve(self.profile, self.store, self.token)

    @property
    def run_folder(self) -> Path:
        """The run folder, which must be open."""
        if self.folder is None:
            raise RuntimeError("the run folder is not open yet")
        return self.folder


class Step(ABC):
    """One step. Subclasses set `kind` and `name`, and implement `key` and `make`."""

    kind: ClassVar[str]  # artifact kind, a folder of the store
    name: ClassVar[str]  # name in logs, reports and Prefect's UI

    def title(self, profile: Profile) -> str:
        """Name of the task run in Prefect's UI."""
        return f"{self.name} {profile.name}"

    def skip_reason(self, profile: Profile) -> str | None:
        """Why the profile does not need this step; None if it does."""
        return None

    @abstractmethod
    def key(self, context: Context) -> str | None:
        """Hash of everything that determines the artifact; None if the step runs every time."""

    @abstractmethod
    def make(self, context: Context, key: str) -> Artifact:
        """Make and publish the artifact; called only if the store lacks it."""

    @classmethod
    def id(cls, key: str) -> ArtifactId:
        """Name of the artifact of this key."""
        return ArtifactId(cls.kind, key)

    def find(self, context: Context, key: str) -> Artifact | None:
        """The artifact of this key, if it is in the store and complete."""
        return context.store.artifacts.find(self.id(key))

    def run(self, context: Context, key: str | None = None) -> Artifact:
        """Return the artifact, made under its lock unless stored. Pass `key` if it is already computed."""
        key = key or self.key(context)
        if key is None:
            return self.make(context, "")
        with context.store.artifacts.lock(self.id(key)):
            return self.find(context, key) or self.make(context, key)

    def describe(self, summary: Mapping[str, Any]) -> str:
        """The result in one line, from the artifact's summary."""
        return ""

    def may_retry(self, context: Context) -> Callable[[BaseException], float | None] | None:
        """Return a function that decides after each failure whether to retry; None retries twice.

        Its result: how many seconds to wait, in addition to the usual pause before a retry; None: do not retry.
        """
        return None
