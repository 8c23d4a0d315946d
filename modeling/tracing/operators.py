"""The operators that a run asks of its device: `python -m modeling.tracing.operators PROFILE [--set KEY=VALUE] [--table FILE]`.

Every program of the run is traced at its full size (trace.py), and what stands in its graphs is listed with how often it does:
ATen's operators, the collectives, and our own. So they are handed to the device's compiler, before it takes any of them apart.
Shapes are static in all of them, and no branch depends on data: a graph with either is an error.

A machine without the profile's device traces the CPU's attention, `trainshed.attention`; in its place the device has what
torch's scaled_dot_product_attention becomes there.

With a table, any text that names operators as aten::mm or aten.mm, those of ATen that it does not name are said.

Exit codes: 0 all is listed, 1 the table lacks some, 2 the profile or the table was refused.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

from modeling.tracing.trace import Trace, trace
from profiles.errors import ProfileError
from profiles.resolve import check, load


def of(traced: Trace) -> dict[str, dict[str, int]]:
    """How often each operator stands in the graphs of each program, by the names of both."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for program in traced.programs:
        for graph in program.graphs:
            for operator, times in graph.operators.items():
                found[operator][program.name] += times
    return {operator: dict(found[operator]) for operator in sorted(found)}


def absent(operators: Collection[str], table: str) -> list[str]:
    """ATen's operators that a table does not name. ValueError where it names none at all."""
    named = {f"aten.{name}" for name in re.findall(r"\baten(?:::|\.)(\w+)", table.replace("\\", ""))}
    if not named:
        raise ValueError("names no operator as aten::mm or aten.mm")
    return [operator for operator in operators if operator.startswith("aten.") and operator not in named]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.tracing.operators", description=__doc__.splitlines()[0])
    parser.add_argument("profile", help="a shipped profile, or the path of a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--table", type=Path, help="file that names the operators of a device")
    options = parser.parse_args(arguments)
    try:
        profile = load(options.profile, options.set)
        check(profile)
        table = options.table.read_text() if options.table else None
        if table is not None:
            absent((), table)
    except (ProfileError, OSError) as error:
        parser.error(str(error))
    except ValueError as error:
        parser.error(f"{options.table}: {error}")
    traced = trace(profile)
    operators = of(traced)
    print(f"{profile.name}: {traced.graphs} graphs, {len(operators)} operators, static shapes alone\n")
    width = max(map(len, operators))
    for operator, programs in operators.items():
        print(f"{operator:<{width}}  {'; '.join(f'{name} {times}' for name, times in programs.items())}")
    lacks = absent(operators, table) if table is not None else []
    if lacks:
        print(f"\nnot in {options.table}: {', '.join(lacks)}")
    return int(bool(lacks))


if __name__ == "__main__":
    sys.exit(main())
