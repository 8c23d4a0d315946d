"""Compile a program ahead of time: `python -m modeling.tracing.compile --run-folder RUN ...`

Traces the program's stage again under fake tensors, as trace.py does, up to the program. When its region is captured, the
profile's compiler compiles the graph in the same state as in a training process, so that training finds the cache entries.
Writes the result as JSON; an error names the module and source line of the model if torch reports them.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import re
import resource
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from modeling import job_log
from modeling.compilation import compilers, manifest
from modeling.compilation.compilers import Compiled, Compiler
from modeling.compilation.graph_cache import RegionBackends, program_name
from modeling.tracing.trace import run_stage
from modeling.training.trainer import threads
from parallel import device as devices
from parallel.torch_internals import FakeTensorMode, unset_fake_temporarily
from profiles.arguments import Parser
from profiles.files import run_files, state_files
from profiles.resolve import load
from profiles.schema import Profile

ROOT = Path(__file__).parents[2]
PACKAGES = ("modeling", "parallel")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
log = logging.getLogger(__name__)


class _Compiled(BaseException):
    """Ends a stage's trace, whose other programs are not needed; not an exception that Dynamo would wrap."""


class ProgramCompiler(RegionBackends):
    """torch.compile backends that compile a program, given by the digests of its regions, and no other."""

    def __init__(self, name: str, regions: Collection[str], compiler: Compiler) -> None:
        super().__init__()
        self.name, self.regions, self.compiler = name, {*regions}, compiler
        self.found: set[str] = set()  # its regions that the stage has run
        self.graphs = 0
        self.seconds = 0.0

    def _compile(self, region: str, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        name = program_name(region)
        digest = manifest.region_digest(name, graph, inputs) if name == self.name else None
        if digest in self.regions - self.found:
            self.found.add(digest)
            before, start = sum(self.compiler.cache_counts()), time.perf_counter()
            with unset_fake_temporarily():  # as in training: compilers create real tensors
                self.compiler.compile(graph, inputs)
            self.graphs += sum(self.compiler.cache_counts()) - before
            self.seconds += time.perf_counter() - start
            if self.found == self.regions:
                raise _Compiled
        return graph.forward  # for the shapes of its results


def compile_program(
    profile: Profile, stage: int, name: str, regions: Collection[str], compiler: Compiler
) -> dict[str, Any]:
    """Compile a traced program into the compiler's cache folder, for each device that needs separate code.

    Returns:
        graphs, seconds, peak_bytes (of this process and its largest child), error (None on success).
    """
    target, error = ProgramCompiler(name, regions, compiler), None
    kind = profile.cluster.device
    count = devices.resolve(kind).compiled_for(profile.cluster.devices_per_node)
    try:
        for index in range(count):
            if count > 1:  # otherwise this machine may have no device
                devices.set_current_device(torch.device(kind, index))
            torch.compiler.reset()  # an earlier capture would be reused
            target.found.clear()
            with contextlib.suppress(_Compiled):
                run_stage(profile, stage, target.backend, FakeTensorMode())
            if not target.found:
                error = "its graphs differ from the traced ones"
    except Exception as failure:
        log.exception(f"{name}: failed")
        error = describe(failure)
    else:
        if not error and target.graphs == 0:
            error = "its compiler made no graph of it"
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"graphs": target.graphs, "seconds": target.seconds, "peak_bytes": peak * 1024, "error": error}


def describe(error: BaseException) -> str:
    """A compiler's error in one line, with the module and the source line of the model that caused it."""
    text = str(error)
    while isinstance(inner := getattr(error, "inner_exception", None) or error.__cause__, BaseException):
        error = inner
        text += f"\n{error}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    message = f"{type(error).__name__}: {first}"[:400]
    location = next(filter(None, map(_source_location, reversed(FRAME.findall(text)))), None)
    return f"{location}: {message}" if location else message


def _source_location(frame: tuple[str, str]) -> str | None:
    """A (file, line) as `Class.function (path:line: code)`; None for other libraries' code."""
    path, line = Path(frame[0]), int(frame[1])
    ours = any(path.is_relative_to(ROOT / package) for package in PACKAGES)
    if not (ours and state_files.is_file(path)):
        return None
    source = path.read_text()
    names = [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    code = source.splitlines()[line - 1].strip()
    return f"{'.'.join(names)} ({path.relative_to(ROOT)}:{line}: {code})"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="modeling.tracing.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--run-folder", type=Path, required=True, help="folder of the run, with profile.yaml")
    parser.add_argument("--stage", type=int, required=True, help="a pipeline stage that runs the program")
    parser.add_argument("--program", required=True, help='program name, such as "block, training"')
    parser.add_argument("--regions", nargs="+", required=True, help="digests of the program's traced regions")
    parser.add_argument("--cache", type=Path, required=True, help="compile cache folder to write")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write the result to")
    parser.add_argument("--memory", type=int, help="memory limit of each process, in bytes")
    parser.add_argument("--jobs", type=int, default=1, help="maximum number of compiler processes")
    options = parser.parse_args(arguments)
    job_log.configure(sys.stdout)
    if options.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (options.memory, options.memory))
    profile = load(str(options.run_folder / run_files.PROFILE))
    torch.set_num_threads(threads(profile))
    compiler = compilers.make_compiler(profile)
    compiler.use_cache(options.cache, ahead_of_time=True, jobs=options.jobs)
    result = compile_program(profile, options.stage, options.program, options.regions, compiler)
    options.result.write_text(json.dumps(result))
    log.info(f"{options.program}: {result['error'] or 'compiled'}, {result['seconds']:.1f} s")
    return 1 if result["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
