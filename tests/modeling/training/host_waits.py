"""Trains a run on a GPU and prints, as JSON, where the host waits for it in steps after the first.

    python -m tests.modeling.training.host_waits --run-folder RUN --dataset DATASET

The read of a step's results waits for an event, which torch's debug mode does not count; everything else that waits, it does.
"""

import json
import sys
import warnings
from collections import Counter
from unittest import mock

import torch

from modeling.training import train
from profiles.files import exit_codes
from tests.emulation import usage


def main(arguments):
    waits = Counter()
    queue = train.TrainingRun._queue_step

    def show(message, *_, **__):
        if "synchronizing CUDA operation" in str(message):
            waits[usage.call_site()] += 1

    def queue_step(run):
        torch.cuda.set_sync_debug_mode("warn" if run.step > 1 else "default")
        try:
            queue(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with warnings.catch_warnings(), mock.patch.object(train.TrainingRun, "_queue_step", queue_step):
        warnings.simplefilter("always")
        warnings.showwarning = show
        code = train.main(arguments)
    print(json.dumps(waits), flush=True)
    exit_codes.leave(code)


if __name__ == "__main__":
    main(sys.argv[1:])
