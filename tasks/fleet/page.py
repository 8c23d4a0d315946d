"""The page of all runs: one self-contained HTML file, styled like a run's report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from profiles.errors import counted
from tasks.fleet.fleet import ACTIVE, Fleet, Node, RunView
from tasks.fleet.goodput import CATEGORIES
from tasks.fleet.run_summary import LATEST
from tasks.reporting import html
from tasks.reporting.chart import sparkline, stacked_bar
from tasks.reporting.format import format_age, format_count, format_duration, format_number

SLOW = 0.8  # share of the planned speed below which a run is in the warnings
NODES = 50  # maximum on the page
NODE_FAILURES = 3  # failures at which a node is in the warnings
NAMED = 5  # runs that a warning names
COLUMNS = {  # heading: attributes; data-number: sorted by number, class=number: aligned to the right
    "run": "",
    "state": "",
    "progress": " data-number",
    "loss": " data-number",
    "tokens": " data-number class=number",
    "tokens/s": f' data-number class=number title="in the last {LATEST} steps"',
    "goodput": " data-number",
    "cost": " data-number class=number",
    "last change": " data-number class=number",
}
SCRIPT = """<script>
const table = document.querySelector(".runs tbody"), rows = [...table.rows];
document.querySelector(".filter").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const row of rows) row.hidden = !words.every(word => row.dataset.text.includes(word));
});
document.querySelectorAll(".runs th").forEach((head, index) => {
  let sign = 1;
  head.addEventListener("click", () => {
    const key = row => row.cells[index].dataset.value;
    const number = head.dataset.number !== undefined;
    rows.sort((a, b) => sign * (number ? key(a) - key(b) : key(a).localeCompare(key(b))));
    sign = -sign;
    table.append(...rows);
  });
});
</script>"""


def render(fleet: Fleet) -> str:
    moment = datetime.fromtimestamp(fleet.time, UTC).strftime("%Y-%m-%d %H:%M UTC")
    warnings = [html.paragraph(f"{text}.") for text in warning_texts(fleet)]
    return html.page(
        "Runs",
        f"{fleet.location}, {moment}",
        [
            html.section("", html.key_figures(key_figures(fleet))),
            html.section("Warnings", *warnings),
            html.section("Where the device time went", *_time(fleet)),
            html.section("Runs", _table(fleet) if fleet.runs else html.paragraph("No runs.", muted=True)),
            html.section("Nodes", _nodes(fleet.nodes, fleet.time)),
        ],
        wide=True,
    )


def key_figures(fleet: Fleet) -> dict[str, str]:
    """Totals of all runs, by name."""
    use = fleet.use
    total = sum(use.values())
    held = sum(run.use.held * (run.summary.node_count or 1) for run in fleet.runs)
    figures = {
        "runs": f"{len(fleet.runs):,}",
        "active": f"{sum(run.state in ACTIVE for run in fleet.runs):,}",
        "training tokens": format_count(sum(run.tokens or 0 for run in fleet.runs)),
        "goodput": f"{use['trained'] / total:.0%}" if total else "–",
        "node hours held": format_number(held / 3600),
    }
    if costs := [run.cost for run in fleet.runs if run.cost is not None]:
        figures["cost so far"] = format_cost(sum(costs))
    return figures


def warning_texts(fleet: Fleet) -> list[str]:
    """Warnings: nodes that fail repeatedly, unreadable or failed runs, runs slower than planned."""
    texts = [
        f"Node {node.name} failed {node.failures} times, in {_first(node.runs)}: drain it, or exclude it with "
        f"--set 'cluster.slurm=[--exclude={node.name}]'"
        for node in fleet.nodes
        if node.failures >= NODE_FAILURES
    ]
    texts += [f"Not shown: {run.summary.problem}" for run in fleet.runs if run.summary.problem]
    failed = [
        f"{run.name} ({run.failed_step})" if run.failed_step != "train" else run.name
        for run in fleet.runs
        if run.state == "failed"
    ]
    if failed:
        texts.append(f"{len(failed)} failed: {_first(failed)}")
    texts += [
        f"{run.name} trains at {run.speed_of_plan:.0%} of the planned speed"
        for run in fleet.runs
        if run.state in ACTIVE and run.speed_of_plan is not None and run.speed_of_plan < SLOW
    ]
    return texts


def _first(names: Sequence[str]) -> str:
    """The first NAMED names, and the number of the others."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {counted(more, 'other')}" if more > 0 else "")


def format_cost(cost: float) -> str:
    """Format a cost in the currency of cluster.node_price: 12345.6 -> '12,346', 3.14159 -> '3.14'."""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.2f}"


