"""Simulated runs: run folders as training writes them, a simulated clock, the true time by category."""

import json

from modeling.supervision.time_account import TimeAccount, record_attempt
from modeling.training.metrics import record_event, truncate
from tasks.fleet.goodput import CATEGORIES
from tests.tasks.reporting.run_folders import write_checkpoint

SAVE_EVERY, EVALUATE_EVERY = 3, 4


class SimulatedRun:
    """Writes a run's files; `truth` has the seconds of each category."""

    def __init__(self, folder, steps=40, **facts):
        folder.mkdir(parents=True)
        self.folder, self.steps, self.facts = folder, steps, facts
        self.clock, self.truth = 1_800_000_000.0, dict.fromkeys(CATEGORIES, 0.0)
        self.saved, self.step = 0, 0
        self.spent = {}  # seconds of each step, which a later start may drop

    def wait(self, category, seconds):
        self.clock += seconds
        self.truth[category] += seconds

    def submit(self, idle, queue):
        if self.clock > 1_800_000_000.0:
            self.wait("idle", idle)
        record_attempt(self.folder, "submitted", time=self.clock)
        self.wait("queue", queue)

    def fail(self, reason, event="train retried"):
        record_event(self.folder, event, reason=reason, time=self.clock)

    def start(self, start, restore):
        """Begin a job and resume from the latest checkpoint."""
        begun = self.clock
        self.wait("start", start)
        self.wait("restore", restore)
        kept, last = truncate(self.folder / "metrics.jsonl", self.saved)
        self.account = TimeAccount()
        self.account.restart(last)
        self._drop()
        facts = {
            "restore_seconds": restore,
            "begun": begun,
            "nodes": ["n1"],
            "devices": 2,
            "steps": self.steps,
        }
        facts |= {"step_tokens": 100, "node_count": 1, "node_price": 2.0, **self.facts}
        ended = {"last_time": last["time"], "last_step": last["step"]} if last else {}
        dropped = self.account.restart(kept)
        row = {**facts, **ended, "step": self.saved, "dropped": dropped, "time": self.clock}
        record_attempt(self.folder, "started", **row)
        self.at_row = self.account.totals

    def _drop(self):
        for step in [step for step in self.spent if step > self.saved]:
            trained = self.spent.pop(step)
            self.truth["trained"] -= trained
            self.truth["repeated"] += trained
        self.step = self.saved

    def train(self, seconds, compiling, skipped=False):
        """Train one step, of which the last is saved."""
        self.step += 1
        self.wait("repeated" if skipped else "trained", seconds)
        if not skipped:
            self.spent[self.step] = seconds
        self.wait("compile", compiling)  # what the first step takes beyond the second
        self.account.step(seconds + compiling, skipped=skipped)
        self.at_row = self.account.totals
        row = {"step": self.step, "loss": 8 / (1 + self.step / 20), "step_seconds": seconds + compiling}
        row |= {
            "tokens_per_second": self.facts.get("step_tokens", 100) / seconds,
            "time": self.clock,
            **self.at_row,
        }
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.step == self.steps:
            write_checkpoint(self.folder, self.step)

    def evaluate(self, seconds):
        self.account.add("evaluation_seconds", seconds)
        self.wait("evaluation", seconds)

    def save(self, seconds):
        self.account.add("checkpoint_seconds", seconds)
        self.wait("checkpoint", seconds)
        self.saved = self.step

    def pause(self, seconds):
        self.wait("idle", seconds)

    def roll_back(self, restore):
        self.wait("restore", restore)
        kept, _ = truncate(self.folder / "metrics.jsonl", self.saved)
        dropped = self.account.restart(kept)
        self._drop()
        facts = {"restore_seconds": restore, "dropped": dropped, "time": self.clock}
        record_attempt(self.folder, "rollback", **facts)
        self.at_row = self.account.totals

    def report(self, step=None):
        """Write the report, with which the flow ends."""
        evaluation = {"step": step or self.steps, "validation_loss": 4.0, "perplexity": 54.6}
        report = {"plan": {"parameters": 5}, "evaluation": evaluation}
        (self.folder / "report.json").write_text(json.dumps(report))

    def end(self):
        facts = {"after_last": self.account.since(self.at_row), "time": self.clock}
        record_attempt(self.folder, "ended", step=self.step, **facts)
