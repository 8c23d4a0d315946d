"""The section `continual`: rounds of continual pretraining."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from profiles.errors import ProfileError
from profiles.sections import roles
from profiles.sections.base import NAME, Count, Fraction, Rate, Section
from profiles.sections.data import Source

GATED = rf"^(old|new|first|stand-in|round-[1-9]\d*|run:.+|source:.+|task:{NAME})$"
LIMITS = ("rise_at_most", "fall_at_least", "at_least")


class Gate(Section):
    """A condition on a round's evaluation."""

    default_role = roles.NONE

    on: str = Field(pattern=GATED)
    """old: the held-out text of the first run, of runs that it started from and of all earlier rounds; new: of the round's new
    data; first, round-N, stand-in: of the first run, round N or continual.stand_in; run:NAME: of one that it started from;
    source:NAME: of a source, by its name; task:NAME: the score of an lm-eval task"""
    rise_at_most: Rate | None = None
    """largest increase over the promoted model's loss, in nats per token"""
    fall_at_least: Rate | None = None
    """smallest decrease from the promoted model's loss, in nats per token; 0: any decrease"""
    at_least: float | None = None
    """task:NAME: smallest score"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in LIMITS if getattr(self, name) is not None]
        if len(given) != 1:
            reason = f"has {' and '.join(given) or 'no limit'}; set one of {', '.join(LIMITS)}"
            raise ProfileError("on", self.on, reason)
        if self.at_least is not None and not self.on.startswith("task:"):
            reason = f"is a score of task:NAME, and {self.on} is a loss"
            raise ProfileError("at_least", self.at_least, reason, ["rise_at_most", "fall_at_least"])
        return self


class Continual(Section):
    """Rounds of continual pretraining."""

    default_role = roles.NONE  # in a run that is not a round

    schedule: Literal["rewarm", "trunk"] = "rewarm"
    """rewarm: a round starts from the promoted model with a new optimizer; its learning rate warms up and decays. trunk: it
    continues from the promoted model's checkpoint before the decay, optimizer included, at a constant rate, and then decays for
    its evaluation; the next round continues from before that decay"""
    decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """trunk: steps of a round's decay, after train.steps, as a share of these; null: 0.2"""
    replay: Fraction | Annotated[list[Fraction], Field(min_length=1)] = 0.05
    """share of a round's tokens drawn from what the promoted model and its ancestors were trained on; 0: none. A list: a round
    that does not meet its gate on old text is trained again with the next, larger share"""
    replay_from: Literal["history", "generated"] = "history"
    """history: the data of earlier runs in the ledger, or continual.stand_in; generated: text sampled from the promoted
    model"""
    generated_tokens: Count | None = None
    """generated: largest number of tokens to sample from a promoted model; null: as many as a round replays"""
    stand_in: Annotated[list[Source], roles.NONE] = Field(default=[])
    """sources that stand for the training data of initial weights that the ledger does not know; replayed and held out like
    earlier data"""
    gates: list[Gate] = Field(default=[Gate(on="old", rise_at_most=0.01), Gate(on="new", fall_at_least=0.0)])
    """conditions for a round's model to be promoted; []: none"""
    include: str | None = Field(default=None, min_length=1)
    """folder with your own task files of lm-eval, which gates may be on as task:NAME"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        shares = self.shares
        if any(later <= share for share, later in pairwise(shares)):
            reason = "is not in increasing order; a later attempt of a round replays more"
            raise ProfileError("replay", self.replay, reason, [sorted(set(shares))])
        if self.decay is not None and self.schedule != "trunk":
            reason = f"has no effect: continual.schedule is {self.schedule}"
            raise ProfileError("decay", self.decay, reason, ["null"])
        if self.generated_tokens is not None and self.replay_from != "generated":
            reason = f"has no effect: continual.replay_from is {self.replay_from}"
            raise ProfileError("generated_tokens", self.generated_tokens, reason, ["null"])
        return self

    @property
    def is_trunk(self) -> bool:
        """Whether rounds continue a trunk of constant rate."""
        return self.schedule == "trunk"

    @property
    def shares(self) -> list[float]:
        """Shares of replayed tokens, in the order in which a round is tried with them."""
        return list(self.replay) if isinstance(self.replay, list) else [self.replay]
