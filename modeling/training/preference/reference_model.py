"""DPO's reference model in memory: a frozen copy of the initial weights, rating pairs in each step.

Sharded like the model over tensor and pipeline ranks, and with FSDP. It has neither gradients nor optimizer states, and is not
part of checkpoints: a resumed run loads it again from the weights that it started from. Cost: the memory of the weights, and one
forward pass over each pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from modeling.models.build import build_optimizer
from modeling.models.language_model import LanguageModel
from parallel import Mesh
from parallel.checkpoint import checkpoint
from parallel.checkpoint.checkpoint import Location
from parallel.layers.lora import without_updates
from profiles.schema import Profile

if TYPE_CHECKING:
    from modeling.training.trainer import Trainer
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
    def replacing(self, trainer: Trainer) -> Iterator[None]:
        """Make a trainer compute with these stages instead of its own within the block."""
        if not self._loaded:
            raise RuntimeError("the reference model was used before its weights were loaded")
        own = trainer.stages, trainer.pipeline
        trainer.stages, trainer.pipeline = self.stages, self.pipeline
        try:
            yield
        finally:
            trainer.stages, trainer.pipeline = own
            self.weights.gather_parameters()  # with FSDP, releases what the forward pass gathered


@contextmanager
def reference_weights(trainer: Trainer) -> Iterator[None]:
    """Compute with a trainer's reference model in the block: its copy or, with LoRA, the base model."""
    if trainer.reference_model is not None:
        with trainer.reference_model.replacing(trainer):
            yield
        return
    with ExitStack() as stack:
        for stage in trainer.stages.values():
            stack.enter_context(without_updates(stage))
        yield
