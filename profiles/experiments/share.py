"""Share file: small rounds of a continual series at several shares of replay."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from profiles.errors import ProfileError
from profiles.experiments.experiment import SmallRuns
from profiles.experiments.mixture import ProxySize
from profiles.sections.base import NAME, Fraction, Rate


class Share(SmallRuns):
    """A share file."""

    page: ClassVar[str] = "docs/training/continual.md"

    series: Annotated[str, Field(pattern=f"^{NAME}$")] | None = Field(
        default=None, description="name of the series, that of its first run; null: the target's"
    )
    round_overrides: list[str] = Field(
        default=["train.steps=null", "train.epochs=1"],
        description="KEY=VALUE for the rounds only, as in their deployment",
    )
    proxy: ProxySize = Field(
        description="size of each proxy, and length of the one that stands for the promoted model; rounds of it are shorter in "
        "proportion"
    )
    proxy_overrides: list[str] = Field(
        default=[], description="KEY=VALUE for the proxies only, such as fewer devices; not the mathematics"
    )
    shares: list[Fraction] = Field(
        default=[0.0, 0.02, 0.05, 0.1, 0.2, 0.4],
        min_length=4,
        description="shares of replayed tokens, one proxy each",
    )
    objective: dict[Literal["old", "new"], Rate] = Field(
        default={"old": 1.0, "new": 1.0},
        description="weights of the old and the new held-out loss in the minimised mean",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(later <= share for share, later in pairwise(self.shares)):
            reason = "is not in increasing order"
            raise ProfileError("shares", self.shares, reason, [sorted(set(self.shares))])
        if not any(self.objective.values()):
            raise ProfileError("objective", None, "gives both losses weight 0")
        return self
