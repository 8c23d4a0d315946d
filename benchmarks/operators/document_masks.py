"""Measure the cost of document masks (`train.document_masks`) in a training step of the tiny model.

Runs forward and backward in one process, eager, in float32. Steps with and without document masks alternate; prints medians.
"""

import statistics

import torch

from benchmarks.harness.results import Results
from benchmarks.harness.timing import alternate_timed, make_parser
from modeling.data.prefetch import Batch
from modeling.training.trainer import Trainer
from parallel import initialize
from profiles import resolve


def main() -> None:
    parser = make_parser(__doc__, rounds=5, out="document_masks")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--document", type=int, default=300, help="tokens per document")
    options = parser.parse_args()
    keep = Results(options.out).turn
    overrides = ["parallel.tensor=1", "cluster.devices_per_node=1", "train.precision=float32"]
    overrides += [f"train.sequence_length={options.sequence}", "train.document_masks=true"]
    overrides += [
        "model.vocab_size=4096",
        "model.hidden_size=192",
        "model.num_attention_heads=8",
        "train.micro_batch_size=4",
    ]
    with Trainer(resolve.load("tiny", overrides)) as trainer:
        initialize(trainer.stages[0].named_parameters(), trainer.mesh.tensor, 0)
        tokens = torch.randint(0, 4096, (4, options.sequence + 1))
        positions = torch.arange(options.sequence)
        starts = (positions - positions % options.document).expand(4, -1)
        sides = {
            "causal": lambda: trainer.forward_backward(Batch(tokens), 1.0),
            "within documents": lambda: trainer.forward_backward(Batch(tokens, starts), 1.0),
        }
        alternate_timed(sides, 1)  # warms up
        seconds = alternate_timed(sides, options.rounds, keep=keep)
    median = {side: statistics.median(times) for side, times in seconds.items()}
    for side, middle in median.items():
        print(f"{side:<17} {middle * 1e3:7.1f} ms per step, {middle / median['causal']:.2f} of causal")


if __name__ == "__main__":
    main()
