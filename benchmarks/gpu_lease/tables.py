"""Write the tables of docs/devices/gpus.md from collected results.

    python -m benchmarks.gpu_lease.tables FILE

The latest result of each row and card counts. Rehearsals are left out. Rows for which others have published a figure show it, and
a table below has its source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Published:
    """What others have published of one H100 with 80 GB, and how it differs from the row."""

    figure: str
    source: str  # a link
    differs: str


NEMO = "https://docs.nvidia.com/nemo/automodel/performance/performance-summary"
RECIPE = (
    "https://github.com/NVIDIA-NeMo/Automodel/blob/1b6680209badf42ea762d4269efede37cb0c6fad/"
    "examples/llm_finetune/llama3_1/llama3_1_8b_peft_benchmark.yaml"
)
UNSLOTH = "https://docs.unsloth.ai/new/500k-context-length-fine-tuning"
PUBLISHED = {
    "lora-8b": Published(
        "12,473 tokens/s",
        f"[NeMo AutoModel]({NEMO}), with [this recipe]({RECIPE})",
        "16 microbatches an update instead of 1; dropout of the updates' inputs",
    ),
    "8b-2-layers-512k": Published(
        "500k tokens",
        f"[Unsloth]({UNSLOTH})",
        "all layers of gpt-oss-20b, in 4 bits with LoRA, instead of 2 layers of 8B with all weights; no speed is published",
    ),
}


def tables(results: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a table per card, with its versions, and the sources of published figures."""
    by_card: dict[str, dict[str, Mapping[str, Any]]] = {}
    for result in results:
        if result["card"] != REHEARSAL:
            by_card.setdefault(result["card"], {})[result["row"]] = result
    measured = [_table(card, rows) for card, rows in by_card.items()] or [NOTHING]
    return "\n\n".join([*measured, _sources()])


def _sources() -> str:
    lines = [
        "Published by others, of one H100 with 80 GB:",
        "",
        "| row | figure | by | what differs |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row} | {each.figure} | {each.source} | {each.differs} |" for row, each in PUBLISHED.items()
    ]
    return "\n".join(lines)


def _table(card: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(rows.values()))
    lines = [
        f"{card}, {first['memory_mib']:,} MiB:",
        "",
        "| row | figures | published | date | torch | CUDA | NCCL |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        versions = " | ".join(str(row[key]) for key in ("torch", "cuda", "nccl"))
        published = PUBLISHED[name].figure if name in PUBLISHED else ""
        lines.append(f"| {name} | {_figures(row)} | {published} | {row['time'][:10]} | {versions} |")
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
