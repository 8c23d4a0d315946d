"""DPO's reference model in memory: a frozen copy of the initial weights, rating pairs in each step.

Sharded like the model over tensor and pipeline ranks, and with FSDP. It has neither gradients nor optimizer states, and is not
part of checkpoints: a resumed run loads it again from the weights that it started from. Cost: the memory of the weights, and one
forward pass over each pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from modeling.models.build import build_optimizer
from modeling.models.language_model import LanguageModel
from parallel import Mesh
from parallel.checkpoint import checkpoint
from parallel.checkpoint.locations import Location
from profiles.schema import Profile

if TYPE_CHECKING:
    from parallel.pipeline.pipeline import Pipeline


class ReferenceModel:
    """A frozen copy of a rank's stages.

    Args:
        stages: stages by number, whose parameters have no memory yet.
        pipeline: the pipeline of these stages; None without pipeline parallelism.

    Attributes:
        weights: the shards of their weights, all frozen.
    """

    def __init__(
        self, profile: Profile, stages: Mapping[int, LanguageModel], pipeline: Pipeline | None, mesh: Mesh
    ) -> None:
        for stage in stages.values():
            stage.requires_grad_(False)
        self.stages, self.pipeline = dict(stages), pipeline
        self.weights = build_optimizer(profile, [*stages.values()], mesh)
        self._loaded = False

    def load(self, weights: Location) -> None:
        """Load the weights from a checkpoint of any topology. Collective; raises as `checkpoint.load`."""
        checkpoint.load_frozen(weights, self.weights)
        self._loaded = True

    @contextmanager
    def gathered(self) -> Iterator[tuple[dict[int, LanguageModel], Pipeline | None]]:
        """The stages and their pipeline. With FSDP, weights gathered in the block are released after it.

        Raises:
            RuntimeError: the weights were not loaded.
        """
        if not self._loaded:
            raise RuntimeError("the reference model was used before its weights were loaded")
        try:
            yield self.stages, self.pipeline
        finally:
            self.weights.gather_parameters()
