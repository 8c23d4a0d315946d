"""Measure what compiling costs, and training takes, on this CPU; tasks/steps/graphs.py decides.

    python -m modeling.tracing.trial --run-folder RUN ...

Compiles one small graph, the activation between an MLP's products, and times the MLP's first product. Both are scaled to the run,
to the graphs that it would compile and to all FLOPs of training, and are seconds of CPU: other processes do not matter.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from modeling import job_log
from modeling.compilation import compilers
from modeling.compilation.compilers import Compiler
from modeling.compilation.graph_cache import OPTIONS
from modeling.models.build import DTYPES
from modeling.models.flops import flops_per_token
from parallel.torch_internals import inductor_config
from profiles.arguments import Parser
from profiles.files import exit_codes, run_files
from profiles.resolve import load
from profiles.schema import Profile

ROWS = 256
ROUNDS = 5
# A run's graphs, a block's and the loss's, take this many times as long as the small one together: measured on an AMD EPYC.
ALL_GRAPHS = 16
log = logging.getLogger(__name__)


def compile_seconds(gate: Tensor, compiler: Compiler) -> float:
    """Seconds of CPU that a small graph takes to compile."""

    def activation(gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate) * up

    start = cpu_seconds()
    torch.compile(activation, backend=compiler.compile, **OPTIONS)(gate, gate)
    return cpu_seconds() - start


def training_seconds(profile: Profile, a: Tensor, b: Tensor) -> float:
    """Least seconds of CPU that training takes: its FLOPs at the rate of this product."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        a @ b
        times.append(time.process_time() - start)
    rate = 2 * a.numel() * b.shape[1] / min(times)
    return (profile.train.steps or 0) * profile.step_tokens * flops_per_token(profile) / rate


def cpu_seconds() -> float:
    """Seconds of CPU of this process and its children that have ended."""
    found = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="modeling.tracing.trial", description=__doc__.splitlines()[0])
    parser.add_argument("--run-folder", type=Path, required=True, help="folder of the run, with profile.yaml")
    parser.add_argument("--cache", type=Path, required=True, help="compile cache folder to write")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    job_log.configure(sys.stdout)
    profile = load(str(options.run_folder / run_files.PROFILE))
    torch.set_num_threads(1)
    # The trial's code is not kept, so it can do without tests of the CPU's instruction sets and a precompiled header.
    inductor_config.cpp.vec_isa_ok, inductor_config.cpp_cache_precompile_headers = True, False
    compiler = compilers.make_compiler(profile)
    compiler.use_cache(options.cache, ahead_of_time=True, jobs=1)
    model, dtype = profile.model, DTYPES[profile.train.precision]
    hidden = torch.randn(ROWS, model.hidden_size, dtype=dtype)
    weights = torch.randn(model.hidden_size, model.intermediate_size // profile.parallel.tensor, dtype=dtype)
    with torch.no_grad():
        training = training_seconds(profile, hidden, weights)
        seconds = compile_seconds(hidden @ weights, compiler)
    result = {"seconds": seconds, "compiling": ALL_GRAPHS * seconds, "training": training}
    options.output.write_text(json.dumps(result))
    log.info(f"compiling a small graph took {seconds:.1f} s of CPU; training takes at least {training:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.code_of(main))
