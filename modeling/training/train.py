"""Training, one process per device: `python -m modeling.training.train --run-folder RUN ...`

Reads RUN/profile.yaml and resumes from the latest complete checkpoint, or as `checkpoint.resume` asks (checkpoints.py). SIGTERM,
SIGINT and SIGUSR1 stop it after the step in progress and those that are queued by then, at most two, with a checkpoint unless
`checkpoint.on_stop` is false. The exit code says why it ended (exit_codes.py).
"""

from __future__ import annotations

import argparse
import logging
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from modeling.data import shard_cache
from modeling.data.corpus import Samples
from modeling.data.prefetch import Batch, Prefetcher
from modeling.data.records import RecordSamples, open_samples
from modeling.data.sample_order import sample_number
from modeling.models.build import build_optimizer
from modeling.supervision.profiling import StepTrace
from modeling.supervision.stragglers import node_names
from modeling.supervision.time_account import TimeAccount
from modeling.supervision.watchdog import Watchdog
from modeling.training.anomalies import AnomalyGuard, Ranges
from modeling.training.evaluate import evaluate_into, evaluate_split
from modeling.training.learning_rate import learning_rate
from modeling.training.metrics import evaluated
from modeling.training.recovery.checkpoints import Checkpoints, SaveGivenUp
from modeling.training.recovery.replicas import Replicas
from modeling.training.recovery.resume import Rejected
from modeling.training.reporter import Reporter
from modeling.training.step import Marks, QueuedStep, StepRecord, reduce_statistics, take_logit_clip
from modeling.training.trainer import Trainer, job_parser, start_job, timeouts_of
from parallel import ShardedAdamW, collectives
from parallel.checkpoint import checkpoint
from parallel.checkpoint.saver import StaleAttempt
from profiles.errors import counted
from profiles.files import exit_codes, run_files, state_files
from profiles.sections.base import required

log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    parser = job_parser("train")
    parser.add_argument("--weights", type=Path, help="checkpoint folder with the initial weights")
    parser.add_argument(
        "--adapters", type=Path, help="checkpoint folder with initial LoRA updates of the weights"
    )
    keep_help = "also start with the optimizer's state of these checkpoints"
    parser.add_argument("--keep-optimizer", action="store_true", help=keep_help)
    parser.add_argument("--reference", type=Path, help="folder of the reference model's log-probabilities")
    attempt_help = "number of this attempt, which may complete checkpoints while RUN/attempt contains it"
    parser.add_argument("--attempt", type=int, help=attempt_help)
    options = parser.parse_args(arguments)
    stop = StopSignal()
    stacks = options.run_folder / run_files.LOGS / "stacks"
    try:
        with start_job(options) as trainer:
            timeouts, store = timeouts_of(trainer.profile), trainer.connect_store()
            with Watchdog(stacks, trainer.mesh.rank, timeouts, store) as watchdog:
                return TrainingRun(trainer, options, stop, watchdog).train()
    except (StaleAttempt, checkpoint.LoadFailed, SaveGivenUp) as reason:
        log.error(f"{type(reason).__name__}: {reason}")
        return 1
    except Rejected as reason:
        log.error(f"rejected: {reason}")
        return exit_codes.REJECTED


class EvaluationStopped(Exception):
    """A rank was asked to stop during an evaluation."""


