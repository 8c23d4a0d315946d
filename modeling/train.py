"""The training program, one process a device: `python -m modeling.train --run-folder RUN --dataset FOLDER ...`.

Reads RUN/profile.yaml and resumes from the newest complete checkpoint in RUN/checkpoints. SIGTERM and SIGINT end it
after the step under way with a checkpoint and exit code 143; a later start goes on from there.
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

from modeling.compile import counts, unpack
from modeling.data import Corpus, Samples
from modeling.evaluate import validation_loss
from modeling.metrics import Metrics
from modeling.prefetch import Prefetch
from modeling.program import DTYPES, Program, flops_per_token
from modeling.schedule import learning_rate
from parallel import ZeRO1, checkpoint
from profiles.resolve import load
from profiles.schema import Profile

INTERRUPTED = 143
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
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    profile = load(str(options.run_folder / "profile.yaml"))
    stop = Interrupt()
    graphs = unpack(options.graphs, options.run_folder) if options.graphs else None
    try:
        with Program(profile, graphs) as program:
            return train(program, options, stop)
    except checkpoint.Superseded as reason:
        log.error(reason)
        return 1


def train(program: Program, options: argparse.Namespace, stop: Interrupt) -> int:
    """The loop, from the newest checkpoint to the last step. Returns the exit code."""
    profile, mesh = program.profile, program.mesh
    settings = profile.train
    optimizer = make_optimizer(program)
    step = resume(profile, options, optimizer)
    s, batch = settings.sequence_length, settings.global_batch_size
    own = batch // mesh.data.size  # samples a step on this data rank
    scale = 1 / (batch * s)  # a token's share of the loss
    samples = Samples(Corpus.open(options.dataset, "train"), s, settings.seed)
    validation = Samples(Corpus.open(options.dataset, "validation"), s, seed=None)
    batches = None
    if program.reads:
        batches = Prefetch(
            lambda k: samples.batch((k - 1) * batch + mesh.data.rank * own, own), step + 1, settings.steps
        )
    peak = program.device.peak(settings.precision)
    metrics = Metrics(options.run_folder, step, settings.steps) if program.leader else None
    recent: deque[float] = deque(maxlen=20)

    while step < settings.steps:
        step += 1
        begun = time.perf_counter()
        mine = torch.from_numpy(batches.next()) if batches else None  # (own, s + 1)
        waited = time.perf_counter() - begun

        rate = learning_rate(settings, step)
        optimizer.begin(profile.accumulation_steps)
        loss = program.forward_backward(mine, scale, (step - 1) * batch + mesh.data.rank * own)
        result = optimizer.step(rate)
        parameter_norm = optimizer.parameter_norm()
        total, stopping = program.sum(torch.stack((loss.cpu(), torch.tensor(float(stop.asked)))))

        seconds = time.perf_counter() - begun
        recent.append(seconds)
        if metrics:
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
                **counts(),
            }
            metrics.write(values)
            log.info(metrics.line(values, sum(recent) / len(recent) * (settings.steps - step)))

        if profile.evaluate.every and step % profile.evaluate.every == 0 and not stopping:
            held_out = validation_loss(program, validation, profile.evaluate.batches)
            if metrics:
                metrics.write({"step": step, "validation_loss": held_out.loss})
                log.info(f"step {step}/{settings.steps}  validation loss {held_out.loss:.4f}")
        if (
            stopping
            or step == settings.steps
            or (profile.checkpoint.every and step % profile.checkpoint.every == 0)
        ):
            save(program, options, optimizer, step)
        if stopping:
            log.info(f"interrupted: saved step {step}, to be resumed from there")
            break
    if metrics:
        metrics.close()
    return INTERRUPTED if step < settings.steps else 0


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


def resume(profile: Profile, options: argparse.Namespace, optimizer: ZeRO1) -> int:
    """Load what the run goes on from, say so, and return the step that is done."""
    saved = dict(checkpoint.complete(options.run_folder / "checkpoints"))
    asked = profile.checkpoint.resume
    if isinstance(asked, int) and asked not in saved:
        raise ValueError(
            f"checkpoint.resume = {asked}: complete checkpoints are {', '.join(map(str, saved)) or 'none'}"
        )
    if saved and asked != "none":
        step = asked if isinstance(asked, int) else max(saved)
        checkpoint.load(saved[step], optimizer)
        say(optimizer, f"resumed from step {step}")
        return step
    if options.weights:
        checkpoint.load(options.weights, optimizer, weights_only=True)
        say(optimizer, f"weights from {options.weights.name}; the optimizer and the schedule start anew")
    else:
        say(optimizer, f"from scratch, seed {profile.train.seed}")
    return 0


def say(optimizer: ZeRO1, text: str) -> None:
    if optimizer.mesh.rank == 0:
        log.info(text)


def save(program: Program, options: argparse.Namespace, optimizer: ZeRO1, step: int) -> None:
    """Write checkpoints/step_<n>, then remove what retention does not keep."""
    profile, folder = program.profile, options.run_folder / "checkpoints"
    consumed = step * profile.train.global_batch_size
    about = {"step": step, "consumed_samples": consumed, "profile": profile.model_dump(mode="json")}
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
    """Remembers that SIGTERM or SIGINT came; the loop asks after each step."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


if __name__ == "__main__":
    sys.exit(main())
