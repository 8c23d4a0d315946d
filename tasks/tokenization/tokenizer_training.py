"""Trains a byte-level BPE on text of shards, in this process if small, else in one that can be killed.

    python -m tasks.tokenization.tokenizer_training JOB

`tokenizers` trains without returning to Python, so a process that trains does not notice Ctrl-C or SIGTERM. JOB is a JSON file
with the arguments of `train`; the answer is one line of JSON on stdout, as from `worker`. The process ends when its stdin closes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import regex
from tokenizers import models, pre_tokenizers, trainers

from profiles.errors import ProfileError
from profiles.files import state_files
from tasks.sources import corpus
from tasks.sources.formats import readers
from tasks.sources.formats.long_text import LongText
from tasks.sources.shard import Shard
from tasks.tokenization.tokenizer_files import EOS, byte_level, write
from tasks.tokenization.worker import answer, send
from tasks.tokenization.worker_pool import Worker, worker_environment

SMALL = 3_000_000  # characters: trained on within seconds; the source python-docs has fewer
# Characters. Training time grows with the square of a word's length, and no useful token is this long; longer words (a genome, a
# line of dashes) are split.
MAX_WORD = 1024
# Character classes; a word in GPT-2's pattern is a run of one class.
RUNS = (r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]", r"\s")
LONG_WORD = regex.compile("|".join(f"{run}{{{MAX_WORD},}}+" for run in RUNS))


def train(shards: list[Shard], held_out: float, size: int, folder: Path, token: str | None = None) -> None:
    """Train a byte-level BPE of `size` tokens, with the 256 bytes and EOS, on shards' training documents.

    Deterministic: counts are exact, and ties are broken by the pairs themselves.

    Args:
        held_out: fraction of the documents held out for validation, in shards that have both splits.
        folder: where tokenizer.json and tokenizer_config.json are written.

    Raises:
        SourceError, ProfileError: a shard is rejected.
        WorkerFailed: the process that trains died or failed.
    """
    texts, count = [], 0
    for text in _texts(shards, held_out, token):
        texts.append(text)
        count += len(text)
        if count > SMALL:
            break
    else:
        if not count:
            reason = "hold no text to train a tokenizer on: all documents are empty or held out"
            raise ProfileError("data.sources", None, reason)
        _train(texts, size, folder)
        return
    with tempfile.TemporaryDirectory(prefix="trainshed-") as jobs:
        values = {"held_out": held_out, "size": size, "folder": str(folder.absolute())}
        path = Path(jobs) / "job.json"
        path.write_text(json.dumps({"shards": [*map(asdict, shards)], **values}))
        command = [sys.executable, "-P", "-m", "tasks.tokenization.tokenizer_training", str(path)]
        with Worker(command, worker_environment(token)) as worker:
            worker.ask("train", "the tokenizer")


def _train(texts: Iterable[str], size: int, folder: Path) -> None:
    tokenizer = byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(chain.from_iterable(map(cut_long_words, texts)), trainer)
    write(folder, tokenizer, {"bos_token": EOS, "eos_token": EOS, "unk_token": EOS})


def _texts(shards: list[Shard], held_out: float, token: str | None) -> Iterator[str]:
    for shard in shards:
        fraction = held_out_fraction(shard, held_out)
        holds_out_long = holds_out_long_files(shard, held_out)
        for document in readers.documents(shard, token):
            if isinstance(document, LongText):
                if not holds_out_long or not corpus.is_digest_held_out(document.sha256(), fraction):
                    yield from document.chunks()
            elif isinstance(document, str) and document and not corpus.is_held_out(document, fraction):
                yield document


def held_out_fraction(shard: Shard, held_out: float) -> float:
    """Fraction of a shard's documents that is held out; `held_out` is that of shards with both splits."""
    return held_out if shard.use == "split" else 0.0


def holds_out_long_files(shard: Shard, held_out: float) -> bool:
    """Whether a shard has long text files, of which some may be held out.

    The tokenizer's key covers this, so it must be known before the shard is read. Hence long strings in other formats, and files
    at a commit of the hub, whose sizes are not listed, are trained on even if they are held out.
    """
    sizes = [int(state.split()[0]) for state in shard.states if state]  # a state begins with the file's size
    is_long = shard.format == "text" and max(sizes, default=0) >= readers.LONG_FILE
    return is_long and held_out_fraction(shard, held_out) > 0


def cut_long_words(text: str) -> Iterator[str]:
    """The text, cut within words of more than MAX_WORD characters; almost every text is one part."""
    start = 0
    if _may_have_long_words(text):
        for match in LONG_WORD.finditer(text):
            for cut in range(match.start() + MAX_WORD, match.end(), MAX_WORD):
                yield text[start:cut]
                start = cut
    yield text[start:]


def _may_have_long_words(text: str) -> bool:
    """Whether a block of half of MAX_WORD characters has no space; takes a tenth of the time of LONG_WORD."""
    half = MAX_WORD // 2
    blocks = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
    return any(block.isspace() or len(block.split(maxsplit=1)[0]) == half for block in blocks)


def main(path: str) -> None:
    def exit_with_parent() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock would be held when the interpreter ends
            pass
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    job = json.loads(state_files.contents(Path(path)))
    shards = [Shard(**shard) for shard in job["shards"]]

    def work() -> None:
        _train(_texts(shards, job["held_out"], None), job["size"], Path(job["folder"]))

    send(answer(work))


if __name__ == "__main__":
    main(sys.argv[1])