class TrainingRun:
    """The training loop on this rank, from its resume point to the last step, a stop signal or divergence.

    Args:
        options: the arguments of this module.
    """

    def __init__(
        self, trainer: Trainer, options: argparse.Namespace, stop: StopSignal, watchdog: Watchdog
    ) -> None:
        self.trainer, self.profile, self.settings = trainer, trainer.profile, trainer.profile.train
        self.stop, self.watchdog = stop, watchdog
        self.optimizer = make_optimizer(trainer)
        self._queued: QueuedStep | None = None  # the step whose results have not been read yet
        self._stopping = False  # whether any rank received a stop signal
        self._drifted: int | None = None  # step at which copies of weights were found to differ
        self._compute_seconds = 0.0  # this rank's compute time in the last finished step
        self._run = run = options.run_folder
        # file for the evaluation of the initial weights; None unless the run fine-tunes
        self.initial_evaluation = (
            run / run_files.INITIAL_EVALUATION if self.profile.fine_tunes and options.weights else None
        )
        location = options.checkpoints or run / run_files.CHECKPOINTS
        self.checkpoints = Checkpoints(trainer, self.optimizer, run, location, options.attempt)
        self.replicas = Replicas(trainer, self.optimizer, run)
        begun = time.monotonic()
        with watchdog.phase("load"):
            starts = options.weights, options.adapters
            self.step, state = self.checkpoints.resume(*starts, keep_optimizer=options.keep_optimizer)
        # whether the evaluation after this step was prevented by a stop
        self._evaluation_due = bool(state.get("evaluation_due")) and self._evaluates
        restore_seconds = time.monotonic() - begun
        self.guard = self._make_guard(state)
        cache = shard_cache.from_arguments(options, self.profile.data.cache_gigabytes)
        samples, self.validation = (
            open_samples(self.profile, options.dataset, split, cache, reference=options.reference)
            for split in ("train", "validation")
        )
        excluded = [(start, end) for start, end in state.get("left_out", [])]
        self.data = TrainingData(trainer, samples, excluded)
        self.data.seek(self.step)
        nodes = node_names(trainer.mesh)
        self.account = TimeAccount()
        self.reporter = Reporter(trainer, run, self.step, nodes, self.account) if trainer.leader else None
        self.trace = StepTrace(run, self.profile.cluster.trace if trainer.leader else None)
        if self.reporter:
            self.reporter.started(self.step, options.attempt, restore_seconds)

    def _make_guard(self, state: dict[str, Any]) -> AnomalyGuard:
        functions = self.trainer.functions.decide, self.trainer.functions.record
        return AnomalyGuard(self.settings, self.trainer.torch_device, state.get("guard"), functions)

    def train(self) -> int:
        """Train to the end, and complete a pending save. Returns the exit code."""
        code = self._train_steps()
        # Not after an error, when other ranks may wait in another collective than that of the save.
        with self.watchdog.phase("save"), self.account.phase("checkpoint_seconds"):
            self.checkpoints.close()
        if self.trace.active:
            with self.watchdog.phase("save"):
                self.trace.write(self.step)
        if self.reporter:
            with self.watchdog.phase("report"):
                self.reporter.ended(self.step)
                self.reporter.close()
        # The others wait for the leader: once a rank has exited with an error code, torchrun ends the rest.
        with self.watchdog.phase("save"):
            self._on_any_rank(False)
        return code

    def _train_steps(self) -> int:
        """Train until the last step, a stop signal or divergence. Returns the exit code."""
        self._evaluate_initial_weights()
        if self._evaluation_due:
            # An earlier attempt may have made it up.
            made_up = self._on_any_rank(self.trainer.leader and evaluated(self._run, self.step))
            self._evaluation_due = not made_up and self._evaluate_if_due() is None
        stopped = self._stopping  # during one of these evaluations, which remains due
        while self.step < self.settings.last_step and not stopped:
            self.step += 1
            self.trace.begin(self.step)
            self._queue_step()
            if self.trace.ends_with(self.step):
                with self.watchdog.phase("save"):
                    self.trace.write(self.step)
            if not self._needs_results():
                continue
            loss = self._finish_step()
            if self._drifted is not None:
                with self.watchdog.phase("report"):
                    self.replicas.synchronize(self._drifted)
                self._drifted = None
            if self.guard.exhausted:
                with self.watchdog.phase("load"):
                    rolled_back = self._roll_back()
                if not rolled_back:
                    return exit_codes.DIVERGED
                continue
            validation_loss = None if self._stopping else self._evaluate_if_due()
            self._evaluation_due = self._evaluates and validation_loss is None
            self._save_if_due(loss, validation_loss)
            stopped = self._stopping
        if self.step == self.settings.steps and not self._evaluation_due:
            return 0
        self._report_stop()
        return exit_codes.INTERRUPTED

    def _evaluate_initial_weights(self) -> None:
        """Evaluate the initial weights of a fine-tuning run as its final ones will be; once per run."""
        if self.initial_evaluation is None or self.step:
            return
        if self._on_any_rank(self.trainer.leader and state_files.exists(self.initial_evaluation)):
            return
        with self.watchdog.phase("evaluate"):
            try:
                where = self.initial_evaluation, self.trainer, self.validation
                result = evaluate_into(*where, 0, self._after_evaluated_pass)
            except EvaluationStopped:  # before anything was written
                self._stopping = True
                return
            if self.reporter:
                self.reporter.evaluation(0, result)

    def _on_any_rank(self, condition: bool) -> bool:
        """Whether a condition holds on at least one rank. Collective, without the device."""
        return any(self.trainer.sum_on_host(torch.tensor([float(condition)])))

    def _after_evaluated_pass(self) -> None:
        """Restart the timeout; raises EvaluationStopped, on every rank, if one was asked to stop. Collective."""
        self.watchdog.progress()
        if self._on_any_rank(self.stop.requested):
            raise EvaluationStopped

    def _queue_step(self) -> None:
        """Queue a step's work on the device, and finish the previous step in the meantime."""
        settings, optimizer, device = self.settings, self.optimizer, self.trainer.device
        waited_before = collectives.wait_time.seconds
        marks = Marks(device.mark())
        with nullcontext() if self.data.ready else self.watchdog.phase("data"):
            batch = self.data.next()
        marks.ready = device.mark()

        rate = learning_rate(settings, self.step)
        optimizer.begin_step(self.profile.accumulation_steps)
        token_weight = 1 / max(1, self.data.count_targets(self.step))  # weight of a token in the mean loss
        pairs_per_token = self.data.pairs_per_token(self.step)
        first_sample = self.data.first_sample(self.step)
        loss = self.trainer.forward_backward(
            batch, token_weight, first_sample, step=self.step, pairs_per_token=pairs_per_token
        )
        forward_waits = collectives.wait_time.seconds - waited_before
        marks.backward = device.mark()
        if self._queued:
            self._finish_step(in_step=True)

        flags = self.stop.requested, self.checkpoints.writing
        differing = self.replicas.count_differing(self.step)
        statistics = reduce_statistics(self.trainer, loss, *flags, self._compute_seconds, differing)
        marks.reduced = device.mark()
        clip = take_logit_clip(self.trainer)
        factors = None if clip is None else clip.row_factors
        update = optimizer.step(rate, skip=self.guard.decide(statistics[0]), row_factors=factors)
        self.guard.record(statistics[0], update.skipped)
        norms = update.gradient_norm, optimizer.parameter_norm()
        clipped = () if clip is None else clip.results
        results = self.trainer.functions.join(statistics, *clipped, *norms, update.skipped)
        marks.end = device.mark()
        waits = forward_waits, collectives.wait_time.seconds - waited_before
        self._queued = QueuedStep(self.step, rate, results, marks, waits)

    def _needs_results(self) -> bool:
        """Whether this step must be finished before the next is queued, because its results are needed."""
        saves = self.step == self.settings.steps or self.checkpoints.due(self.step)
        urgent = self._stopping or self._drifted is not None or self.guard.nearly_exhausted
        return bool(self._evaluates or saves or urgent)

    @property
    def _evaluates(self) -> bool:
        """Whether an evaluation follows this step."""
        every = self.profile.evaluate.every
        return bool(every) and self.step % every == 0

    def _finish_step(self, *, in_step: bool = False) -> float:
        """Read, act on and report the queued step; `in_step`: while the next one runs. Returns the loss."""
        queued, self._queued = required(self._queued), None
        found, timings = queued.read(self.trainer)
        reason = self.guard.reason(found.loss, found.gradient_norm) if found.skipped else ""
        self.guard.update(found.loss, found.skipped)
        self._compute_seconds = timings.compute
        self._stopping |= bool(found.stop_requests)
        if found.differing:
            self._drifted = queued.step
        # First, because the seconds of completing a save are part of the next step, if it is queued, not of this one.
        self.account.step(timings.total, skipped=found.skipped)
        if self.checkpoints.written(found.checkpoint_writers):
            with self.watchdog.phase("save"), self.account.phase("checkpoint_seconds", in_step=in_step):
                self.checkpoints.complete()
        self.watchdog.beat(queued.step, timings.total)
        if self.reporter:
            with self.watchdog.phase("report"):  # storage may stall for longer than a step may take
                self.reporter.step(StepRecord(queued.step, queued.learning_rate, found, reason, timings))
        return found.loss

    def _evaluate_if_due(self) -> float | None:
        """Validation loss after this step; None if no evaluation is due."""
        if not self._evaluates:
            return None
        with self.watchdog.phase("evaluate"), self.account.phase("evaluation_seconds"):
            try:
                batches = self.profile.evaluate.batches
                result = evaluate_split(self.trainer, self.validation, batches, self._after_evaluated_pass)
            except EvaluationStopped:  # in time for the step to be saved
                self._stopping = True
                return None
            if self.reporter:
                self.reporter.evaluation(self.step, result)
        return result.loss

    def _save_if_due(self, loss: float, validation_loss: float | None) -> None:
        finished = self.step == self.settings.steps
        save_on_stop = self._stopping and self.profile.checkpoint.on_stop
        if not (finished or save_on_stop or self.checkpoints.due(self.step)):
            return
        skipping = self.guard.skipped_in_a_row > 0  # a rollback would need the checkpoint from before
        state: dict[str, Any] = {"loss": loss, "left_out": self.data.excluded, "guard": self.guard.state()}
        state["evaluation_due"] = self._evaluation_due
        with self.watchdog.phase("save"), self.account.phase("checkpoint_seconds"):
            self.replicas.synchronize(self.step)
            self.checkpoints.save(
                self.step,
                validation_loss,
                last=finished or self._stopping,
                prune=not skipping,
                wait=self._wait_to_save,
                flush=self.reporter.flush if self.reporter else lambda: None,
                **state,
            )

    def _wait_to_save(self, seconds: float) -> bool:
        """Wait, or until a rank receives a stop signal; returns whether one has. Collective."""
        with self.watchdog.phase("save"):
            for _ in range(round(seconds)):
                time.sleep(1)
                if not self._stopping and self._on_any_rank(self.stop.requested):
                    self._stopping = True
                    break
        return self._stopping

    def _roll_back(self) -> bool:
        """Load the latest checkpoint from before the skipped steps, and exclude their samples.

        Returns:
            Whether the run can continue; False after `train.rollbacks` rollbacks, or without such a checkpoint.
        """
        first_bad, last_bad = self.step - self.guard.skipped_in_a_row + 1, self.step
        skipped = f"steps {first_bad} to {last_bad} were skipped"
        exhausted = len(self.data.excluded) >= self.settings.rollbacks
        begun = time.monotonic()
        found = None if exhausted else self.checkpoints.roll_back(first_bad)
        if found is None:
            rollbacks = counted(len(self.data.excluded), "time")
            cause = f"rolled back {rollbacks}" if exhausted else "no earlier checkpoint"
            if self.reporter:
                log.warning(f"stopped: {skipped}; {cause}")
                self.reporter.event("stopped", last_bad, f"{skipped}; {cause}")
            return False
        self.step, state = found
        excluded = self.data.exclude(first_bad, last_bad)
        self.guard = self._make_guard(state)
        self.data.seek(self.step)
        if self.reporter:
            reason = f"rolled back to step {self.step}: {skipped}; their samples are excluded"
            log.warning(reason)
            self.reporter.event("rollback", last_bad, reason, back_to=self.step, samples=list(excluded))
            self.reporter.rewind(self.step, time.monotonic() - begun)
        return True

    def _report_stop(self) -> None:
        saved = self.step == self.settings.steps or (self.step and self.profile.checkpoint.on_stop)
        outcome = f"saved step {self.step}, to be resumed from there" if saved else "not saved"
        log.info(f"interrupted: {outcome}")
        if self.reporter:
            with self.watchdog.phase("report"):
                self.reporter.event("interrupted", self.step, outcome)


