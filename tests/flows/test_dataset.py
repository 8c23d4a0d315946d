"""Shards of the data in Prefect: a task each, retried separately, and one progress bar."""

from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.states import Failed

from flows.runner import Runner
from flows.runner.retries import worth_retrying
from modeling.data.indexed import IndexedError
from profiles.errors import ProfileError
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tests.tasks.source_files import files, lines, profile
from tests.tasks.tokenization.tokenizers import DOCUMENTS


@flow
def only_the_dataset(wanted, store, words):
    with Runner(Context(wanted, store)) as runner:
        return runner.run(DatasetStep(words))


def _seen(run_id):
    run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=run)
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["dataset"]))
        bars = client.read_artifacts(artifact_filter=key, flow_run_filter=run)
    return {task.name: task.state_name for task in tasks}, [bar.data for bar in bars]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (SourceError("a.jsonl, line 2: invalid JSON"), False),
        (IndexedError(Path("a.bin"), 6, "token 999 is not in the vocabulary of 300"), False),
        (ProfileError("data.text", "text", "a.jsonl has no such column"), False),
        (ConnectionError("reset by peer"), True),
    ],
)
def test_rejected_data_is_not_retried(error, again):
    assert worth_retrying(None, None, Failed(data=error)) is again


def test_shards_are_mapped_tasks_with_progress(prefect_server, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_bytes(lines(DOCUMENTS[i * 60 : i * 60 + 60]))
    wanted = profile(files(tmp_path / "*.jsonl"), validation_fraction=0.1)
    store = Store(str(tmp_path / "store"))
    words = TokenizerStep().run(Context(wanted, store))
    state = only_the_dataset(wanted, store, words, return_state=True)
    tasks, bars = _seen(state.state_details.flow_run_id)
    mapped = {name: how for name, how in tasks.items() if name.startswith("tokenize ")}
    assert sorted(name.rpartition("/")[2] for name in mapped) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert set(mapped.values()) == {"Completed"}
    assert [float(bar) for bar in bars] == [100]
    assert state.result().summary["shards"] == 3

    (tmp_path / "3.jsonl").write_bytes(b'{"other": "a"}\n')
    (tmp_path / "4.jsonl").write_bytes(lines(DOCUMENTS[:9]))
    state = only_the_dataset(wanted, store, words, return_state=True)
    with pytest.raises(ProfileError, match=r"3\.jsonl has no such column"):
        state.result()
    tasks, _ = _seen(state.state_details.flow_run_id)
    assert sum(name.startswith("tokenize ") for name in tasks) == 2
