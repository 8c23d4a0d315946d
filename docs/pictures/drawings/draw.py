"""Draw the pictures of docs/devices/parallel.md: `python docs/pictures/drawings/draw.py`

Ranks, chunks and microbatches are computed by `parallel/`, so the pictures show what the code does; a test compares the files
with newly drawn ones.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from parallel.attention.zigzag import zigzag_positions
from parallel.mesh import Mesh
from parallel.pipeline.schedules import one_forward_one_backward

FOLDER = Path(__file__).parent
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c2128; text-anchor: middle; dominant-baseline: central }
.small { font-size: 11px; fill: #57606a } .left { text-anchor: start } .strong { font-weight: 600 }
.light { fill: #fff } .dark { fill: #1c2128 } rect { stroke: #fff; stroke-width: 1.5; rx: 3 }
.frame { fill: none; stroke: #8c959f; stroke-width: 1 } .none { fill: #eaeef2 }
path { stroke: #57606a; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
marker path { fill: #57606a; marker-end: none }
.c0 { fill: #1f5fa8 } .c1 { fill: #c2512f } .c2 { fill: #2f8a5b } .c3 { fill: #8250a8 }
.c4 { fill: #6e9fd4 } .c5 { fill: #e39a7f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } rect { stroke: #0d1117 } .none { fill: #30363d }
path { stroke: #9198a1 } marker path { fill: #9198a1 } }
"""