class TrainingData:
    """This data rank's share of each step's global batch, prefetched.

    Args:
        excluded: ranges of sample numbers that the run skips.
    """

    def __init__(self, trainer: Trainer, samples: Samples | RecordSamples, excluded: Ranges) -> None:
        self.excluded = excluded
        self._trainer, self._samples, self._settings = trainer, samples, trainer.profile.train
        self._data_axis = trainer.mesh.data
        self._local_batch = self._settings.global_batch_size // self._data_axis.size
        self._batches: Prefetcher | None = None

    def seek(self, step: int) -> None:
        """Prefetch from the step after this one."""
        if self._batches:
            self._batches.close()  # the samples are read by one thread at a time
        if self._trainer.reads_samples:
            self._batches = Prefetcher(self._read, step + 1, self._settings.last_step)

    @property
    def ready(self) -> bool:
        """Whether `next` returns at once."""
        return self._batches is None or self._batches.ready

    def next(self) -> Batch:
        """The next step's batch; empty if no stage of this rank needs samples."""
        return self._batches.next() if self._batches else Batch()

    def first_sample(self, step: int) -> int:
        """Number of the first sample of this data rank at a step."""
        return self._first_global(step) + self._data_axis.rank * self._local_batch

    def count_targets(self, step: int) -> int:
        """Number of tokens, or pairs, over which the loss of a step's global batch is averaged."""
        return self._samples.count_targets(self._first_global(step), self._settings.global_batch_size)

    def pairs_per_token(self, step: int) -> float:
        """Pairs of a step's global batch per token of the chosen rows, for orpo; 0 for other objectives."""
        if not self._trainer.profile.objective.traits.odds_ratio:
            return 0.0
        assert isinstance(self._samples, RecordSamples)
        return self._samples.pairs_per_token(self._first_global(step), self._settings.global_batch_size)

    def exclude(self, first_step: int, last_step: int) -> tuple[int, int]:
        """Skip the samples of these steps from now on. Returns their range [start, end)."""
        end = self._first_global(last_step) + self._settings.global_batch_size
        samples = (self._first_global(first_step), end)
        self.excluded.append(samples)
        return samples

    def _first_global(self, step: int) -> int:
        return sample_number((step - 1) * self._settings.global_batch_size, self.excluded)

    def _read(self, step: int) -> Batch:
        return self._trainer.read_batch(self._samples, self.first_sample(step), self._local_batch)


def make_optimizer(trainer: Trainer) -> ShardedAdamW:
    return build_optimizer(trainer.profile, [*trainer.stages.values()], trainer.mesh, trainer.compile)


class StopSignal:
    """Records a stop signal, which the training loop checks in each step."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.requested = False
        for number in self.SIGNALS:
            signal.signal(number, self._request)

    def _request(self, *_: object) -> None:
        self.requested = True
        for number in self.SIGNALS:  # a second signal must not interrupt the save or the exit
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    exit_codes.leave(exit_codes.code_of(main))
