"""A run that trains in seconds: a profile, a learnable corpus, and programs started as by a launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from modeling.data.indexed import IndexedDatasetBuilder, token_dtype
from modeling.data.records import RECORD_DTYPE, Rows, pack_rows, rows_path
from profiles.resolve import dump, load
from tasks.launchers.base import START, TORCHRUN
from tests.forked_jobs import run_forked

VOCABULARY = 160
PROFILE = """
model: {architecture: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, vocab_size: 160, max_position_embeddings: 128}
tokenizer: {source: train, vocabulary_size: 160}
data: {sources: [{kind: python-docs}]}
parallel: {tensor: 2}
train: {steps: 12, global_batch_size: 4, micro_batch_size: 2, sequence_length: 32, learning_rate: 1.0e-2, warmup_steps: 2,
        precision: float32}
compile: {enabled: false}
checkpoint: {every: 4}
evaluate: {every: 6, batches: 2}
cluster: {launcher: local, devices_per_node: 2, device: cpu, threads: 1}
"""


def run_folder(folder: Path, *overrides: str) -> Path:
    """A run folder with its resolved profile."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source.yaml"
    source.write_text(PROFILE)
    (folder / "profile.yaml").write_text(dump(load(str(source), overrides, name="micro")))
    return folder


def dataset(folder: Path, tokens: int = 6000) -> Path:
    """A dataset artifact's folder; 4 of 5 tokens are a fixed permutation of the previous token."""
    generator = np.random.default_rng(7)
    order = generator.permutation(VOCABULARY)
    corpus: dict = {"format": 1, "vocabulary_size": VOCABULARY, "eos": 0, "sequence_length": 32}
    for split, count in (("train", tokens), ("validation", 1500)):
        stream = [0]
        for keep, other in zip(
            generator.random(count) < 0.8, generator.integers(VOCABULARY, size=count), strict=True
        ):
            stream.append(int(order[stream[-1]] if keep else other))
        prefix = folder / "artifacts" / "tokens" / "t" / split
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with IndexedDatasetBuilder(prefix, token_dtype(VOCABULARY)) as builder:
            builder.add_document(stream)
        corpus[split] = [{"path": f"tokens/t/{split}", "tokens": len(stream), "documents": 1}]
    target = folder / "artifacts" / "dataset" / "d"
    target.mkdir(parents=True, exist_ok=True)
    (target / "corpus.json").write_text(json.dumps(corpus))
    return target


def records(folder: Path, pairs: bool = False) -> Path:
    """Dataset artifact folder of prompts and answers; `pairs`: consecutive records are pairs with ratings."""
    generator = np.random.default_rng(7)
    target, references = folder / "artifacts" / "dataset" / "d", {}
    target.mkdir(parents=True)
    corpus: dict = {"format": 1, "vocabulary_size": VOCABULARY, "eos": 0, "records": True}
    for split, count in (("train", 120), ("validation", 16)):
        prompts, answers = generator.integers(2, 6, count), generator.integers(4, 12, count)
        prefix = folder / "artifacts" / "tokens" / "t" / split
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with IndexedDatasetBuilder(prefix, RECORD_DTYPE) as builder:
            for prompt, answer in zip(prompts, answers, strict=True):
                ids = generator.integers(VOCABULARY, size=prompt + answer)
                builder.add_document(np.where(np.arange(len(ids)) < prompt, ~ids, ids).astype(RECORD_DTYPE))
        lengths = prompts + answers
        rows = None if pairs else pack_rows(lengths, 32)
        Rows.of(lengths, answers, rows).write(rows_path(target, split))
        entry = {"path": f"tokens/t/{split}", "tokens": int(lengths.sum()), "documents": count}
        corpus[split], references[split] = [entry], -generator.random(count, np.float32) * 60
    (target / "corpus.json").write_text(json.dumps(corpus))
    if pairs:
        np.savez(target / "reference.npz", **references)
    return target


def start(program: str, *arguments: object, processes: int = 2) -> subprocess.Popen[str]:
    """Start `python -m modeling.<program>` with piped output, under torchrun unless `processes` is 0."""
    command = [sys.executable, "-m", START, f"modeling.{program}", *map(str, arguments)]
    if processes:
        port = ("--master-addr", "127.0.0.1", "--master-port", "0")
        command[1:1] = ["-m", START, TORCHRUN, "--nproc-per-node", str(processes), *port]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finish(process: subprocess.Popen[str], code: int | None = 0) -> str:
    """Wait for a program and return its output; fails unless it exits with this code (None: any)."""
    output, _ = process.communicate(timeout=300)
    assert code is None or process.returncode == code, output[-4000:]
    return output


def run(program: str, *arguments: object, processes: int = 2, code: int = 0) -> str:
    """Run a program to completion on forked ranks, which is much cheaper than `start`; returns its output."""
    found, output = run_forked(f"modeling.{program}", arguments, processes)
    assert found == code, output[-4000:]
    return re.sub(r"^\[rank \d+\] ", "", output, flags=re.MULTILINE)


def metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    return {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}
