"""docs/extending/: every example runs unchanged; those that print run in tests/flows/cli/test_cli.py.

A ```python block is the file that its first line names; a ```text block is the output of the block above it.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from profiles import resolve
from tasks import keys
from tasks.launchers import create
from tasks.launchers.conformance import LauncherConformance

FOLDER = Path(__file__).parents[2] / "docs/extending"
TEXT = "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.md")))
EXAMPLE = re.compile(r"^```python\n# (\S+)\.py\n(.*?)^```$(?:\s+^```text\n(.*?)^```$)?", re.M | re.S)
ENTRIES = {
    group: entry.replace('"', "")
    for group, entry in re.findall(r'^\[project\.entry-points\."(\S+)"\]\n(.+)$', TEXT, re.M)
}
EXAMPLES = {name: (code, output) for name, code, output in EXAMPLE.findall(TEXT)}


def write_examples(folder: Path) -> None:
    """Write all files of the pages, and their entry points as if a package had installed them."""
    for name, (code, _) in EXAMPLES.items():
        (folder / f"{name}.py").write_text(code)
    for group, entry in ENTRIES.items():
        metadata = folder / f"{entry.partition(' ')[0]}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """A working folder with all files of the pages, which can be imported by name."""
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")  # for ranks
    yield tmp_path
    for name in EXAMPLES:
        sys.modules.pop(name, None)


def test_every_python_block_names_its_file():
    assert len(EXAMPLES) == TEXT.count("```python\n")


def test_user_functions_are_accepted_by_a_profile_and_return_sums(examples):
    import torch

    from modeling.training import user_functions as loader
    from profiles import resolve, user_functions

    overrides = ["train.loss=my_losses:with_z_term", "evaluate.metrics=[my_metrics:accuracy]"]
    profile = resolve.load("tiny", overrides)
    user_functions.check(profile)
    logits, targets = torch.eye(4), torch.tensor([0, 1, 0, -100])
    (metric,) = profile.evaluate.metrics
    assert loader.call(loader.load(metric), logits, targets) == 2
    loss = loader.call(loader.load(profile.train.loss), logits, targets)
    cross_entropy = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    log_z = torch.logsumexp(logits[0], 0)
    torch.testing.assert_close(loss, cross_entropy + 3e-4 * log_z**2)


def test_step_of_the_page_is_cached_by_the_contents_of_its_file(examples, prefect_server):
    from count_words import count_words

    for number, text in enumerate(("a b a", "c")):
        (examples / f"{number}.txt").write_text(text)
    files = [examples / "0.txt", examples / "1.txt"]
    assert [(outcome.how, outcome.note) for outcome in count_words(files)] == [
        ("done", "3 words, 2 distinct"),
        ("done", "1 words, 1 distinct"),
    ]
    files[0].rename(examples / "moved.txt")
    assert [outcome.how for outcome in count_words([examples / "moved.txt", files[1]])] == [
        "cached",
        "cached",
    ]
    files[1].write_text("c d")
    assert [outcome.how for outcome in count_words([examples / "moved.txt", files[1]])] == ["cached", "done"]


@pytest.mark.usefixtures("examples")
class TestNiceLauncher(LauncherConformance):
    """The launcher of the page, selected by its entry point."""

    ranks = 0

    def create(self):
        profile = resolve.load("tiny", ["cluster.launcher=nice"])
        resolve.check(profile)
        return create(profile.cluster)

    def test_the_test_file_of_the_page_is_this_class(self, examples):
        from test_nice_launcher import TestNiceLauncher as OfThePage

        assert OfThePage.ranks == self.ranks
        assert type(OfThePage().create()) is type(self.create())


def test_reader_of_the_page_rejects_a_file_without_the_column(examples):
    import tsv_reader

    from tasks.sources.shard import Shard, SourceError

    (examples / "notes.tsv").write_text("id\ttext\n1\tone\n")
    shard = Shard("notes.tsv", "tsv", "", (str(examples / "notes.tsv"),), column="body")
    with pytest.raises(SourceError, match="no column body"):
        list(tsv_reader.documents(shard, None))


def test_model_of_the_page_equals_transformers_trains_and_is_exported(examples, prefect_server):
    from transformers import ArceeConfig, ArceeForCausalLM

    from flows.pretrain import pretrain
    from tests.flows.micro import exported, write_profile
    from tests.forked_jobs import forked_jobs
    from tests.modeling.models.families.huggingface import assert_match

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    assert_match(ArceeForCausalLM, ArceeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    overrides = ["model.architecture=arcee", "parallel.tensor=2", "cluster.devices_per_node=2"]
    micro, store = str(write_profile(examples)), examples / "store"
    with forked_jobs():
        result = pretrain(micro, overrides, None, str(store))
    (dataset,) = (store / "artifacts/dataset").iterdir()
    assert json.loads((Path(result["export"]) / "config.json").read_text())["architectures"] == [
        "ArceeForCausalLM"
    ]
    loss, _ = exported(result["export"], dataset, 32)
    assert loss == pytest.approx(result["validation_loss"], abs=1e-3)

    profile = resolve.load(micro, overrides)
    key = keys.checkpoint(profile, "weights")
    (examples / "arcee.py").write_text("# edited\n")
    assert keys.checkpoint(profile, "weights") != key
