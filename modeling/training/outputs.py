"""Outputs of forward passes: what is computed from the last stage's hidden states.

An output takes the stage, a microbatch's hidden states (b·s/c, h) and its targets, and returns a sum over the microbatch. Those
of microbatches are added. `Trainer` chooses one for each pass:

    TokenLoss   cross-entropy or the user's loss; in evaluation followed by the user's metrics
    PairLoss    loss of preference pairs; in evaluation with their number and metrics
    Collector   keeps log-probabilities of the pairs' answers, or hidden states
    nothing     computes nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from modeling.models.language_model import LanguageModel
from modeling.training.preference.loss import LossSettings
from modeling.training.step_functions import StepFunctions
from modeling.training.user_functions import UserFunction
from parallel.mesh import Axis

Output = Callable[[LanguageModel, Tensor, Tensor], Tensor]


@dataclass
class TokenLoss:
    """Summed loss of tokens, 0-dim; in evaluation of user functions: [loss, *metrics], float32.

    Args:
        loss: the user's; None for cross-entropy.
        metrics: the user's, in evaluation; None in training.
    """

    functions: StepFunctions
    loss: UserFunction | None = None
    metrics: Sequence[UserFunction] | None = None

    def __call__(self, stage: LanguageModel, x: Tensor, targets: Tensor) -> Tensor:
        if self.loss is None and not self.metrics:
            return stage.loss(x, targets)
        losses = [] if self.loss else [stage.loss(x, targets)]
        own = [self.loss] if self.loss else []
        own += self.metrics or ()
        sums = self.functions.user_sums(own, **stage.logits_arguments(x), targets=targets)
        return sums[0] if self.metrics is None else self.functions.stack(losses + sums)


@dataclass
class Pairs:
    """How pairs are read from targets.

    `step_functions.shard` joins targets with the numbers of their answers and rows.

    Args:
        tokens: s/c.
        answers: answers per row, if pairs are packed.
    """

    functions: StepFunctions
    settings: LossSettings
    tokens: int
    answers: int

    def losses(
        self, stage: LanguageModel, x: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, int]:
        """Losses (2b, s/c) of the counted tokens, what `split_targets` returns, and the answers per row."""
        prompts = self.settings.odds_ratio
        wanted, answer, numbers, rows = self.functions.split_targets(targets, self.tokens, prompts)
        width = 1 if numbers is None else self.answers
        return stage.token_losses(x.detach(), wanted), wanted, answer, numbers, rows, width

    def log_probabilities(self, stage: LanguageModel, x: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities (b, answers) of the answers, partial sums over this rank's tokens."""
        losses, *_, numbers, _, width = self.losses(stage, x, targets)
        return self.functions.log_probabilities(losses, numbers, width)


@dataclass
class PairLoss:
    """Loss of preference pairs, 0-dim; in evaluation their number, loss and sums of metrics.

    Args:
        reference: log-probabilities of the batch's rows under the reference model; None for orpo.
        pairs_per_token: of the global batch, 0-dim, for orpo.
    """

    pairs: Pairs
    context: Axis
    reference: Tensor | None
    pairs_per_token: Tensor
    training: bool

    def __call__(self, stage: LanguageModel, x: Tensor, targets: Tensor) -> Tensor:
        functions = self.pairs.functions
        losses, wanted, answer, numbers, rows, width = self.pairs.losses(stage, x, targets)
        pairs = answer, numbers, rows, self.reference, width, self.context, self.pairs_per_token
        sums, weights = functions.score_pairs(self.pairs.settings, losses, *pairs, self.training)
        if weights is None:
            return sums
        return functions.with_value(stage.loss(x, wanted, weights), sums)


@dataclass
class Collector:
    """Collects what another output returns for the first `count` microbatches; None: for all."""

    output: Output
    zero: Tensor
    count: int | None = None
    collected: list[Tensor] = field(default_factory=list)

    def __call__(self, stage: LanguageModel, x: Tensor, targets: Tensor) -> Tensor:
        if self.count is None or len(self.collected) < self.count:
            self.collected.append(self.output(stage, x, targets))
        return self.zero


def nothing(zero: Tensor) -> Output:
    """An output that computes nothing, for passes that only count the experts' choices."""
    return lambda stage, x, targets: zero