class Drawing:
    """An SVG image of boxes, texts and arrows, with sizes and positions in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z"/></marker>',
        ]

    def box(self, x: float, y: float, width: float, height: float, style: str, text: str = "") -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{style}"/>'
        )
        if text:
            contrast = {"none": "", "frame": "", "c4": "dark", "c5": "dark"}.get(style, "light")
            self.write(x + width / 2, y + height / 2, text, contrast)

    def write(self, x: float, y: float, text: str, style: str = "") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>')

    def svg(self) -> str:
        """The contents of the SVG file."""
        return "\n".join([*self._parts, "</svg>", ""])


def mesh() -> Drawing:
    """Ranks of pipeline 2 x data 2 x context 2 x tensor 2."""
    drawing = Drawing(640, 212, "Sixteen ranks on the mesh")
    for data in range(2):
        drawing.write(190 + 290 * data, 14, f"data {data}", "strong")
        for context in range(2):
            drawing.write(128 + 290 * data + 138 * context, 38, f"context {context}", "small")
    for rank in range(16):
        of_rank = Mesh(pipeline=2, data=2, context=2, tensor=2, rank=rank)
        tensor = of_rank.tensor.rank
        x = 70 + 290 * of_rank.data.rank + 138 * of_rank.context.rank + 60 * tensor
        y = 54 + 74 * of_rank.pipeline.rank
        drawing.box(x, y, 56, 44, f"c{tensor}", str(rank))
        if tensor == 0:
            drawing.box(x - 5, y - 5, 126, 54, "frame")
    drawing.write(6, 76, "stage 0", "left strong")
    drawing.write(6, 150, "stage 1", "left strong")
    drawing.write(320, 198, "each frame is a tensor group: neighbouring ranks on one node", "small")
    return drawing


def layers() -> Drawing:
    """Column- and row-parallel layers on two ranks, with sequence parallelism."""
    drawing = Drawing(760, 210, "A feed-forward block on two tensor ranks, with sequence parallelism")
    columns = ((70, "norm"), (250, "gate, up (column)"), (430, "down (row)"), (610, "residual"))
    for x, name in columns:
        drawing.write(x + 60, 14, name, "strong")
    for rank in range(2):
        y, colour = 36 + 76 * rank, f"c{rank}"
        drawing.write(6, y + 25, f"rank {rank}", "left strong")
        drawing.box(70, y, 120, 50, colour, "b·s/2 × h")
        drawing.box(250, y, 120, 50, colour, "b·s × f/2")
        drawing.box(430, y, 120, 50, colour, "b·s × h, partial")
        drawing.box(610, y, 120, 50, colour, "b·s/2 × h")
        drawing.arrow(372, y + 25, 428, y + 25)
    for a, b in ((192, 248), (552, 608)):
        for y1 in (61, 137):
            for y2 in (61, 137):
                drawing.arrow(a, y1, b, y2)
    drawing.write(220, 186, "all-gather", "small")
    drawing.write(400, 186, "no communication", "small")
    drawing.write(580, 186, "reduce-scatter", "small")
    return drawing


def heads() -> Drawing:
    """The heads that each of four tensor ranks holds, of 8 query heads and 2 KV heads."""
    drawing = Drawing(640, 150, "8 query heads and 2 KV heads on 4 tensor ranks")
    drawing.write(6, 48, "query", "left strong")
    drawing.write(6, 96, "key, value", "left strong")
    for rank in range(4):
        x, shard = 100 + 134 * rank, Mesh(tensor=4, kv_replicas=2, rank=rank).kv_replica.ranks[0] // 2
        drawing.write(x + 60, 14, f"rank {rank}", "strong")
        for head in (2 * rank, 2 * rank + 1):
            drawing.box(x + 62 * (head - 2 * rank), 28, 58, 40, f"c{shard}", f"Q{head}")
        drawing.box(x, 76, 120, 40, f"c{shard}", f"KV{shard}")
    drawing.write(320, 138, "ranks 0 and 1 hold replicas of KV head 0, ranks 2 and 3 of KV head 1", "small")
    return drawing


def ring() -> Drawing:
    """Causal attention matrix of eight chunks on four context ranks, all with the same amount of work."""
    degree, cell = 4, 34
    chunks = 2 * degree
    chunk_rank = {
        int(chunk): rank for rank in range(degree) for chunk in zigzag_positions(chunks, degree, rank)
    }
    drawing = Drawing(700, 340, "Zigzag: the blocks of causal attention that each rank computes")
    drawing.write(90 + chunks * cell / 2, 10, "keys, by chunk", "strong")
    drawing.write(6, 36 + chunks * cell / 2, "queries", "left strong")
    for query in range(chunks):
        for key in range(chunks):
            style = f"c{chunk_rank[query]}" if key <= query else "none"
            drawing.box(90 + key * cell, 36 + query * cell, cell, cell, style)
        drawing.write(90 - 12, 36 + query * cell + cell / 2, str(query), "small")
        drawing.write(90 + query * cell + cell / 2, 27, str(query), "small")
    for rank in range(degree):
        held = [int(chunk) for chunk in zigzag_positions(chunks, degree, rank)]
        work = sum(chunk + 1 for chunk in held)
        drawing.box(400, 60 + 46 * rank, 24, 24, f"c{rank}")
        drawing.write(
            434, 72 + 46 * rank, f"rank {rank}: chunks {held[0]} and {held[1]}, {work} blocks", "left"
        )
    drawing.write(
        350, 326, "keys and values travel around the ring; each rank attends to those that it holds", "small"
    )
    return drawing


def pipeline() -> Drawing:
    """1F1B on four stages with eight microbatches; a backward pass takes as long as two forward passes."""
    ranks, microbatches, unit = 4, 8, 21
    orders = {rank: one_forward_one_backward(ranks, rank, microbatches, 0) for rank in range(ranks)}
    end_times: dict[tuple[str, int, int], int] = {}
    clocks = dict.fromkeys(range(ranks), 0)
    boxes = []
    while any(orders.values()):
        for rank, order in orders.items():
            while order:
                kind, number = order[0]
                before = rank - 1 if kind == "F" else rank + 1
                if 0 <= before < ranks and (kind, before, number) not in end_times:
                    break
                start = max(clocks[rank], end_times.get((kind, before, number), 0))
                clocks[rank] = end_times[kind, rank, number] = start + (1 if kind == "F" else 2)
                boxes.append((rank, kind, number, start, clocks[rank]))
                order.pop(0)
    end = max(clocks.values())
    drawing = Drawing(80 + unit * end, 4 * 36 + 44, "One forward, one backward")
    for rank in range(ranks):
        drawing.write(6, 24 + 36 * rank, f"stage {rank}", "left strong")
        drawing.box(66, 8 + 36 * rank, unit * end, 32, "none")
    for rank, kind, number, start, stop in boxes:
        style = "c4" if kind == "F" else "c0"
        drawing.box(66 + unit * start, 8 + 36 * rank, unit * (stop - start), 32, style, str(number))
    drawing.box(66, 162, 14, 14, "c4")
    drawing.write(86, 169, "forward", "left small")
    drawing.box(146, 162, 14, 14, "c0")
    drawing.write(166, 169, "backward", "left small")
    drawing.box(236, 162, 14, 14, "none")
    drawing.write(256, 169, "bubble: (stages − 1) / microbatches of the compute time", "left small")
    return drawing


def zero1() -> Drawing:
    """A step of ZeRO-1 on two data-parallel ranks."""
    drawing = Drawing(760, 210, "A step of ZeRO-1 on two ranks")
    for x, name in (
        (70, "gradients"),
        (250, "reduced shard"),
        (430, "AdamW, float32"),
        (610, "parameters"),
    ):
        drawing.write(x + 60, 14, name, "strong")
    for rank in range(2):
        y = 36 + 76 * rank
        drawing.write(6, y + 25, f"rank {rank}", "left strong")
        for half in range(2):
            drawing.box(70 + 60 * half, y, 60, 50, f"c{4 + half}")
            drawing.box(610 + 60 * half, y, 60, 50, f"c{half}")
        drawing.box(250, y, 120, 50, f"c{4 + rank}", "n/2 elements")
        drawing.box(430, y, 120, 50, f"c{rank}", "sharded states")
        drawing.arrow(372, y + 25, 428, y + 25)
    for a, b in ((192, 248), (552, 608)):
        for y1 in (61, 137):
            for y2 in (61, 137):
                drawing.arrow(a, y1, b, y2)
    drawing.write(220, 186, "reduce-scatter,", "small")
    drawing.write(220, 200, "during backward", "small")
    drawing.write(580, 186, "all-gather,", "small")
    drawing.write(580, 200, "during the next forward", "small")
    return drawing


def loss() -> Drawing:
    """Fused, chunked cross-entropy on two tensor ranks: only one chunk's logits exist at a time."""
    drawing = Drawing(640, 230, "Cross-entropy without full logits")
    drawing.write(110, 14, "tokens × h", "strong")
    drawing.write(400, 14, "logits: tokens × v", "strong")
    for chunk in range(5):
        drawing.box(60, 30 + 34 * chunk, 100, 34, "c2" if chunk == 2 else "none", f"chunk {chunk}")
        for rank in range(2):
            drawing.box(240 + 160 * rank, 30 + 34 * chunk, 160, 34, f"c{rank}" if chunk == 2 else "none")
    drawing.write(320, 30 + 85, "rank 0: v/2", "light")
    drawing.write(480, 30 + 85, "rank 1: v/2", "light")
    drawing.arrow(164, 115, 234, 115)
    drawing.write(
        320,
        216,
        "each chunk's logits are overwritten by their gradient; the next chunk reuses the memory",
        "small",
    )
    return drawing


PICTURES: tuple[Callable[[], Drawing], ...] = (mesh, layers, heads, ring, pipeline, zero1, loss)


def main() -> None:
    for picture in PICTURES:
        (FOLDER / f"{picture.__name__}.svg").write_text(picture().svg())


if __name__ == "__main__":
    main()
