"""Compare training speed with Hugging Face, DTensor and torch's own parallelism.

Each comparison runs ours and the peer alternately, in fresh processes, on the same weights and batches, with two threads per
side. A comparison whose losses differ fails, whatever its ratio. A ratio is the peer's median step time over ours in the same
round; the table shows the median over the rounds, and their minimum and maximum. "Of bound" is the time of the step's matrix
products and attention alone (benchmarks/harness/bound.py), over ours.

Exit codes: 0 all comparisons ran and agree, 1 one failed, 2 arguments rejected.
"""

import json
import sys
import tempfile

from benchmarks.harness.comparisons import COMPARISONS, Schedule
from benchmarks.harness.report import machine, run, show
from benchmarks.harness.timing import make_parser


def main() -> int:
    names = [comparison.name for comparison in COMPARISONS]
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument(
        "--quick", action="store_true", help="one round of few steps: a check, not a measurement"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="ROW", help=f"of {', '.join(names)}")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    comparisons = [item for item in COMPARISONS if not options.only or item.name in options.only]
    with tempfile.TemporaryDirectory(prefix="benchmarks-graphs-") as graphs:
        schedule = Schedule(options.rounds, warm_up=3, steps=20, graphs=graphs)
        if options.quick:
            schedule = Schedule(1, warm_up=1, steps=3, graphs=graphs)
        results = run(comparisons, schedule)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": [result.to_json() for result in results]}, indent=2))
    else:
        show(results, schedule)
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
