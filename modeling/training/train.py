"""Training, one process per device: `python -m modeling.training.train --run-folder RUN --dataset FOLDER ...`.

Reads RUN/profile.yaml and goes on from the newest complete checkpoint, or as `checkpoint.resume` says (checkpoints.py).
SIGTERM, SIGINT and SIGUSR1 end it after the step under way, with a checkpoint if the profile says so; a later start goes on
from there. Why it ended is in its exit code (exits.py).
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from modeling import exit_codes
from modeling.compilation.graph_cache import prepare_cache
from modeling.data import shard_cache
from modeling.data.corpus import Corpus, Samples
from modeling.data.prefetch import Batch, Prefetcher, read_batch
from modeling.models.build import DTYPES
from modeling.models.flops import flops_per_token
from modeling.training.anomalies import Guard, Ranges, record, sample
from modeling.training.checkpoints import CannotSave, Checkpoints, Rejected
from modeling.training.evaluate import validation_loss
from modeling.training.learning_rate import learning_rate
from modeling.training.metrics import Metrics
from modeling.training.profiling import StepTrace
from modeling.training.stragglers import Stragglers, node_names, one_hot
from modeling.training.telemetry import Monitor
from modeling.training.trainer import Trainer
from modeling.training.watchdog import Watchdog
from parallel import ZeRO1, collectives
from parallel.checkpoint import checkpoint
from profiles.resolve import load

log = logging.getLogger("trainshed")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.training.train")
    parser.add_argument("--run-folder", type=Path, required=True, help="the run's folder, with profile.yaml")
    parser.add_argument("--dataset", type=Path, required=True, help="folder of the dataset artifact")
    parser.add_argument(
        "--graphs", type=Path, help="folder of the graphs artifact; without it training compiles as it goes"
    )
    parser.add_argument("--weights", type=Path, help="checkpoint folder to start the weights from")
    parser.add_argument("--checkpoints", help="folder or URI of the run's checkpoints (RUN/checkpoints)")
    parser.add_argument(
        "--attempt", type=int, help="this start's number; checkpoints count while RUN/attempt says the same"
    )
    shard_cache.add_arguments(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    profile = load(str(options.run_folder / "profile.yaml"))
    stop = Interrupt()
    graphs, precompiled = prepare_cache(profile, options.graphs, options.run_folder)
    cluster = profile.cluster
    try:
        with Trainer(profile, graphs, precompiled=precompiled) as trainer:
            stacks = options.run_folder / "logs" / "stacks"
            with Watchdog(stacks, trainer.mesh.rank, cluster.hang_factor, cluster.hang_seconds) as watchdog:
                return train(trainer, options, stop, watchdog)
    except (checkpoint.StaleAttempt, CannotSave) as reason:
        log.error(reason)
        return 1
    except Rejected as reason:
        log.error(f"rejected: {reason}")
        return exit_codes.REJECTED
    except (torch.OutOfMemoryError, MemoryError):
        log.exception("out of memory")
        return exit_codes.OUT_OF_MEMORY
    except ValueError:  # of the profile, the data or the checkpoint, each in words of its own
        log.exception("rejected")
        return exit_codes.REJECTED


def train(trainer: Trainer, options: argparse.Namespace, stop: Interrupt, watchdog: Watchdog) -> int:
    """The loop, from the newest checkpoint to the last step. Returns the exit code."""
    profile, mesh = trainer.profile, trainer.mesh
    settings = profile.train
    optimizer = make_optimizer(trainer)
    place = options.checkpoints or options.run_folder / "checkpoints"
    checkpoints = Checkpoints(trainer, optimizer, options.run_folder, place, options.attempt)
    step, about = checkpoints.resume(options.weights)
    if trainer.leader and options.attempt is not None and options.attempt > 1:
        where = f"from the checkpoint of step {step}" if step else "from the beginning, without a checkpoint"
        record(options.run_folder, "resumed", step=step, reason=f"start {options.attempt}, {where}")
    left_out: Ranges = [(first, end) for first, end in about.get("left_out", [])]
    s, batch = settings.sequence_length, settings.global_batch_size
    own = batch // mesh.data.size  # samples a step on this data rank
    scale = 1 / (batch * s)  # a token's share of the loss
    cache = shard_cache.from_arguments(options, profile.data.cache_gigabytes)
    samples = Samples(Corpus.open(options.dataset, "train", cache), s, settings.seed)
    validation = Samples(Corpus.open(options.dataset, "validation", cache), s, seed=None)

    def first(step: int) -> int:
        return sample((step - 1) * batch, left_out) + mesh.data.rank * own

    def reading(after: int) -> Prefetcher | None:
        return (
            Prefetcher(lambda k: read_batch(trainer, samples, first(k), own), after + 1, settings.steps)
            if trainer.reads_samples
            else None
        )

    batches = reading(step)
    guard = Guard(settings, about.get("guard"))
    stragglers = Stragglers(node_names())
    peak = trainer.device.peak(settings.precision)
    metrics = Metrics(options.run_folder, step, settings.steps) if trainer.leader else None
    monitor = Monitor(trainer.device) if trainer.leader else None
    trace = StepTrace(options.run_folder, profile.cluster.trace if trainer.leader else None)
    recent: deque[float] = deque(maxlen=20)

    while step < settings.steps:
        step += 1
        trace.begin(step)
        begun, idle = time.perf_counter(), collectives.waited.seconds
        mine = batches.next() if batches else Batch()
        waited = time.perf_counter() - begun

        rate = learning_rate(settings, step)
        optimizer.begin_step(profile.accumulation_steps)
        loss = trainer.forward_backward(mine.tokens, scale, first(step), mine.documents)
        worked = time.perf_counter() - begun - waited - (collectives.waited.seconds - idle)
        told = torch.tensor([loss.item(), stop.asked, checkpoints.writing], dtype=torch.float64)
        computed = time.perf_counter() - begun - waited  # of the device too, which was waited for
        compiled = trainer.compile_statistics.local_counts()
        told = torch.cat((told, compiled, one_hot(mesh.rank, mesh.size, worked * mesh.tensor.size)))
        total, stopping, writing, *rest = trainer.sum(told)
        compiled, rank_seconds = rest[: len(compiled)], rest[len(compiled) :]
        bad = guard.judge(total)
        summed = time.perf_counter()
        result = optimizer.step(rate, skip=bool(bad))
        guard.note(total, result.skipped)
        parameter_norm = optimizer.parameter_norm()
        checkpoints.poll(writing)

        ended = time.perf_counter()
        seconds, exchanged = ended - begun, collectives.waited.seconds - idle
        recent.append(seconds)
        watchdog.beat(step, seconds)
        if metrics:
            if result.skipped:
                reason = bad or f"gradient norm is {result.gradient_norm}"
                log.warning(f"WARNING step {step} skipped: {reason}")
                record(options.run_folder, "skipped", step=step, reason=reason)
            slow = stragglers.watch(step, rank_seconds)
            if slow:
                log.warning(f"WARNING {slow}")
                record(options.run_folder, "straggler", step=step, reason=slow)
            speed = batch * s / seconds
            values = {
                "step": step,
                "loss": total,
                "learning_rate": rate,
                "gradient_norm": result.gradient_norm,
                "parameter_norm": parameter_norm,
                "step_seconds": seconds,
                "data_wait_seconds": waited,
                "forward_backward_seconds": computed,
                "optimizer_seconds": ended - summed,
                "communication_seconds": exchanged if trainer.device.synchronous else None,
                "tokens_per_second": speed,
                "mfu": speed * flops_per_token(profile) / (peak * mesh.size) if peak else None,
                "consumed_samples": step * batch,
                "consumed_tokens": step * batch * s,
                "skipped": result.skipped,
                "rank_seconds": [round(each, 6) for each in rank_seconds],
                **(monitor.figures() if monitor else {}),
                **trainer.compile_statistics.metrics(compiled),
            }
            metrics.write(values)
            if step % settings.log_every == 0 or step in (1, settings.steps):
                log.info(metrics.line(values, sum(recent) / len(recent) * (settings.steps - step)))

        traced = trace.end(step)
        if traced:
            log.info(f"the trace of the last steps: {traced}")
        if guard.exhausted:
            back = go_back(trainer, options, checkpoints, step - guard.in_a_row + 1, step, left_out)
            if back is None:
                return exit_codes.DIVERGED
            step, about = back
            guard, batches = Guard(settings, about.get("guard")), reading(step)
            metrics = Metrics(options.run_folder, step, settings.steps) if metrics else None
            continue
        held_out = None
        if profile.evaluate.every and step % profile.evaluate.every == 0 and not stopping:
            with watchdog.patience():
                held_out = validation_loss(trainer, validation, profile.evaluate.batches)
            if metrics:
                row = {"step": step, "validation_loss": held_out.loss}
                metrics.write({**row, **held_out.metrics, **held_out.graphs})
                log.info(f"step {step}/{settings.steps}  validation loss {held_out.loss:.4f}")
        if (stopping and profile.checkpoint.on_stop) or step == settings.steps or checkpoints.due(step):
            with watchdog.patience():
                last = bool(stopping) or step == settings.steps
                loss_held_out = held_out.loss if held_out else None
                checkpoints.save(step, loss_held_out, last=last, left_out=left_out, guard=guard.state())
        if stopping:
            saved = (
                f"saved step {step}, to be resumed from there" if profile.checkpoint.on_stop else "not saved"
            )
            log.info(f"interrupted: {saved}")
            if trainer.leader:
                record(options.run_folder, "interrupted", step=step, reason=saved)
            break
    with watchdog.patience():
        checkpoints.close()
    if monitor:
        monitor.close()
    if metrics:
        metrics.close()
    return exit_codes.INTERRUPTED if step < settings.steps else 0


def make_optimizer(trainer: Trainer) -> ZeRO1:
    """ZeRO-1 AdamW over the trainer's parameters, as the profile sets it."""
    settings = trainer.profile.train
    return ZeRO1(
        trainer.named_parameters(),
        trainer.mesh,
        betas=settings.betas,
        epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
        decays=lambda name, parameter: settings.norm_weight_decay or parameter.dim() > 1,
        clip=settings.clip,
        shard=trainer.profile.parallel.zero1,
        gradient_dtype=DTYPES[settings.gradient_dtype],
        compiled=trainer.compiled_update(),
    )


