"""Training in which weights of single ranks drift; arguments as for modeling.training.train."""

from __future__ import annotations

from unittest import mock

import torch

from modeling.training import train

STEP = 3  # the weights change before its forward pass
DRIFT = {  # rank, units in the last place
    "norm.weight": (1, 1 << 10),
    "layers.1.attention.qkv.k.weight": (3, 1 << 16),
}


def main(arguments: list[str]) -> int:
    queue_step = train.TrainingRun._queue_step

    def queue(run: train.TrainingRun) -> None:
        if run.step == STEP:
            for box, states in run.optimizer.state_boxes():
                rank, units = DRIFT.get(box.name, (None, 0))
                if run.trainer.mesh.rank == rank:
                    states["master"].view(torch.int32).view(-1)[0] += units
        queue_step(run)

    with mock.patch.object(train.TrainingRun, "_queue_step", queue):
        return train.main(arguments)
