"""Compiles one program ahead of time: `python -m modeling.tracing.compile --run-folder RUN --stage 0 --program NAME ...`.

The program's stage is traced again, under fake tensors as in trace.py, and when its region is captured the profile's compiler
gets it, in the state that a training process would be in: so what it writes into its cache folder is what training asks for.
What it took, or why it failed, is written as JSON; a failure names the module and the line of the model, where torch knows them.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule

from modeling.compilation import compilers
from modeling.compilation.compilers import Compiler
from modeling.compilation.graph_cache import Backend, program_name
from modeling.tracing import graph_stats
from modeling.tracing.trace import Recorder, run_stage
from modeling.training.trainer import threads
from profiles.resolve import load
from profiles.schema import Profile

OURS = ("modeling", "parallel")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
log = logging.getLogger("trainshed")


class Target:
    """torch.compile's backend that compiles one program and only records the others."""

    def __init__(self, name: str, compiler: Compiler) -> None:
        self.name, self.compiler, self.recorder = name, compiler, Recorder()
        self.graphs = 0
        self.seconds = 0.0
        self._backends: dict[str, Backend] = {}

    def backend(self, region: str) -> Backend:
        return self._backends.setdefault(region, lambda graph, inputs: self._compile(region, graph, inputs))

    def _compile(self, region: str, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if program_name(region) == self.name:
            before, begun = sum(self.compiler.cache_counts()), time.perf_counter()
            with unset_fake_temporarily():  # as in training; compilers make tensors of their own
                self.compiler.compile(graph, inputs)
            self.graphs += sum(self.compiler.cache_counts()) - before
            self.seconds += time.perf_counter() - begun
        return self.recorder.backend(region)(graph, inputs)

    def digest(self) -> str | None:
        return next(
            (graph_stats.digest(graphs) for name, graphs in self.recorder.programs if name == self.name), None
        )


def compile_program(
    profile: Profile, stage: int, name: str, digest: str, compiler: Compiler
) -> dict[str, Any]:
    """Compile a traced program into the compiler's folder.

    Returns:
        graphs, seconds, peak_bytes (of this process and its largest child), error (None where all went well).
    """
    target, error = Target(name, compiler), None
    torch.compiler.reset()
    try:
        run_stage(profile, stage, target.backend, FakeTensorMode())
    except Exception as failure:
        log.exception(f"{name}: failed")
        error = describe(failure)
    else:
        if target.digest() != digest:
            error = "its graphs are not those that were traced"
        elif target.graphs == 0:
            error = "its compiler made no graph of it"
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "graphs": target.graphs,
        "seconds": target.seconds,
        "peak_bytes": peak * 1024,
        "error": error,
    }


def describe(error: BaseException) -> str:
    """An error of a compiler in a line: what is wrong, in which module and at which line of the model."""
    text = str(error)
    while isinstance(inner := getattr(error, "inner_exception", None) or error.__cause__, BaseException):
        error = inner
        text += f"\n{error}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    what = f"{type(error).__name__}: {first}"[:400]
    place = next(filter(None, map(_place, reversed(FRAME.findall(text)))), None)
    return f"{place}: {what}" if place else what


def _place(frame: tuple[str, str]) -> str | None:
    """`MLP.forward (modeling/models/llama.py:85: return ...)` of a file and a line; None where the file is not the model's."""
    path, line = Path(frame[0]), int(frame[1])
    if path.parent.name not in OURS or not path.is_file():
        return None
    source = path.read_text()
    names = [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= line <= node.end_lineno
    ]
    code = source.splitlines()[line - 1].strip()
    return f"{'.'.join(names)} ({path.parent.name}/{path.name}:{line}: {code})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.tracing.compile")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True, help="a pipeline stage that runs the program")
    parser.add_argument("--program", required=True, help='its name, as in "block, training"')
    parser.add_argument("--digest", required=True, help="of its graphs, as they were traced")
    parser.add_argument("--cache", type=Path, required=True, help="folder for what is compiled")
    parser.add_argument("--result", type=Path, required=True, help="file for what it took")
    parser.add_argument("--memory", type=int, help="bytes that each process may take")
    parser.add_argument("--jobs", type=int, default=1, help="processes that a compiler may use")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if options.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (options.memory, options.memory))
    profile = load(str(options.run_folder / "profile.yaml"))
    torch.set_num_threads(threads(profile))
    compiler = compilers.make_compiler(profile)
    compiler.use_cache(options.cache, ahead_of_time=True, jobs=options.jobs)
    result = compile_program(profile, options.stage, options.program, options.digest, compiler)
    options.result.write_text(json.dumps(result))
    log.info(f"{options.program}: {result['error'] or 'compiled'}, {result['seconds']:.1f} s")
    return 1 if result["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
