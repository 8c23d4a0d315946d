"""Worker processes: the same tokens as one process, forwarded errors and logs, workers that die."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from tokenizers import normalizers

from profiles.errors import ProfileError
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store
from tasks.tokenization import worker
from tasks.tokenization.dataset_plan import DatasetPlan
from tasks.tokenization.tokenize_shard import tokenize
from tasks.tokenization.tokenizer_files import EOS
from tasks.tokenization.worker_pool import WorkerFailed, WorkerPool
from tests.tasks.source_files import files, lines, profile
from tests.tasks.tokenization.tokenizers import DOCUMENTS, metaspace, train, trained


@pytest.fixture
def wanted(tmp_path):
    """A profile of five files."""
    for i in range(5):
        (tmp_path / f"{i}.jsonl").write_bytes(lines(DOCUMENTS[i * 30 : i * 30 + 30]))
    return profile(files(tmp_path / "*.jsonl"), validation_fraction=0)


def plan_of(wanted, store):
    context = Context(wanted, store)
    return DatasetStep(TokenizerStep().run(context)).plan(context)


def test_pool_makes_the_same_shards_as_one_process_and_logs_each_message_once(
    wanted, store, tmp_path, caplog
):
    source = tmp_path / "source"
    source.mkdir()
    normalizing = trained(metaspace)
    normalizing.normalizer = normalizers.NFKC()  # supported by no engine but `tokenizers`
    train(normalizing, "<unk>", EOS).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    changes = {"source": str(source), "vocabulary_size": None}
    wanted = wanted.model_copy(update={"tokenizer": wanted.tokenizer.model_copy(update=changes)})
    shares = []
    context = Context(wanted, store, progress=lambda message, share: shares.append(share))
    with caplog.at_level(logging.INFO):
        dataset = DatasetStep(TokenizerStep().run(context)).run(context)
    assert dataset.summary["shards"] == 5
    assert caplog.text.count("not tokenizing with gigatoken: ") == 1
    assert caplog.text.count("not tokenizing with tokenizers with word cache: ") == 1
    (row,) = json.loads((store.artifacts.path(dataset) / "report.json").read_text())
    assert row["engines"] == ["tokenizers"]
    shares = [share for share in shares if share is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 1

    other = Store(str(tmp_path / "other"))
    plan = plan_of(wanted, other)
    tokens = store.artifacts.path(dataset).parent.parent / "tokens"
    for k in range(5):
        shard = tokenize(plan, other, k)
        for path in Path(shard.location).glob("train.*"):
            assert path.read_bytes() == (tokens / shard.key / path.name).read_bytes()


def test_worker_processes_listed_shards_of_a_plan_file(wanted, store, tmp_path):
    plan = plan_of(wanted, store)
    path, numbers = tmp_path / "plan.json", tmp_path / "shards.json"
    path.write_text(json.dumps(asdict(plan)))
    numbers.write_text("[0, 3, 4]")
    assert DatasetPlan(**json.loads(path.read_text())) == plan
    arguments = ["--plan", str(path), "--store", store.uri, "--shards", str(numbers)]
    assert worker.main([*arguments, "--index", "1", "--of", "2"]) == 0
    made = [bool(store.artifacts.find(ArtifactId("tokens", plan.key(k)))) for k in range(5)]
    assert made == [False, False, False, True, False]


def test_worker_starts_without_libraries_that_plain_text_does_not_need():
    code = "import sys, tasks.tokenization.worker; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jinja2", "transformers", "torch", "prefect"} & set(imported.stdout.split())


def test_dead_worker_loses_only_its_shard_and_errors_are_forwarded(wanted, store, tmp_path, monkeypatch):
    """A worker's environment also lacks this process's secrets."""
    for name in ("PREFECT_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "planted")
    tokenizer = TokenizerStep().run(Context(wanted, store))
    (tmp_path / "2.jsonl").write_bytes(b'{"text": ')
    (tmp_path / "3.jsonl").write_bytes(b'{"other": "a"}\n')
    plan = DatasetStep(tokenizer).plan(Context(wanted, store))
    (tmp_path / "4.jsonl").write_bytes(lines(DOCUMENTS))
    with WorkerPool(plan, store, 1) as pool:
        pool.run("tokenize", 0)
        (process,) = pool._workers
        assert "planted" not in psutil.Process(process._process.pid).environ().values()
        process._process.kill()
        with pytest.raises(WorkerFailed, match="shard 1 ended with exit code -9"):
            pool.run("tokenize", 1)
        assert pool.run("tokenize", 1).key == plan.key(1)
        with pytest.raises(SourceError, match=re.escape("2.jsonl, line 1: invalid JSON")):
            pool.run("tokenize", 2)
        with pytest.raises(ProfileError, match=r"data\.text = text: .*3\.jsonl has no such column"):
            pool.run("tokenize", 3)
        with pytest.raises(SourceError, match=re.escape("4.jsonl: has changed since the run's inputs")):
            pool.run("fingerprint", 4)
