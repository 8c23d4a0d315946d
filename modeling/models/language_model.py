"""What is alike in all models: from the last stage's hidden states to a loss or to logits."""

from __future__ import annotations

from torch import Tensor, nn

from parallel import VocabParallelEmbedding, linear_cross_entropy
from parallel.logits import full_logits
from parallel.mesh import Axis
from profiles.model import Model


class LanguageModel(nn.Module):
    """A model or a pipeline stage of it.

    Attributes, which a model's constructor sets:
        model: the architecture's numbers.
        axis: over which the vocabulary is split.
        sequence: whether hidden states are split over it.
        first, last: whether the stage has the embedding, and the head.
        embedding, head: a tied model has no head of its own.
    """

    model: Model
    axis: Axis
    sequence: bool
    first: bool
    last: bool
    embedding: VocabParallelEmbedding
    head: VocabParallelEmbedding

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of the last stage's hidden states against token ids (b, s/c); -100 counts nothing."""
        head = self._head()
        return linear_cross_entropy(
            x,
            head.weight,
            targets.flatten(),
            self.axis,
            first=head.first,
            vocabulary=self.model.vocab_size,
            sequence_parallel=self.sequence,
        )

    def logits(self, x: Tensor) -> Tensor:
        """The last stage's hidden states to logits (b·s/c, v), float32, whole on every tensor rank."""
        vocabulary = self.model.vocab_size
        return full_logits(
            x, self._head().weight, self.axis, vocabulary=vocabulary, sequence_parallel=self.sequence
        )

    def _head(self) -> VocabParallelEmbedding:
        return self.embedding if self.model.tie_word_embeddings else self.head
