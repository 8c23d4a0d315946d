"""Pretrained weights from folders, the hub and object stores."""

import json
import os

import pytest
import torch
from safetensors.torch import save

from modeling.conversion import formats
from profiles.errors import ProfileError
from tasks.sources import weights
from tasks.sources.digest_cache import DigestCache
from tasks.sources.shard import SourceError
from tests import s3
from tests.hub import Hub
from tests.modeling.conversion.nxd import nxd_shards


@pytest.fixture
def files():
    config = json.dumps(nxd_shards.CONFIG).encode()
    return {"config.json": config, "model.safetensors": save(nxd_shards.model()), "README.md": b"a model"}


def s3_client():
    """A client that sends names as they are."""
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def embedding(folder) -> torch.Tensor:
    found = formats.read(folder, None, None)
    return found.read("embedding.weight", (0, 0), found.shapes["embedding.weight"])


def test_only_the_needed_files_of_a_repository_are_downloaded(files, hub, tmp_path):
    extra = {
        "pytorch_model.bin": b"the same again",
        "original/model.safetensors": b"",
        "tokenizer.json": b"{}",
        "generation_config.json": b"{}",
    }
    commit = hub.commit("org/name", files | extra)
    with weights.fetch("org/name", None, tmp_path / "out") as folder:
        assert torch.equal(embedding(folder), nxd_shards.model()["model.embed_tokens.weight"])
    read = {path.rpartition("/")[2] for _, path, _ in hub.requests if "/resolve/" in path}
    assert read == {"config.json", "generation_config.json", "model.safetensors"}
    one = weights.pin("org/name", None, None, "init.from", DigestCache())["digest"]
    assert one == weights.pin("org/name", commit, None, "init.from", DigestCache())["digest"]
    hub.commit("org/name", files)
    assert one != weights.pin("org/name", None, None, "init.from", DigestCache())["digest"]


def test_an_unreachable_hub_is_a_connection_error(monkeypatch, tmp_path, waits):
    with Hub() as hub:
        hub.patch(monkeypatch, tmp_path / "hub-cache")
    source = weights.fetch("org/name", None, tmp_path / "out")
    with pytest.raises(ConnectionError, match="org/name: the hub is unreachable"), source:
        pass


def test_credentials_in_a_url_are_rejected_before_it_is_opened(tmp_path):
    source = weights.fetch("s3://key:secret@bucket/weights", None, tmp_path / "out")
    with pytest.raises(ProfileError, match=r"^SOURCE: has credentials in a URL"), source:
        pass


@pytest.mark.s3
def test_an_interrupted_download_resumes_with_the_missing_files(files, tmp_path, monkeypatch):
    import s3fs

    with s3.bucket(monkeypatch) as bucket:
        filesystem = s3fs.S3FileSystem()
        for name, data in files.items():
            filesystem.pipe_file(f"{bucket}/weights/{name}", data)
        source = f"{bucket}/weights"

        def times(folder):
            return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

        interrupted = weights.fetch(source, None, tmp_path / "out").__enter__()
        before = times(interrupted)
        assert set(before) == {"config.json", "model.safetensors"}
        (interrupted / "config.json").unlink()
        with weights.fetch(source, None, tmp_path / "out") as folder:
            assert torch.equal(embedding(folder), nxd_shards.model()["model.embed_tokens.weight"])
            assert times(folder).items() - before.items() == {
                ("config.json", (folder / "config.json").stat().st_mtime_ns)
            }
        assert list(tmp_path.iterdir()) == []
        before = weights.pin(source, None, None, "init.from", DigestCache())["digest"]
        filesystem.pipe_file(f"{bucket}/weights/model.safetensors", b"other")
        filesystem.invalidate_cache()
        assert weights.pin(source, None, None, "init.from", DigestCache())["digest"] != before
        # What an interrupted download has of the other version is not used.
        filesystem.pipe_file(f"{bucket}/weights/model.safetensors", bytes(len(files["model.safetensors"])))
        weights.fetch(source, None, tmp_path / "out").__enter__()
        filesystem.pipe_file(f"{bucket}/weights/model.safetensors", files["model.safetensors"])
        with weights.fetch(source, None, tmp_path / "out") as folder:
            assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
        assert list(tmp_path.iterdir()) == []
        download = s3fs.S3FileSystem._get_file

        async def replaced(self, *arguments, **options):
            await download(self, *arguments, **options)
            await self._pipe_file(f"{bucket}/weights/model.safetensors", b"other")

        with monkeypatch.context() as patch:
            patch.setattr(s3fs.S3FileSystem, "_get_file", replaced)
            s3fs.S3FileSystem.clear_instance_cache()
            with (
                pytest.raises(SourceError, match="changed while it was being read"),
                weights.fetch(source, None, tmp_path / "out"),
            ):
                pass
        s3fs.S3FileSystem.clear_instance_cache()
        s3_client().put_object(Bucket=bucket[5:], Key="weights/x/../../../out", Body=b"")
        with (
            pytest.raises(
                ProfileError, match=r"SOURCE = .*'x/\.\./\.\./\.\./out' is not the name of a file below"
            ),
            weights.fetch(source, None, tmp_path / "out"),
        ):
            pass


