"""Mixture file: small runs of a target profile under sampled source weights."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from profiles.experiments.experiment import SmallRuns
from profiles.sections.base import Count, Section, Size
from profiles.sections.data import WORTHWHILE_PASSES


class ProxySize(Section):
    """The size and length of all proxies, in the target's family."""

    hidden_size: Size = Field(description="width; a multiple of the target's head size, which proxies keep")
    num_hidden_layers: Count | None = Field(default=None, description="depth; null: the target's")
    tokens_per_parameter: float = Field(
        gt=0, description="length: training tokens / N, the multiply-adds per token"
    )


class ProxyGroup(Section):
    """Proxies with the same sources: one with the natural mixture, the others with sampled weights."""

    sources: list[str] | None = Field(
        default=None,
        min_length=2,
        description="names of the training sources; null: all. A group made before a source was added lists the earlier ones",
    )
    count: Count | None = Field(
        default=None, description="number of proxies; null: 4 for each source that no earlier group has"
    )


class Mixture(SmallRuns):
    """A mixture file."""

    page: ClassVar[str] = "docs/training/mixtures.md"

    proxy: ProxySize = Field(description="size and length of each proxy")
    proxy_overrides: list[str] = Field(
        default=[], description="KEY=VALUE for the proxies only, such as fewer devices; not the mathematics"
    )
    proxies: list[ProxyGroup] = Field(
        default=[ProxyGroup()], min_length=1, description="groups of proxies; the last one has all sources"
    )
    objective: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="weights of the sources' held-out losses in the minimised mean; {}: the natural mixture's",
    )
    minimum_weight: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="minimum weight of a source in sampled and proposed mixtures; null: 0.1 / number of sources",
    )
    maximum_passes: Annotated[float, Field(gt=0)] | None = Field(
        default=float(WORTHWHILE_PASSES),
        description="maximum passes of the target over a source (arXiv 2305.16264); null: no limit",
    )
