"""Run folders and reports for tests, and an HTML parser that requires well-formed pages."""

import json
from html.parser import HTMLParser

from tokenizers import Tokenizer, decoders, models

from parallel.checkpoint.locations import MARKER
from profiles import resolve
from profiles.files import run_files
from tasks import report
from tasks.reporting.outcome import Outcome
from tests.profiles.pair import PAIR

VOID = {"meta", "wbr", "link", "br", "img", "input"}
TRACED = {
    "programs": [
        {"name": "block, training", "graphs": [{"flops": 10**9}, {"flops": 2 * 10**9}]},
        {"name": "loss, training", "graphs": [{"flops": 10**9}]},
    ],
    "stages": [{"saved": 9 << 20, "peak": 2 << 20}],
}


class WellFormed(HTMLParser):
    """Collects text and addresses; asserts that tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.addresses = [], [], []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def write_run(folder, *overrides, losses=100):
    """Write a run folder: metrics of `losses` steps, two evaluations, one incident, an exported tokenizer."""
    folder.mkdir(parents=True)
    (folder / "profile.yaml").write_text(resolve.dump(resolve.load(PAIR, overrides, folder.name)))
    rows = [
        {"step": step, "loss": 8.3 - step / 100, "step_seconds": 0.5, "tokens_per_second": 4096.0}
        | {"forward_backward_seconds": 0.3, "optimizer_seconds": 0.1, "memory_bytes": 3 << 28}
        | {"skipped": step == 7, "learning_rate": 3e-3, "gradient_norm": 1 / step}
        for step in range(1, losses + 1)
    ]
    rows += [{"step": 50, "validation_loss": 7.0}, {"step": 100, "validation_loss": 7.35}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    event = {"event": "skipped", "time": 1.8e9, "step": 7, "reason": "loss is <nan>"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    vocabulary = {"To": 0, " be": 1, " or": 2, " <b>not</b>": 3, "</s>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="To"))
    tokenizer.decoder = decoders.Fuse()
    write_checkpoint(folder, losses)
    (folder / "export").mkdir()
    tokenizer.save(str(folder / "export/tokenizer.json"))
    (folder / "export/tokenizer_config.json").write_text('{"eos_token": "</s>"}')


def write_checkpoint(folder, step):
    """Write the marker of a complete checkpoint; returns its path."""
    marker = folder / run_files.checkpoint(step) / MARKER
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text("{}")
    return marker


def write_report(folder):
    """Write the report of `write_run`'s run; returns the path of report.html."""
    profile = resolve.load(str(folder / "profile.yaml")).model_copy(
        update={"description": "<script>alert(1)</script> & more"}
    )
    dataset = {"tokens": 604605, "documents": 681, "validation_tokens": 22816, "validation_documents": 38}
    dataset |= {"bytes": 2245413, "bytes_per_token": 3.579, "shards": 1}
    dataset |= {"missing": 0, "short": 1200, "duplicates": 3}
    compiled = {
        "total": 3,
        "failed": 0,
        "from_cache": 1,
        "seconds": 30.1,
        "programs": [
            {"name": "block", "graphs": 2, "status": "compiled", "seconds": 21.27, "peak_bytes": 5 << 28}
        ],
        "traced": TRACED,
    }
    outcomes = [
        Outcome("tokenizer", "cached", 4.0, summary={"vocabulary_size": 583, "source": "train"}),
        Outcome("dataset", "done", 4.2, summary=dataset),
        Outcome("checkpoint", "skipped", None, "from <scratch>"),
        Outcome("graphs", "done", 30.1, summary=compiled),
        Outcome("train", "done", 75),
    ]
    stage = {"bytes": {"parameters": 1 << 29, "optimizer": 505 << 20, "activations": 7 << 20}, "flops": 1e12}
    plan = {"parameters": 2735424, "mesh": {"data": 1, "tensor": 2}, "step_seconds": 0.25, "stages": [stage]}
    plan |= {"host_bytes": 450 << 20, "needs_bytes": 1474 << 20, "basis": "uncalibrated"}
    samples = [{"prompt": [0, 1], "text": [2, 3, 4, 1]}]  # " be" is after EOS
    evaluation = {
        "validation_loss": 7.4,
        "perplexity": 1635.98,
        "tokens": 12345,
        "step": 100,
        "metrics": {"user_accuracy": 0.123456},
        "samples": samples,
    }
    return report.write_report(profile, folder, plan, evaluation, outcomes)
