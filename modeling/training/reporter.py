"""Reporting by the leading rank: a run's metrics rows, log lines, straggler warnings and events."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from modeling.models.flops import flops_per_token
from modeling.supervision.stragglers import Stragglers
from modeling.supervision.telemetry import Telemetry
from modeling.supervision.time_account import TimeAccount, job_begin, record_attempt, usual_step
from modeling.training import multi_token
from modeling.training.evaluate import Evaluation
from modeling.training.metrics import MetricsWriter, record_event
from modeling.training.step import StepRecord
from modeling.training.trainer import Trainer
from profiles.files import run_files, state_files

log = logging.getLogger(__name__)


class Reporter:
    """Writes a run's metrics, log lines and events; exists on the leading rank only.

    Args:
        run: the run folder.
        step: step that training resumes after.
        nodes: name of each rank's node.
        account: the run's time account, whose totals are part of each training row.
    """

    def __init__(
        self, trainer: Trainer, run: Path, step: int, nodes: list[str], account: TimeAccount
    ) -> None:
        self._trainer, self._run, self._nodes, self._account = trainer, run, nodes, account
        self._settings = trainer.profile.train
        self._peak_flops = trainer.device.peak(self._settings.precision)
        self._metrics = MetricsWriter(run, step, self._settings.last_step)
        self._telemetry = Telemetry(trainer.device)
        self._stragglers = Stragglers(nodes)
        self._row_totals = account.totals  # those of the last row
        self._recent: deque[dict[str, Any]] = deque(maxlen=20)  # rows

    def event(self, name: str, step: int, reason: str, **facts: Any) -> None:
        """Append an event to the run's events.jsonl."""
        record_event(self._run, name, step=step, **facts, reason=reason)

    def started(self, step: int, attempt: int | None, restore_seconds: float) -> None:
        """Record that training begins, and the time of the previous attempt's steps that are repeated."""
        last = self._metrics.last
        self._account.restart(last)
        dropped = self._account.restart(self._metrics.kept)
        self._row_totals = self._account.totals
        settings, cluster = self._settings, self._trainer.profile.cluster
        facts = {
            "attempt": attempt,
            "begun": round(job_begin(), 3),
            "nodes": list(dict.fromkeys(self._nodes)),  # in order of their ranks
            "restore_seconds": round(restore_seconds, 6),
            "devices": len(self._nodes),
            "steps": settings.steps,
            "step_tokens": self._trainer.profile.step_tokens,
            "node_count": cluster.nodes,
            "node_price": cluster.node_price,
        }
        if last:
            facts |= {"last_time": last.get("time"), "last_step": last["step"]}
        record_attempt(self._run, "started", step=step, **facts, dropped=dropped)
        if attempt is not None and attempt > 1:
            source = f"the checkpoint of step {step}" if step else "the beginning, without a checkpoint"
            self.event("resumed", step, f"start {attempt}, from {source}")

    def step(self, record: StepRecord) -> None:
        """Write the metrics row of a step, its log line if due, and warnings."""
        settings, step = self._settings, record.step
        if record.skip_reason:
            log.warning(f"step {step} skipped: {record.skip_reason}")
            self.event("skipped", step, record.skip_reason)
        if straggler := self._stragglers.update(step, record.statistics.rank_seconds):
            log.warning(straggler)
            self.event("straggler", step, straggler)
        self._row_totals = self._account.totals
        row = self._row(record)
        self._metrics.write(row)
        self._report_compiled(step)
        self._recent.append(row)
        if step % settings.log_every == 0 or step in (1, settings.last_step):
            usual = usual_step(self._recent)
            left = None if usual is None else usual["step_seconds"] * (settings.last_step - step)
            log.info(self._metrics.log_line(row, left))
            if experts := record.statistics.experts:
                with contextlib.suppress(OSError):  # lost if the disk is full
                    text = json.dumps({"step": step, "loads": experts.loads})
                    state_files.write(self._run / run_files.EXPERT_LOADS, text)

    def _row(self, record: StepRecord) -> dict[str, Any]:
        trainer, statistics, timings = self._trainer, record.statistics, record.timings
        samples = record.step * self._settings.global_batch_size
        step_tokens = trainer.profile.step_tokens
        tokens_per_second = step_tokens / timings.total
        of_clip = {"max_logit": statistics.max_logit, "clipped_heads": statistics.clipped_heads}
        flops = tokens_per_second * flops_per_token(trainer.profile)
        return {
            "step": record.step,
            "loss": statistics.loss,
            "learning_rate": record.learning_rate,
            "gradient_norm": statistics.gradient_norm,
            "parameter_norm": statistics.parameter_norm,
            **({} if statistics.max_logit is None else of_clip),
            "step_seconds": timings.total,
            "data_wait_seconds": timings.data_wait,
            "forward_backward_seconds": timings.forward_backward,
            "optimizer_seconds": timings.optimizer,
            "communication_seconds": timings.communication if trainer.device.synchronous else None,
            "tokens_per_second": tokens_per_second,
            "mfu": flops / (self._peak_flops * trainer.mesh.size) if self._peak_flops else None,
            "consumed_samples": samples,
            "consumed_tokens": record.step * step_tokens,
            "time": round(time.time(), 3),
            **self._row_totals,
            "skipped": bool(record.skip_reason),
            "rank_seconds": [round(seconds, 6) for seconds in statistics.rank_seconds],
            **self._telemetry.readings(),
            **trainer.compile_statistics.metrics(statistics.graph_counts),
            **(statistics.experts.metrics() if statistics.experts else {}),
            **multi_token.metrics(statistics.module_losses),
        }

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Write the metrics row and log line of an evaluation during training."""
        loss = {"validation_loss": result.loss, **result.by_source, "validation_tokens": result.tokens}
        self._metrics.write({"step": step, **loss, **result.metrics, **result.graphs})
        log.info(f"step {step}/{self._settings.steps}  validation loss {result.loss:.4f}")
        self._report_compiled(step)

    def _report_compiled(self, step: int) -> None:
        """Report programs that were compiled in training although graphs were compiled ahead of time."""
        for reason in self._trainer.compile_statistics.take_reasons():
            self.event("graph cache miss", step, reason)

    def flush(self) -> None:
        """Write metrics rows that are buffered because they could not be written before."""
        self._metrics.flush()

    def rewind(self, step: int, restore_seconds: float) -> None:
        """Drop the metrics rows after the step that the run was rolled back to."""
        self._metrics.close()
        self._metrics = MetricsWriter(self._run, step, self._settings.last_step)
        dropped = self._account.restart(self._metrics.kept)
        self._row_totals = self._account.totals
        facts = {"restore_seconds": round(restore_seconds, 6), "dropped": dropped}
        record_attempt(self._run, "rollback", step=step, **facts)

    def ended(self, step: int) -> None:
        """Record this attempt's end and the time since its last row: of an evaluation, the last checkpoint."""
        record_attempt(self._run, "ended", step=step, after_last=self._account.since(self._row_totals))

    def close(self) -> None:
        self._telemetry.close()
        self._metrics.close()