def go_back(
    trainer: Trainer,
    options: argparse.Namespace,
    checkpoints: Checkpoints,
    bad: int,
    step: int,
    left_out: Ranges,
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint from before the steps `bad` to `step`, whose samples are added to those left out.

    Returns its step and what else it says; None where the run has gone back often enough, or has nothing to go back to.
    """
    settings = trainer.profile.train
    often = len(left_out) >= settings.rollbacks
    found = None if often else checkpoints.go_back(bad)
    if found is None:
        reason = f"went back {len(left_out)} times" if often else "there is no checkpoint to go back to"
        if trainer.leader:
            log.info(f"WARNING stopped: {step - bad + 1} bad steps in a row, and {reason}")
            record(
                options.run_folder,
                "stopped",
                step=step,
                reason=f"steps {bad} to {step} were bad, and {reason}",
            )
        return None
    batch = settings.global_batch_size
    dropped = (sample((bad - 1) * batch, left_out), sample((step - 1) * batch, left_out) + batch)
    left_out.append(dropped)
    if trainer.leader:
        reason = f"went back to step {found[0]}: steps {bad} to {step} were bad, their samples are left out"
        log.info(f"WARNING {reason}")
        facts = {"back_to": found[0], "samples": list(dropped), "reason": reason}
        record(options.run_folder, "rollback", step=step, **facts)
    return found


class Interrupt:
    """Remembers that a signal came; the loop asks after each step."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = False
        for number in self.SIGNALS:
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True
        for number in self.SIGNALS:  # another one must not end it while it saves, or as it ends
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    exit_codes.leave(main())
