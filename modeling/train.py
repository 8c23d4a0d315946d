"""The training program, one process a device: `python -m modeling.train --run-folder RUN --dataset FOLDER ...`.

Reads RUN/profile.yaml and resumes from the newest complete checkpoint in RUN/checkpoints. SIGTERM, SIGINT and SIGUSR1 end it
after the step under way, with a checkpoint if the profile says so; a later start goes on from there. Why it ended is in its exit
code (exits.py).
"""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import sys
import time
from collections import deque
from pathlib import Path

import torch

from modeling import exits, stage
from modeling.anomalies import Guard, Ranges, record, sample
from modeling.compile import counts, unpack
from modeling.data import Corpus, Samples
from modeling.evaluate import validation_loss
from modeling.metrics import Metrics
from modeling.prefetch import Batch, Prefetch, read
from modeling.program import DTYPES, Program, flops_per_token
from modeling.schedule import learning_rate
from modeling.stragglers import Stragglers, node_names, one_hot
from modeling.watchdog import Watchdog
from parallel import ZeRO1, checkpoint, collectives
from profiles.resolve import load
from profiles.schema import Profile

log = logging.getLogger("trainshed")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.train")
    parser.add_argument("--run-folder", type=Path, required=True, help="the run's folder, with profile.yaml")
    parser.add_argument("--dataset", type=Path, required=True, help="folder of the dataset artifact")
    parser.add_argument(
        "--graphs", type=Path, help="folder of the graphs artifact; without it training is eager"
    )
    parser.add_argument("--weights", type=Path, help="checkpoint folder to start the weights from")
    parser.add_argument(
        "--attempt", type=int, help="this start's number; checkpoints count while RUN/attempt says the same"
    )
    stage.add_arguments(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    profile = load(str(options.run_folder / "profile.yaml"))
    stop = Interrupt()
    graphs = unpack(options.graphs, options.run_folder) if options.graphs else None
    cluster = profile.cluster
    try:
        with Program(profile, graphs) as program:
            stacks = options.run_folder / "logs" / "stacks"
            with Watchdog(stacks, program.mesh.rank, cluster.hang_factor, cluster.hang_seconds) as watchdog:
                return train(program, options, stop, watchdog)
    except checkpoint.Superseded as reason:
        log.error(reason)
        return 1
    except (torch.OutOfMemoryError, MemoryError):
        log.exception("out of memory")
        return exits.OUT_OF_MEMORY
    except ValueError:  # of the profile, the data or the checkpoint, each in words of its own
        log.exception("refused")
        return exits.REFUSED


def train(program: Program, options: argparse.Namespace, stop: Interrupt, watchdog: Watchdog) -> int:
    """The loop, from the newest checkpoint to the last step. Returns the exit code."""
    profile, mesh = program.profile, program.mesh
    settings = profile.train
    optimizer = make_optimizer(program)
    step, left_out = resume(profile, options, optimizer)
    s, batch = settings.sequence_length, settings.global_batch_size
    own = batch // mesh.data.size  # samples a step on this data rank
    scale = 1 / (batch * s)  # a token's share of the loss
    staged = stage.of(options, profile.data.cache_gigabytes)
    samples = Samples(Corpus.open(options.dataset, "train", staged), s, settings.seed)
    validation = Samples(Corpus.open(options.dataset, "validation", staged), s, seed=None)

    def first(step: int) -> int:
        return sample((step - 1) * batch, left_out) + mesh.data.rank * own

    def reading(after: int) -> Prefetch | None:
        return (
            Prefetch(lambda k: read(program, samples, first(k), own), after + 1, settings.steps)
            if program.reads
            else None
        )

    batches = reading(step)
    guard = Guard(settings)
    stragglers = Stragglers(node_names())
    peak = program.device.peak(settings.precision)
    metrics = Metrics(options.run_folder, step, settings.steps) if program.leader else None
    recent: deque[float] = deque(maxlen=20)

    while step < settings.steps:
        step += 1
        begun, idle = time.perf_counter(), collectives.waited.seconds
        mine = batches.next() if batches else Batch()
        waited = time.perf_counter() - begun

        rate = learning_rate(settings, step)
        optimizer.begin(profile.accumulation_steps)
        loss = program.forward_backward(mine.tokens, scale, first(step), mine.documents)
        worked = time.perf_counter() - begun - waited - (collectives.waited.seconds - idle)
        told = torch.tensor([loss.item(), float(stop.asked)], dtype=torch.float64)
        told = torch.cat((told, one_hot(mesh.rank, mesh.size, worked * mesh.tensor.size)))
        total, stopping, *rank_seconds = program.sum(told)
        bad = guard.judge(total)
        result = optimizer.step(rate, skip=bool(bad))
        guard.note(total, result.skipped)
        parameter_norm = optimizer.parameter_norm()

        seconds = time.perf_counter() - begun
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
                "tokens_per_second": speed,
                "mfu": speed * flops_per_token(profile) / (peak * mesh.size) if peak else None,
                "consumed_samples": step * batch,
                "consumed_tokens": step * batch * s,
                "skipped": result.skipped,
                "rank_seconds": [round(each, 6) for each in rank_seconds],
                **counts(),
            }
            metrics.write(values)
            log.info(metrics.line(values, sum(recent) / len(recent) * (settings.steps - step)))

        if guard.exhausted:
            back = go_back(program, options, optimizer, step - guard.in_a_row + 1, step, left_out)
            if back is None:
                return exits.DIVERGED
            guard, step, batches = Guard(settings), back, reading(back)
            metrics = Metrics(options.run_folder, step, settings.steps) if metrics else None
            continue
        if profile.evaluate.every and step % profile.evaluate.every == 0 and not stopping:
            with watchdog.patience():
                held_out = validation_loss(program, validation, profile.evaluate.batches)
            if metrics:
                metrics.write({"step": step, "validation_loss": held_out.loss})
                log.info(f"step {step}/{settings.steps}  validation loss {held_out.loss:.4f}")
        if (
            (stopping and profile.checkpoint.on_stop)
            or step == settings.steps
            or (profile.checkpoint.every and step % profile.checkpoint.every == 0)
        ):
            with watchdog.patience():
                save(program, options, optimizer, step, left_out)
        if stopping:
            saved = (
                f"saved step {step}, to be resumed from there" if profile.checkpoint.on_stop else "not saved"
            )
            log.info(f"interrupted: {saved}")
            break
    if metrics:
        metrics.close()
    return exits.INTERRUPTED if step < settings.steps else 0


