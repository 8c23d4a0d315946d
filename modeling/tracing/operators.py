"""List the operators that a run needs: `python -m modeling.tracing.operators PROFILE [--table FILE]`

Traces every program at full size (trace.py) and lists the operators of its graphs with their number of calls: ATen's,
the collectives and Trainshed's, as the device's compiler receives them. Dynamic shapes and data-dependent branches are
errors.

On a machine without the profile's device, the CPU's attention, `trainshed.attention`, is traced; the device uses torch's
scaled_dot_product_attention instead.

With --table, a text that names operators as aten::mm or aten.mm, it also reports the ATen operators missing in it.

Exit codes: 0 all operators are supported, 1 the table lacks some, 2 the profile or the table was rejected.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

from modeling import job_log
from modeling.tracing.trace import Trace, trace
from profiles.arguments import Parser
from profiles.errors import ProfileError
from profiles.resolve import check, load


def count_operators(traced: Trace) -> dict[str, dict[str, int]]:
    """Number of calls of each operator by program: {operator: {program: calls}}."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for program in traced.programs:
        for graph in program.graphs:
            for operator, calls in graph.operators.items():
                counts[operator][program.name] += calls
    return {operator: dict(counts[operator]) for operator in sorted(counts)}


def unsupported(operators: Collection[str], table: str) -> list[str]:
    """ATen operators that a table does not name. Raises ValueError if the table names no operators."""
    names = {f"aten.{name}" for name in re.findall(r"\baten(?:::|\.)(\w+)", table.replace("\\", ""))}
    if not names:
        raise ValueError("names no operator as aten::mm or aten.mm")
    return [operator for operator in operators if operator.startswith("aten.") and operator not in names]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="modeling.tracing.operators", description=__doc__.splitlines()[0])
    parser.add_argument("profile", help="a shipped profile, or the path of a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--table", type=Path, help="text file that names the operators of a device")
    options = parser.parse_args(arguments)
    try:
        profile = load(options.profile, options.set)
        check(profile)
        table = options.table.read_text() if options.table else None
        if table is not None:
            unsupported((), table)
    except (ProfileError, OSError) as error:
        parser.error(str(error))
    except ValueError as error:
        parser.error(f"{options.table}: {error}")
    job_log.configure(sys.stderr)
    traced = trace(profile)
    operators = count_operators(traced)
    print(f"{profile.name}: {traced.graphs} graphs, {len(operators)} operators, all shapes static\n")
    width = max(map(len, operators))
    for operator, programs in operators.items():
        print(f"{operator:<{width}}  {'; '.join(f'{name} {calls}' for name, calls in programs.items())}")
    missing = unsupported(operators, table) if table is not None else []
    if missing:
        print(f"\nnot in {options.table}: {', '.join(missing)}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
