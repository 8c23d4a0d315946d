"""Ours beside its peers, row by row: `python -m benchmarks.parallel [--quick] [--only ROW ...] [--rounds N] [--json]`

Ours and the peer of a row run in turns, each round in processes of their own, on the same weights and batches (work.py),
with two threads in all; a row in which their losses differ has failed, whatever its ratio. A ratio is the peer's median
step time over ours in the same round; the table has the median of the rounds and, in brackets, their least and greatest.
"Of bound" is the time of the step's matrix products and attention alone over ours (bound.py).

Exit codes: 0 all rows ran and agree, 1 one did not, 2 the arguments were refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile

from benchmarks.report import machine, show, sit
from benchmarks.rows import ROWS, Plan


def main(arguments: list[str] | None = None) -> int:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(
        prog="benchmarks.parallel", description="Ours beside its peers, row by row."
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of few steps: shows that it works, not how fast"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="ROW", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3, help="of every row (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"argument --rounds: {options.rounds} is below 1")
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    with tempfile.TemporaryDirectory(prefix="benchmarks-graphs-") as graphs:
        plan = Plan(options.rounds, warm_up=3, steps=20, graphs=graphs)
        if options.quick:
            plan = Plan(1, warm_up=1, steps=3, graphs=graphs)
        results = sit(rows, plan)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": [result.document() for result in results]}, indent=2))
    else:
        show(results, f"medians of {plan.steps} steps in {plan.rounds} rounds")
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
