"""neuron_parallel_compile, by a stand-in: a script of that name that prints what the real one is documented to print."""

import json
import sys
from pathlib import Path

import pytest

from profiles.resolve import load
from tasks import graphs, keys, parallel_compile
from tasks.artifacts import Store
from tests.modeling import micro

STAND_IN = """#!{python}
import json, os, pathlib, sys
cache = pathlib.Path(os.environ["NEURON_COMPILE_CACHE_URL"])
with open({calls!r}, "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ["NEURON_CC_FLAGS"]]) + "\\n")
(cache / "MODULE_1").mkdir(exist_ok=True)
(cache / "MODULE_1" / "model.neff").write_text("compiled")
print({output!r})
sys.exit({code})
"""


def lines(total: int, successful: int, failed: int, prefix: str = "||NEURON_PARALLEL_COMPILE||") -> str:
    return (
        f"2026-11-21 10:00:00 INFO {prefix}: Total graphs: {total}\n"
        f"2026-11-21 10:00:00 INFO {prefix}: Total successful compilations: {successful}\n"
        f"2026-11-21 10:00:00 INFO {prefix}: Total failed compilations: {failed}\n"
    )


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Compiles with a stand-in that prints this output and ends with this exit code."""
    store, run = Store(str(tmp_path / "store")), micro.run_folder(tmp_path / "run", "compile.enabled=true")
    bin = tmp_path / "bin"
    bin.mkdir()
    monkeypatch.setenv("PATH", f"{bin}:/usr/bin:/bin")
    loaded = load(str(run / "profile.yaml"))
    compile = loaded.compile.model_copy(
        update={"backend": "neuron_parallel_compile", "flags": "--model-type transformer"}
    )
    cluster = loaded.cluster.model_copy(update={"device": "neuron"})
    profile = loaded.model_copy(update={"compile": compile, "cluster": cluster})
    with store.publish("dataset", "d") as folder:
        (folder / "corpus.json").write_text("{}")
    calls = tmp_path / "calls"

    def compiles(output: str, code: int = 0):
        script = bin / "neuron_parallel_compile"
        script.write_text(STAND_IN.format(python=sys.executable, output=output, code=code, calls=str(calls)))
        script.chmod(0o755)
        return graphs.run(profile, store, run, keys.graphs(profile), store.expect("dataset", "d"))

    compiles.run, compiles.store, compiles.profile, compiles.calls = run, store, profile, calls
    return compiles


@pytest.mark.parametrize("prefix", ["||NEURON_PARALLEL_COMPILE||", "||PARALLEL_COMPILE||"])
def test_the_summary_is_read_under_both_prefixes_whatever_the_exit_status(world, prefix):
    artifact = world(lines(6, 6, 0, prefix), code=1)
    assert {name: artifact.summary[name] for name in ("total", "successful", "failed")} == {
        "total": 6,
        "successful": 6,
        "failed": 0,
    }
    arguments, flags = json.loads(world.calls.read_text())
    assert arguments[arguments.index("-m") + 1] == "torch.distributed.run"
    assert "modeling.train" in arguments
    assert flags == "--model-type transformer"
    trial = load(str(Path(arguments[arguments.index("--run-folder") + 1]) / "profile.yaml"))
    assert (trial.train.steps, trial.evaluate.every) == (2, 1)
    assert trial.train.sequence_length == world.profile.train.sequence_length


def test_failed_graphs_are_recorded_and_tried_again_and_nothing_is_cached(world):
    with pytest.raises(graphs.GraphsFailed, match="MODULE_2"):
        world("ERROR: Failed compilation with neuronx-cc of MODULE_2\n" + lines(6, 5, 1))
    assert json.loads((world.run / graphs.RECORD).read_text())["failed"] == 1
    assert world.store.find(graphs.KIND, keys.graphs(world.profile)) is None
    assert world(lines(6, 6, 0)).summary["failed"] == 0
    _, flags = json.loads(world.calls.read_text().splitlines()[-1])
    assert "--retry_failed_compilation" in flags


@pytest.mark.parametrize("output", ["all is well", lines(6, 6, 0).rpartition("2026")[0], lines(6, 4, 1)])
def test_an_exit_status_of_zero_alone_says_nothing(world, output):
    with pytest.raises(parallel_compile.ParallelCompileFailed):
        world(output, code=0)
    assert world.store.find(graphs.KIND, keys.graphs(world.profile)) is None


def test_without_the_command_one_line_says_so(world, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    profile, store = world.profile, world.store
    artifact = graphs.run(profile, store, world.run, keys.graphs(profile), store.expect("dataset", "d"))
    assert artifact.summary["note"].startswith("no neuron_parallel_compile on this machine")