def make_optimizer(program: Program) -> ZeRO1:
    """ZeRO-1 AdamW over the program's parameters, as the profile sets it."""
    settings = program.profile.train
    return ZeRO1(
        program.named_parameters(),
        program.mesh,
        betas=settings.betas,
        epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
        decays=lambda name, parameter: settings.norm_weight_decay or parameter.dim() > 1,
        clip=settings.clip,
        shard=program.profile.parallel.zero1,
        gradient_dtype=DTYPES[settings.gradient_dtype],
    )


def resume(profile: Profile, options: argparse.Namespace, optimizer: ZeRO1) -> tuple[int, Ranges]:
    """Load what the run goes on from, say so, and return the step that is done and the samples that are left out."""
    saved = dict(checkpoint.complete(options.run_folder / "checkpoints"))
    asked = profile.checkpoint.resume
    if isinstance(asked, int) and asked not in saved:
        raise ValueError(
            f"checkpoint.resume = {asked}: complete checkpoints are {', '.join(map(str, saved)) or 'none'}"
        )
    if saved and asked != "none":
        step = asked if isinstance(asked, int) else max(saved)
        about = checkpoint.load(saved[step], optimizer)
        say(optimizer, f"resumed from step {step}")
        return step, [(first, end) for first, end in about.get("left_out", [])]
    if options.weights:
        checkpoint.load(options.weights, optimizer, weights_only=True)
        say(optimizer, f"weights from {options.weights.name}; the optimizer and the schedule start anew")
    else:
        say(optimizer, f"from scratch, seed {profile.train.seed}")
    return 0, []


def go_back(
    program: Program,
    options: argparse.Namespace,
    optimizer: ZeRO1,
    bad: int,
    step: int,
    left_out: Ranges,
) -> int | None:
    """Load the newest checkpoint from before the steps `bad` to `step`, whose samples are added to those left out.

    Returns its step; None where the run has gone back often enough, or has nothing to go back to.
    """
    settings, folder = program.profile.train, options.run_folder / "checkpoints"
    saved = dict(checkpoint.complete(folder))
    before = max((number for number in saved if number < bad), default=None)
    often = len(left_out) >= settings.rollbacks
    if before is None or often:
        reason = f"went back {len(left_out)} times" if often else "there is no checkpoint to go back to"
        say(optimizer, f"WARNING stopped: {step - bad + 1} bad steps in a row, and {reason}")
        if program.leader:
            record(
                options.run_folder,
                "stopped",
                step=step,
                reason=f"steps {bad} to {step} were bad, and {reason}",
            )
        return None
    batch = settings.global_batch_size
    dropped = (sample((bad - 1) * batch, left_out), sample((step - 1) * batch, left_out) + batch)
    checkpoint.load(saved[before], optimizer)
    left_out.append(dropped)
    say(
        optimizer,
        f"WARNING went back to step {before}: steps {bad} to {step} were bad, their samples are left out",
    )
    if program.leader:
        record(options.run_folder, "rollback", step=step, back_to=before, samples=list(dropped))
        for number in (number for number in saved if number > before):  # they are of what was given up
            (saved[number] / checkpoint.MARKER).unlink()
            shutil.rmtree(saved[number])
    return before


def say(optimizer: ZeRO1, text: str) -> None:
    if optimizer.mesh.rank == 0:
        log.info(text)


def save(
    program: Program, options: argparse.Namespace, optimizer: ZeRO1, step: int, left_out: Ranges
) -> None:
    """Write checkpoints/step_<n>, then remove what retention does not keep."""
    profile, folder = program.profile, options.run_folder / "checkpoints"
    consumed = step * profile.train.global_batch_size
    about = {
        "step": step,
        "consumed_samples": consumed,
        "left_out": left_out,
        "profile": profile.model_dump(mode="json"),
    }
    checkpoint.save(folder / f"step_{step}", optimizer, about, lambda: require_current(options))
    if not program.leader:
        return
    saved = dict(checkpoint.complete(folder))
    keep = set(sorted(saved)[-profile.checkpoint.keep :]) if profile.checkpoint.keep else set(saved)
    if profile.checkpoint.keep_every:
        keep |= {step for step in saved if step % profile.checkpoint.keep_every == 0}
    for old in set(saved) - keep:
        (saved[old] / checkpoint.MARKER).unlink()  # first, so that half of it never counts
        shutil.rmtree(saved[old])


def require_current(options: argparse.Namespace) -> None:
    """Raise `Superseded` where a later attempt has begun: a rank cut off from its launcher may still be running."""
    if options.attempt is None:
        return
    current = int((options.run_folder / "attempt").read_text())
    if current != options.attempt:
        raise checkpoint.Superseded(
            f"attempt {options.attempt} ends: attempt {current} has taken over the run"
        )


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
    exits.leave(main())
