"""Hub sources, against a hub on loopback."""

import io
import signal
import threading

import httpx2
import pyarrow.parquet as parquet
import pytest

from profiles.errors import ProfileError
from profiles.files import retries
from tasks.sources import weights
from tests.hub import TOKEN, Hub
from tests.tasks.source_files import DOCUMENTS, joined, lines, list_shards, profile, table, texts

README = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.parquet
  - split: test
    path: en/test.parquet
- config_name: de
  data_files: de.jsonl
---
"""


def as_parquet(documents):
    out = io.BytesIO()
    parquet.write_table(table(documents), out, row_group_size=20)
    return out.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with Hub() as served:
        served.patch(monkeypatch, tmp_path / "cache")
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", served.url)
        monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
        from huggingface_hub import HfFileSystem

        HfFileSystem.clear_instance_cache()
        content = {
            "README.md": README,
            "en/train-0.parquet": as_parquet(DOCUMENTS[:200]),
            "en/train-1.parquet": as_parquet(DOCUMENTS[200:]),
            "en/test.parquet": as_parquet(DOCUMENTS[:5]),
            "de.jsonl": lines(["Guten Tag"]),
        }
        served.commit("org/texts", content, kind="datasets")
        served.commit(
            "org/script", {"script.py": b"import datasets\n", "README.md": b"# s\n"}, kind="datasets"
        )
        yield served


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_of_a_configuration_is_read(hub, streaming, tmp_path):
    source = {"kind": "hub", "repository": "org/texts", "config": "en", "streaming": streaming}
    shards = texts(profile(source))
    assert joined(shards) == DOCUMENTS
    assert len(shards) == 2
    assert texts(profile({**source, "split": "test"})) == [DOCUMENTS[:5]]
    asked = {path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET"}
    tables = {"train-0.parquet", "train-1.parquet", "test.parquet"}
    assert tables <= asked
    assert {path.name for path in (tmp_path / "cache").rglob("*.parquet")} == (set() if streaming else tables)


def test_streaming_reads_lines_in_blocks(hub, monkeypatch):
    monkeypatch.setattr("tasks.sources.remote.BLOCK", 20_000)
    content = lines(DOCUMENTS * 5)
    hub.commit("org/lines", {"a.jsonl": content}, kind="datasets")
    assert texts(profile({"kind": "hub", "repository": "org/lines", "streaming": True})) == [DOCUMENTS * 5]
    asked = [path for method, path, _ in hub.requests if method == "GET" and path.endswith("a.jsonl")]
    assert 2 < len(asked) <= len(content) // 20_000 + 1


def test_shards_are_keyed_by_their_files_not_by_the_commit(hub):
    source = profile({"kind": "hub", "repository": "org/texts", "config": "en"})
    before = [shard.digest for shard in list_shards(source.data)]
    branch = profile({"kind": "files", "path": "hf://datasets/org/texts/en/train-*.parquet"})
    assert [shard.digest for shard in list_shards(branch.data)] == before
    content = dict(next(reversed(hub.repositories["datasets", "org/texts"].commits.values())))
    content["en/train-2.parquet"] = as_parquet(["new"])
    hub.commit("org/texts", content, kind="datasets")
    after = [shard.digest for shard in list_shards(source.data)]
    assert after[:2] == before
    assert len(after) == 3
    assert [shard.digest for shard in list_shards(branch.data)] == after


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"repository": "org/texts"}, r"sources\.0\.config: .*several configurations; nearest valid: en, de"),
        ({"repository": "org/texts", "config": "fr"}, r"config = fr: .*no such conf.*nearest valid: en, de"),
        ({"repository": "org/texts", "config": "en", "split": "dev"}, r"split = dev: .*valid: test, train"),
        (
            {"repository": "org/none"},
            r"repository = org/none: is neither a local folder nor a hub repository",
        ),
        ({"repository": "org/texts", "config": "en", "revision": "v9"}, r"revision = v9: .*no such revision"),
        ({"repository": "org/script"}, r"repository = org/script: .*loading script.*no refs/convert/parquet"),
    ],
)
def test_unknown_names_are_errors_with_the_valid_choices(hub, source, message):
    with pytest.raises(ProfileError, match=message):
        texts(profile({"kind": "hub", **source}))


def test_a_loading_script_is_rejected_with_the_converted_revision(hub):
    hub.commit(
        "org/script",
        {"default/train/0000.parquet": as_parquet(DOCUMENTS), "other/train/0000.parquet": as_parquet(["x"])},
        kind="datasets",
        ref="refs/convert/parquet",
    )
    source = {"kind": "hub", "repository": "org/script"}
    with pytest.raises(ProfileError, match=r"revision = main: .*script.*nearest valid: refs/convert/parquet"):
        texts(profile(source))
    assert texts(profile({**source, "revision": "refs/convert/parquet"})) == [DOCUMENTS]
    assert texts(profile({**source, "revision": "refs/convert/parquet", "config": "other"})) == [["x"]]


def test_every_request_has_a_timeout(hub, tmp_path, monkeypatch):
    timeouts, send = [], httpx2.HTTPTransport.handle_request

    def record(transport, request):
        timeouts.append(request.extensions["timeout"]["read"])
        return send(transport, request)

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", record)
    tables = {"default/train/0000.parquet": as_parquet(DOCUMENTS)}
    hub.commit("org/script", tables, kind="datasets", ref="refs/convert/parquet")
    hub.commit("org/name", {"config.json": b"{}", "model.safetensors": b""})
    source = {"kind": "hub", "repository": "org/script"}
    with pytest.raises(ProfileError, match="loading script"):
        texts(profile(source))
    assert texts(profile({**source, "revision": "refs/convert/parquet", "streaming": True})) == [DOCUMENTS]
    with weights.fetch("org/name", None, tmp_path / "out"):
        pass
    assert timeouts
    assert None not in timeouts


def test_a_gated_data_set_is_read_with_a_token(hub):
    hub.commit("org/gated", {"a.jsonl": lines(DOCUMENTS)}, kind="datasets", gated=True)
    source = profile({"kind": "hub", "repository": "org/gated"})
    assert texts(source, TOKEN) == [DOCUMENTS]


def test_retries_wait_as_long_as_a_throttling_hub_asks(hub, waits):
    page = (200, {"Content-Type": "text/html; charset=utf-8"})  # of a captive portal
    hub.faults = [(429, {"Retry-After": "120"}), (503, {}), (429, {"RateLimit": '"api";r=0;t=280'}), page]
    assert joined(texts(profile({"kind": "hub", "repository": "org/texts", "config": "en"}))) == DOCUMENTS
    assert len(waits) == 4
    assert waits[0] > 120
    assert waits[1] < 10
    assert waits[2] > 280


def test_a_hub_that_keeps_failing_is_a_retryable_error_after_minutes(hub, waits):
    hub.faults, hub.broken = [(502, {})], True
    with pytest.raises(ConnectionError, match=r"org/texts: the hub is unreachable: .*502"):
        texts(profile({"kind": "hub", "repository": "org/texts", "config": "en"}))
    assert 120 < sum(waits) < 400
    waits.clear()
    for status in 401, 403, 404:  # rejected at once
        hub.faults, hub.broken = [(status, {"X-Error-Code": "GatedRepo"})], True
        with pytest.raises(ProfileError, match="is gated"):
            texts(profile({"kind": "hub", "repository": "org/texts", "config": "en"}))
    assert not waits


def test_a_failing_web_server_is_a_retryable_error_and_never_an_absent_file(hub, waits):
    source = profile({"kind": "files", "path": f"{hub.url}/datasets/org/texts/resolve/main/de.jsonl"})
    hub.faults = [(503, {})] * 3
    assert texts(source) == [["Guten Tag"]]
    assert waits
    for status, error, message in (
        (503, ConnectionError, "de.jsonl: cannot be read"),
        (403, PermissionError, "de.jsonl: access denied"),
        (404, ProfileError, "no file matches"),
    ):
        hub.faults, hub.broken = [(status, {})], True
        with pytest.raises(error, match=message):
            texts(source)


def test_ctrl_c_ends_the_waits_of_all_threads(monkeypatch):
    waiting = threading.Barrier(2)

    def throttled(value):
        waiting.wait()
        return retries.call(_fail, "the hub", [600.0])

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            retries.call_in_threads(throttled, range(2), 2)
    finally:
        signal.signal(signal.SIGALRM, before)


def _fail():
    raise ConnectionResetError