@pytest.mark.parametrize(
    ("needed", "others"),
    [
        (
            {"checkpoints/step_10/complete.json", "checkpoints/step_10/0.distcp"},
            {
                "checkpoints/step_9/complete.json",
                "checkpoints/step_9/0.distcp",
                "checkpoints/step_11/0.distcp",
            },
        ),
        (
            {"newest", "step_9/model/tp_rank_00_pp_rank_00/checkpoint.pt", "step_9/adapter_config.json"},
            {"step_9/optim/0.pt", "step_8/model/tp_rank_00_pp_rank_00/checkpoint.pt"},
        ),
    ],
    ids=["a run", "NxD's run"],
)
def test_of_a_remote_run_only_its_latest_checkpoint_is_read(needed, others, tmp_path):
    run = tmp_path / "run"
    for name in needed | others | {"metrics.jsonl"}:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("step_9")
    source = f"file://{run}"
    before = weights.pin(source, None, None, "init.from", DigestCache())
    with weights.fetch(source, None, tmp_path / "out") as folder:
        assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == needed
    with weights.fetch(source, None, tmp_path / "out", checkpoints=2) as folder:  # for an average
        steps = {path.name for path in folder.glob("checkpoints/*")}
        assert steps == ({"step_9", "step_10"} if "newest" not in needed else set())
    (run / "metrics.jsonl").write_text("the run continues")
    assert weights.pin(source, None, None, "init.from", DigestCache()) == before
    (run / min(needed - {"newest"})).write_text("other weights")
    assert weights.pin(source, None, None, "init.from", DigestCache()) != before
    if "newest" in needed:
        (run / "newest").write_bytes(b"step_\xe9")
        with pytest.raises(SourceError, match=r"run/newest: corrupted: .* it is not UTF-8"):
            weights.pin(source, None, None, "init.from", DigestCache())
        with pytest.raises(ValueError, match=r"run/newest: corrupted: .* it is not UTF-8"):
            formats.read(run, None, None)


def test_a_file_replaced_during_a_conversion_is_an_error(files, tmp_path):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with (
        pytest.raises(SourceError, match=r"config\.json: changed while it was being read; run again"),
        weights.fetch(str(tmp_path), None, tmp_path / "out") as folder,
    ):
        (folder / "config.json").write_bytes(files["config.json"])


def test_identity_of_a_folder_depends_on_its_contents(files, tmp_path):
    def identity(name: str) -> str:
        return weights.pin(str(tmp_path / name), None, None, "init.from", DigestCache(tmp_path / "cache"))[
            "digest"
        ]

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        for file, data in files.items():
            (tmp_path / name / file).write_bytes(data)
    assert identity("one") == identity("other")
    (tmp_path / "other" / "model.safetensors").write_bytes(files["model.safetensors"][:-1] + b"\0")
    assert identity("one") != identity("other")


def test_identity_of_a_url_without_etags_depends_on_modification_times(tmp_path):
    def identity(source: str) -> str:
        return weights.pin(source, None, None, "init.from", DigestCache())["digest"]

    file, source = tmp_path / "model.safetensors", f"file://{tmp_path}"
    file.write_bytes(b"one")
    before = identity(source)
    assert identity(source) == before
    file.write_bytes(b"two")
    os.utime(file, (0, 0))
    assert identity(source) != before
    with pytest.raises(ProfileError, match=r"init\.from = .*/none: there is no such folder, or it is empty"):
        identity(f"{source}/none")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere", r"SOURCE = \./nowhere: there is no such file or folder"),
        ("org/none", "SOURCE = org/none: is neither a local folder nor a hub repository"),
        ("org/tokenizer", "SOURCE = org/tokenizer: has neither model.safetensors nor"),
    ],
)
def test_missing_weights_are_an_error(source, message, hub, tmp_path):
    hub.commit("org/tokenizer", {"tokenizer.json": b"{}"})
    with pytest.raises(ProfileError, match=message), weights.fetch(source, None, tmp_path / "out"):
        pass
