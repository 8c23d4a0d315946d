"""A job array on a real cluster: the same tokens as local tokenization, secrets, and rejected sources."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from huggingface_hub import HfFileSystem

from flows.server.secrets import HUB_BLOCK, hub_token
from profiles import resolve
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tests.flows.micro import PROFILE
from tests.flows.test_continual import write_texts
from tests.hub import TOKEN, Hub

SPOT = ("cluster.launcher=slurm", "cluster.shards_partition=spot")


@pytest.fixture
def corpus(tmp_path):
    """A profile of five text files."""
    for number in range(5):
        write_texts(tmp_path / f"{number}.jsonl", number)
    data = {"sources": [{"kind": "files", "path": str(tmp_path / "*.jsonl")}], "validation_fraction": 0.1}
    path = tmp_path / "five.yaml"
    path.write_text(yaml.safe_dump({**PROFILE, "data": data}))
    return resolve.load(str(path), SPOT)


def test_array_makes_the_same_tokens_as_local_workers(cluster, corpus, tmp_path):
    there, here = Store(str(tmp_path / "there")), Store(str(tmp_path / "here"))
    made = DatasetStep(TokenizerStep().run(Context(corpus, there))).run(
        Context(corpus, there, token="hf_planted")
    )
    local = corpus.model_copy(update={"cluster": corpus.cluster.model_copy(update={"launcher": "local"})})
    same = DatasetStep(TokenizerStep().run(Context(local, here))).run(Context(local, here))
    assert made.key == same.key
    assert made.summary == same.summary
    for one in (tmp_path / "here/artifacts/tokens").rglob("*.bin"):
        assert (tmp_path / "there" / one.relative_to(tmp_path / "here")).read_bytes() == one.read_bytes()
    (log,) = (path.read_text() for path in (there.local_cache / "array").glob("*/tokenize.log"))
    assert log.count(": done") == 5
    (script,) = (path.read_text() for path in (there.local_cache / "array").glob("*/tokenize.sbatch"))
    assert "--array=0-4" in script
    assert "--partition=spot" in script
    assert "hf_planted" not in script + log


@pytest.fixture
def gated(tmp_path, monkeypatch):
    """A profile of a gated dataset of two files on a hub that this process and its jobs can reach."""
    with Hub() as hub:
        hub.patch(monkeypatch, tmp_path / "cache")
        for name, value in {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": tmp_path / "home",
        }.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
        monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
        HfFileSystem.clear_instance_cache()
        for number in range(2):
            write_texts(tmp_path / f"{number}.jsonl", number)
        files = {f"{number}.jsonl": (tmp_path / f"{number}.jsonl").read_bytes() for number in range(2)}
        hub.commit("org/gated", files, kind="datasets", gated=True)
        data = {"sources": [{"kind": "hub", "repository": "org/gated"}], "validation_fraction": 0.1}
        path = tmp_path / "gated.yaml"
        path.write_text(yaml.safe_dump({**PROFILE, "data": data}))
        yield hub, resolve.load(str(path), SPOT)


@pytest.mark.parametrize("source", ["environment", "block"])
def test_array_reads_gated_data_and_never_writes_the_token(
    cluster, gated, prefect_server, tmp_path, monkeypatch, source
):
    from prefect.blocks.system import Secret

    hub, profile = gated
    if source == "environment":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    else:
        Secret(value=TOKEN).save(HUB_BLOCK, overwrite=True)
    try:
        token, store = hub_token(profile), Store(str(tmp_path / "store"))
        words = TokenizerStep().run(Context(profile, store, token=token))
        hub.requests.clear()
        made = DatasetStep(words).run(Context(profile, store, token=token))
    finally:
        if source == "block":
            Secret.delete(HUB_BLOCK)
    assert made.summary["shards"] == 2
    (log,) = (path.read_text() for path in (store.local_cache / "array").glob("*/tokenize.log"))
    assert log.count(": done") == 2
    assert {token for _, path, token in hub.requests if path.endswith(".jsonl")} == {TOKEN}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"tokenize.sbatch", "tokenize.log", "plan.json"} <= {path.name for path in files}
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_corrupted_source_is_rejected_without_a_retry(cluster, corpus, tmp_path):
    store = Store(str(tmp_path / "store"))
    made = TokenizerStep().run(Context(corpus, store))
    (tmp_path / "3.jsonl").write_text(json.dumps({"text": "abc"}) + "\n{broken")
    with pytest.raises(SourceError, match=r"3\.jsonl"):
        DatasetStep(made).run(Context(corpus, store))


def test_two_flows_of_one_store_run_arrays_concurrently(cluster, corpus, tmp_path):
    store = Store(str(tmp_path / "store"))
    words = TokenizerStep().run(Context(corpus, store))

    def made(pattern):
        source = f"data.sources=[{{kind: files, path: '{tmp_path}/{pattern}.jsonl'}}]"
        own = resolve.load(str(tmp_path / "five.yaml"), (*SPOT, source))
        return DatasetStep(words).run(Context(own, store))

    with ThreadPoolExecutor() as pool:
        both = list(pool.map(made, ("[01]", "[234]")))
    assert [one.summary["shards"] for one in both] == [2, 3]
    logs = [path.read_text() for path in (store.local_cache / "array").glob("*/tokenize.log")]
    assert sorted(log.count(": done") for log in logs) == [2, 3]
