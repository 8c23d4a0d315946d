"""Compare SFT (packed) and DPO training steps with TRL's: same model, records, batch and precision.

Both sides run eager in one process with one thread, in float32, on records of random words; only answers count in the loss. The
sides alternate, and the first steps of each run warm up. Prints the median wall and CPU time of a step, and TRL's time over ours.
With packed pairs, our steps have varying numbers of pairs; their times are scaled to the number of pairs in TRL's step.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from modeling.data.records import RecordSamples, open_samples
from modeling.training.reference import log_probabilities
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from profiles.huggingface.config import from_config_json
from profiles.schema import Profile
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store

WARM_UP = 2  # steps of each run
RATE = 1e-4
Times = tuple[float, float]  # wall and CPU seconds


def write_inputs(folder: Path, records: int) -> Any:
    """Write a byte tokenizer, a Llama and records into a folder; returns the model's configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<pad>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder / "tokenizer")
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4096, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    chance = random.Random(0)

    def words(least: int, most: int) -> str:
        return "".join(chance.choices("abcdefgh ", k=chance.randint(least, most)))

    rows = [
        {
            "prompt": words(40, 160),
            "completion": (right := words(20, 120)),
            "chosen": right,
            "rejected": words(20, 120),
        }
        for _ in range(records)
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


class Work(NamedTuple):
    """A workload: samples per step and tokens per row, for ours and for TRL."""

    kind: str
    packing: bool
    batch: int
    sequence: int
    their_batch: int
    their_sequence: int


# Records have 61 to 281 tokens, so neither side truncates any.
WORK = {
    "SFT, packed": Work("sft", True, 4, 512, 4, 512),
    "DPO, padded": Work("dpo", False, 8, 288, 8, 288),
    "DPO, packed": Work("dpo", True, 1, 1152, 8, 288),
}


def profile(folder: Path, config: Any, work: Work) -> Profile:
    """Our profile for the workload."""
    source = {"kind": "files", "path": str(folder / "records.jsonl")}
    return Profile.model_validate(
        {
            "name": "finetuning",
            "model": from_config_json(config.to_dict()),
            "tokenizer": {"source": str(folder / "tokenizer")},
            "data": {"sources": [{**source, "use": "train"}, {**source, "use": "validation"}]},
            "objective": {"kind": work.kind, "packing": work.packing},
            "train": {
                "steps": 1000, "global_batch_size": work.batch, "micro_batch_size": work.batch,
                "sequence_length": work.sequence,
                "learning_rate": RATE, "precision": "float32",
            },
            "compile": {"enabled": False},
            "cluster": {"device": "cpu", "threads": 1},
        }
    )  # fmt: skip


def ours(folder: Path, wanted: Profile, pairs: int) -> Callable[[int], list[Times]]:
    """Function that trains a number of steps and returns their times; DPO's are scaled to `pairs` pairs."""
    context = Context(wanted, Store(str(folder / "store")))
    dataset = DatasetStep(TokenizerStep().run(context)).run(context)
    opened = wanted, context.store.artifacts.path(dataset), "train"
    samples = open_samples(*opened)
    trainer = Trainer(wanted)
    optimizer = make_optimizer(trainer)
    count = wanted.train.global_batch_size
    if isinstance(samples, RecordSamples) and wanted.objective.kind == "dpo":
        ordered = open_samples(*opened, ordered=True)
        assert isinstance(ordered, RecordSamples)
        samples.reference = log_probabilities(trainer, ordered)

    def run(steps: int) -> list[Times]:
        times = []
        for step in range(steps):
            start = time.perf_counter(), time.process_time()
            optimizer.begin_step(1)
            first = step * count
            batch = trainer.read_batch(samples, first, count)
            counted = samples.count_targets(first, count)
            trainer.forward_backward(batch, 1 / counted)
            optimizer.step(RATE)
            part = pairs / counted if wanted.objective.kind == "dpo" else 1.0
            taken = time.perf_counter() - start[0], time.process_time() - start[1]
            times.append((taken[0] * part, taken[1] * part))
        return times[WARM_UP:]

    return run


def theirs(folder: Path, work: Work) -> Callable[[int], list[Times]]:
    """The same function with TRL's trainer."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[Times] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append((time.perf_counter() - self.start[0], time.process_time() - self.start[1]))

    names = ("prompt", "completion") if work.kind == "sft" else ("prompt", "chosen", "rejected")
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    records = Dataset.from_list([{name: row[name] for name in names} for row in rows])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")

    def run(steps: int) -> list[Times]:
        common = {
            "output_dir": str(folder / "trl"), "per_device_train_batch_size": work.their_batch,
            "max_length": work.their_sequence, "use_cpu": True, "bf16": False, "report_to": "none",
            "gradient_checkpointing": False, "max_steps": steps, "save_strategy": "no",
            "disable_tqdm": True, "logging_steps": 10**6, "learning_rate": RATE,
        }  # fmt: skip
        model, clock = LlamaForCausalLM.from_pretrained(folder / "model"), Clock()
        given = {"train_dataset": records, "processing_class": tokenizer, "callbacks": [clock]}
        if work.kind == "sft":
            trainer = SFTTrainer(model, SFTConfig(packing=True, **common), **given)
        else:
            trainer = DPOTrainer(model, args=DPOConfig(precompute_ref_log_probs=True, **common), **given)
        trainer.train()
        return clock.times[WARM_UP:]

    return run


def main() -> None:
    parser = make_parser(__doc__, rounds=3, out="finetuning")
    parser.add("--steps N", "steps of each run after the warm-up", type=int, default=6)
    parser.add("--only TEXT", "measure only work whose title contains this (default: all)", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_inputs(folder, records=96)
        for title, work in WORK.items():
            if options.only not in title:
                continue
            sides = {
                "ours": ours(folder, profile(folder, config, work), work.their_batch),
                "TRL": theirs(folder, work),
            }
            times: dict[str, list[Times]] = {side: [] for side in sides}
            for _ in range(options.rounds):
                for side, run in sides.items():
                    times[side] += run(WARM_UP + options.steps)
            for index, clock in enumerate(("wall", "CPU")):
                one, other = (statistics.median(pair[index] for pair in times[side]) for side in sides)
                text = f"{title}  {clock:<4}  ours {one * 1e3:7.1f} ms a step, TRL {other * 1e3:7.1f} ms: {other / one:.2f} times"
                results.add(f"{title}, {clock}", text, ours_seconds=one, peer_seconds=other)


if __name__ == "__main__":
    main()