def _time(fleet: Fleet) -> list[str]:
    use = fleet.use
    total = sum(use.values())
    if not total:
        return [html.paragraph("No run has recorded its time yet.", muted=True)]
    legend = "".join(
        f'<span><i class="{name}"></i>{name} {use[name] / total:.1%}</span>'
        for name in CATEGORIES
        if use[name] / total >= 0.0005  # 0.1%
    )
    bar = stacked_bar(use).replace('class="stack"', 'class="stack tall"', 1)
    return [bar, f'<div class="legend">{legend}</div>']


def _table(fleet: Fleet) -> str:
    priced = any(run.cost is not None for run in fleet.runs)
    names = [name for name in COLUMNS if priced or name != "cost"]
    head = "".join(f"<th{COLUMNS[name]}>{escape(name)}</th>" for name in names)
    body = "".join(_row(run, fleet.time, priced) for run in fleet.runs)
    return (
        '<input class="filter" type="search" placeholder="filter by name and state" aria-label="filter">'
        f'<div class="scroll"><table class="grid runs"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{SCRIPT}"
    )


def _row(run: RunView, now: float, priced: bool) -> str:
    """The row of a run; `priced`: with the column of costs."""
    summary, goodput, speed = run.summary, run.use.goodput, run.speed_of_plan
    loss = summary.last["loss"] if summary.last else None
    measured = summary.tokens_per_second
    cells = [
        _cell(run.name, escape(run.name), f"from {summary.parent}" if summary.parent else ""),
        _cell(run.state, f'<span class="state {run.state}">{run.shown_state}</span>'),
        _cell(run.step / summary.steps if summary.steps else 0, _progress(run), _progress_text(run)),
        _cell(
            loss if loss is not None else 1e9,
            sparkline(summary.curve, label=f"training loss of {run.name}"),
            _loss_text(run, loss),
        ),
        _cell(run.tokens or 0, format_count(run.tokens) if run.tokens else "", number=True),
        _cell(
            measured or 0,
            f"{measured:,.0f}" if measured else "",
            f"{speed:.0%} of plan" if speed else "",
            number=True,
            low=speed is not None and speed < SLOW,
        ),
        _cell(
            goodput or 0,
            stacked_bar(run.use.seconds),
            f"{goodput:.0%} of {format_duration(run.use.total)}" if goodput else "",
        ),
        *([_cell(run.cost or 0, *_cost(run), number=True)] if priced else []),
        _cell(
            -summary.changed,
            f"{format_age(now - summary.changed)} ago" if summary.changed else "",
            number=True,
        ),
    ]
    text = escape(f"{run.name} {run.state} {run.failed_step or ''}".lower())
    return f'<tr data-text="{text}">{"".join(cells)}</tr>'


def _cell(value: object, shown: str, note: str = "", *, number: bool = False, low: bool = False) -> str:
    classes = " ".join(["number"] * number + ["low"] * low)
    attributes = f' class="{classes}"' if classes else ""
    small = f"<small>{escape(note)}</small>" if note else ""
    return f'<td{attributes} data-value="{escape(str(value))}">{shown}{small}</td>'


def _progress(run: RunView) -> str:
    steps = run.summary.steps
    return f'<progress max="{steps}" value="{run.step}"></progress>' if steps else ""


def _progress_text(run: RunView) -> str:
    steps = run.summary.steps
    text = f"{run.step:,} of {steps:,}" if steps else f"{run.step:,}"
    left = run.seconds_left if run.state in ACTIVE else None
    return f"{text}, {format_duration(left)} left" if left else text


def _loss_text(run: RunView, loss: float | None) -> str:
    summary = run.summary
    shown = {"": loss, "validation ": summary.validation_loss}
    if summary.validation_loss is None:
        shown["validation, subset "] = summary.last_validation_loss
    return ", ".join(f"{name}{value:.4f}" for name, value in shown.items() if value is not None)


def _cost(run: RunView) -> tuple[str, str]:
    """Cost so far; and, as a note, the expected and the planned cost of the whole run."""
    if run.cost is None:
        return "", ""
    parts = []
    if run.final_cost is not None and run.state != "finished":
        parts.append(f"{format_cost(run.final_cost)} in all")
    if run.planned_cost is not None:
        parts.append(f"plan {format_cost(run.planned_cost)}")
    return format_cost(run.cost), ", ".join(parts)


def _nodes(nodes: Sequence[Node], now: float) -> str:
    rows = [
        (
            node.name,
            f"{node.failures}",
            f"{node.stragglers}",
            ", ".join(node.runs),
            f"{format_age(now - node.latest)} ago",
        )
        for node in nodes[:NODES]
    ]
    return html.table(("node", "failures", "straggler warnings", "failed runs", "latest"), rows)
