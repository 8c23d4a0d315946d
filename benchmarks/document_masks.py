"""What attention within documents costs: a training step of the tiny model with `train.document_masks`, against one without.

    python -m benchmarks.document_masks [--sequence 1024] [--document 300] [--rounds 5]

Forward and backward on one process, eager, float32; steps alternate, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from modeling.training.trainer import Trainer
from profiles import resolve


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.document_masks")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--document", type=int, default=300, help="tokens of a document")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    profile = resolve.load(
        "tiny",
        [
            "parallel.tensor=1",
            "cluster.devices_per_node=1",
            f"train.sequence_length={options.sequence}",
            "train.precision=float32",
            "train.document_masks=true",
        ],
    )
    with Trainer(profile) as trainer:
        tokens = torch.randint(0, 4096, (4, options.sequence + 1))
        places = torch.arange(options.sequence)
        starts = (places - places % options.document).expand(4, -1)
        rows: dict[str, list[float]] = {"causal": [], "within documents": []}
        for _ in range(options.rounds + 1):  # the first one warms up
            for row, documents in zip(rows, (None, starts), strict=True):
                begun = time.perf_counter()
                trainer.forward_backward(tokens, 1.0, documents=documents)
                rows[row].append(time.perf_counter() - begun)
    median = {row: statistics.median(seconds[1:]) for row, seconds in rows.items()}
    for row, seconds in median.items():
        print(f"{row:<17} {seconds * 1e3:7.1f} ms a step, {seconds / median['causal']:.2f} of causal")


if __name__ == "__main__":
    main()
