"""Write the tables of docs/devices/gpus.md from collected results.

    python -m benchmarks.gpu_lease.tables FILE

The latest result of each row and card counts. Rehearsals are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_lease.lease import REHEARSAL
from benchmarks.harness.results import read
from benchmarks.harness.timing import make_parser
from benchmarks.harness.workload import full_depth_speed

PAGE = Path(__file__).parents[2] / "docs/devices/gpus.md"
BEGIN, END = "<!-- results of leases: begin -->", "<!-- results of leases: end -->"
NOTHING = "No lease has been measured yet."
FACTS = ("row", "took", "time", "arguments", "card", "memory_mib", "torch", "cuda", "nccl")


def tables(results: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a table per card, with what the figures were measured with."""
    by_card: dict[str, dict[str, Mapping[str, Any]]] = {}
    for result in results:
        if result["card"] != REHEARSAL:
            by_card.setdefault(result["card"], {})[result["row"]] = result
    return "\n\n".join(_table(card, rows) for card, rows in by_card.items()) or NOTHING


def _table(card: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(rows.values()))
    lines = [f"{card}, {first['memory_mib']:,} MiB:", "", "| row | figures | date | torch | CUDA | NCCL |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in rows.items():
        versions = " | ".join(str(row[key]) for key in ("torch", "cuda", "nccl"))
        lines.append(f"| {name} | {_figures(row)} | {row['time'][:10]} | {versions} |")
    for suffix in ("-deterministic", ""):
        if speed := full_depth(rows, suffix):
            kernels = "deterministic kernels" if suffix else "the fastest kernels"
            lines += [
                "",
                f"From 2 and 4 layers follow {speed:,.0f} tokens/s for 8B at full depth, with {kernels}.",
            ]
    slow, fast = (rows.get(name, {}).get("ms") for name in ("1b-deterministic", "1b"))
    if slow and fast:
        lines += ["", f"Deterministic kernels make the 1B step {slow / fast - 1:.0%} longer."]
    return "\n".join(lines)


def full_depth(rows: Mapping[str, Mapping[str, Any]], suffix: str) -> float | None:
    """`full_depth_speed` by the rows of 2 and 4 layers; None without both."""
    two, four = (rows.get(f"{name}{suffix}", {}) for name in ("8b-2-layers", "8b-layers"))
    if not (two.get("ms") and four.get("ms")):
        return None
    return full_depth_speed(four["tokens_per_second"] * four["ms"], two["ms"], four["ms"])


def _figures(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed'].splitlines()[0]}"
    shown = {name: value for name, value in row.items() if name not in (*FACTS, "losses")}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add("files FILE", "with the results of leases, oldest first", nargs="+", type=Path)
    options = parser.parse_args()
    results = [result for file in options.files for result in read(file)]
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}")
    print(f"wrote {PAGE}: {len(results)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
