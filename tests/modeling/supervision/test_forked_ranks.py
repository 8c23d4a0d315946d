"""Ranks that are forked from torchrun's process: when that is safe, and how they end without torchrun."""

import json
import os
import subprocess
import sys

import pytest

from tests.waiting import gone, until

pytestmark = pytest.mark.slow

FORKS = """
import json, os, sys, threading
import torch
from modeling.supervision import forked_ranks
from modeling.supervision.forked_ranks import START, fork_ranks

def fail(*arguments):
    raise AssertionError("initializes the CUDA driver, which does not survive a fork")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = fail

def fork(module):
    return [rank.pid for rank in fork_ranks(["--nproc-per-node", "2", "-m", START, module])]

found = {module: fork(module) for module in sys.argv[1:]}
sys.modules["torch_neuronx"] = sys
found["neuron"] = fork(sys.argv[1])
del sys.modules["torch_neuronx"]
forked_ranks.is_in_bad_fork = lambda: True
found["cuda"] = fork(sys.argv[1])
forked_ranks.is_in_bad_fork = lambda: False
threading.Thread(target=threading.Event().wait, daemon=True).start()
found["thread"] = fork(sys.argv[1])
print(json.dumps(found), flush=True)
os._exit(0)
"""


def test_job_modules_can_be_forked_and_ranks_that_were_not_started_end_with_torchrun():
    """Importing a job module uses no GPU and starts no thread, such as OpenMP's, which ranks would lack."""
    modules = [f"modeling.training.{name}" for name in ("train", "evaluate", "reference", "sample")]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    command = [sys.executable, "-c", FORKS, *modules]
    found = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert {name: len(ranks) for name, ranks in found.items()} == dict.fromkeys(modules, 2) | {
        "neuron": 0,
        "cuda": 0,
        "thread": 0,
    }
    until(lambda: all(gone(pid) for ranks in found.values() for pid in ranks))
