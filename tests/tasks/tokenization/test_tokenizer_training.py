"""Training of tokenizers: long words, the separate process for large texts, and interruptions."""

import os
import random
import signal
import string

import pytest

from profiles.errors import ProfileError
from tasks.sources.shard import SourceError
from tasks.tokenization import tokenizer_training
from tasks.tokenization.tokenizer_training import MAX_WORD, cut_long_words, train
from tasks.tokenization.worker_pool import Worker, WorkerFailed
from tests.tasks.source_files import files, lines, list_shards, profile
from tests.tasks.tokenization.tokenizers import DOCUMENTS


def shards_of(path, documents):
    path.write_bytes(lines(documents))
    return list_shards(profile(files(path)).data)


def trained(shards, folder, size=400):
    folder.mkdir()
    train(shards, 0.0, size, folder)
    return (folder / "tokenizer.json").read_bytes()


def test_words_beyond_the_limit_are_cut_and_others_are_trained_on_unchanged(tmp_path, monkeypatch):
    draw = random.Random(0)
    word = "".join(draw.choices("ACGT", k=1_000_000))
    for text in (
        f"a {word} b",
        " " * 5000 + "b",
        "é" * (MAX_WORD + 1) + "1" * MAX_WORD,
        "-" * 3000 + "x" * 3000,
    ):
        parts = list(cut_long_words(text))
        assert "".join(parts) == text
        assert len(parts) > 1
        assert max(map(len, parts)) <= 2 * MAX_WORD
    assert list(cut_long_words("x" * MAX_WORD + " words " * 500)) == ["x" * MAX_WORD + " words " * 500]
    trained(shards_of(tmp_path / "a.jsonl", [word, *DOCUMENTS]), tmp_path / "a")  # would take minutes
    shards = shards_of(tmp_path / "b.jsonl", DOCUMENTS)
    cut = trained(shards, tmp_path / "cut")
    monkeypatch.setattr(tokenizer_training, "cut_long_words", lambda text: [text])
    assert trained(shards, tmp_path / "whole") == cut


def test_no_tokenizer_is_trained_on_documents_without_text(tmp_path):
    with pytest.raises(ProfileError, match=r"data\.sources: hold no text to train a tokenizer on"):
        trained(shards_of(tmp_path / "a.jsonl", ["", ""]), tmp_path / "a")
    assert not (tmp_path / "a/tokenizer.json").exists()


def test_a_large_training_in_its_own_process_gives_the_same_tokenizer(tmp_path, monkeypatch):
    shards = shards_of(tmp_path / "a.jsonl", DOCUMENTS)
    here = trained(shards, tmp_path / "here")
    monkeypatch.setattr(tokenizer_training, "SMALL", 1000)
    assert trained(shards, tmp_path / "there") == here
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"text": ')
    shards = list_shards(profile(files(tmp_path / "a.jsonl")).data)
    with pytest.raises(SourceError, match=r"a\.jsonl, line 201: invalid JSON"):
        trained(shards, tmp_path / "bad")


@pytest.mark.parametrize("ends", ["by Ctrl-C", "with its parent"])
def test_training_process_ends_on_ctrl_c_and_with_its_parent(tmp_path, monkeypatch, ends):
    draw = random.Random(0)
    words = ("".join(draw.choices(string.ascii_letters, k=12)) for _ in range(400_000))
    shards = shards_of(tmp_path / "a.jsonl", [" ".join(words)])
    processes = []

    class Watched(Worker):
        def ask(self, *arguments):
            processes.append(self._process)
            return super().ask(*arguments)

    def stop(*_):
        if ends == "by Ctrl-C":
            raise KeyboardInterrupt
        os.close(processes[0].stdin.fileno())  # as when the parent is killed

    monkeypatch.setattr(tokenizer_training, "Worker", Watched)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 3)
    try:
        with pytest.raises(KeyboardInterrupt if ends == "by Ctrl-C" else WorkerFailed):
            trained(shards, tmp_path / "out", 50_000)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert processes[0].returncode in (1, -signal.SIGKILL)
    assert not (tmp_path / "out/tokenizer.json").exists()
