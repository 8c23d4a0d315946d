"""Mixtures: micro proxies through the real flow, a source added later, a proposed profile that trains."""

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flows.cli.experiments import print_mixture
from flows.cli.main import main
from profiles import resolve
from tasks.step import Context
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.garbage import find_garbage
from tasks.store.store import Store
from tests.forked_jobs import forked_jobs

SOURCES = ("texts", "others", "third")
PROXY = {"hidden_size": 16, "tokens_per_parameter": 0.08}


@pytest.fixture(scope="module")
def workshop(profile, tmp_path_factory):
    """A folder with three sources of different words, and a tokenizer for all of them."""
    folder = tmp_path_factory.mktemp("mixture")
    texts = Path(yaml.safe_load(profile.read_text())["data"]["sources"][0]["path"])
    for name in SOURCES:
        lines = texts.read_text().replace('": "', f'": "{name} ').splitlines()
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    store = Store(str(folder / "tokenizer"))
    made = TokenizerStep().run(Context(resolve.load(str(profile)), store))
    return folder, store.artifacts.path(made)


@pytest.fixture
def write_mixture(workshop, profile):
    """Write a mixture file and its target with this many sources: `write_mixture(2, proxies=[…])`."""
    folder, tokenizer = workshop

    def write(count: int, weights: list[float] | None = None, **changes: object) -> Path:
        sources = [{"kind": "files", "path": str(folder / f"{name}.jsonl")} for name in SOURCES[:count]]
        for source, weight in zip(sources, weights or (), strict=False):
            source["weight"] = weight
        target = {"extends": str(profile), "tokenizer": {"source": str(tokenizer), "vocabulary_size": None}}
        data = {"sources": sources, "validation_fraction": 0.1}
        (folder / "target.yaml").write_text(yaml.safe_dump({**target, "data": data}))
        settings = {
            "target": "./target.yaml",
            "overrides": ["checkpoint.every=0"],
            "proxy": PROXY,
            "devices": 2,
        }
        settings |= {"maximum_passes": None, **changes}
        path = folder / "mix.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    return write


@pytest.fixture(scope="module")
def mixture(prefect_server):
    """Run the flow in this process, its ranks forked: `mixture(file, store, check=False)`."""
    from flows.experiments.mixture import mixture

    def call(file: Path, store: Path, check: bool = False) -> dict:
        with forked_jobs():
            return mixture(str(file), str(store), check)

    return call


def test_proxies_are_reused_when_a_source_is_added(mixture, write_mixture, tmp_path, capsys):
    store = tmp_path / "store"
    first = mixture(write_mixture(2, proxies=[{"count": 4}]), store)
    names = ["mix-2-natural", "mix-2-01", "mix-2-02", "mix-2-03"]
    assert [proxy["name"] for proxy in first["proxies"]] == names
    natural = first["proxies"][0]["weights"]
    assert natural == first["natural"] == pytest.approx({"texts": 0.5, "others": 0.5}, abs=0.05)
    assert sum(first["weights"].values()) == pytest.approx(1, abs=1e-3)
    assert [row["source"] for row in first["losses"]] == ["texts", "others", None]
    logs = {name: (store / f"runs/{name}/metrics.jsonl").stat().st_mtime_ns for name in names}

    # The proxies of two sources are reused, and evaluated on the third, which they never read.
    groups = [{"sources": ["texts", "others"], "count": 4}, {"count": 2}]
    second = mixture(write_mixture(3, proxies=groups), store, check=True)
    assert [proxy["name"] for proxy in second["proxies"]] == [*names, "mix-3-natural", "mix-3-01"]
    for name, before in logs.items():
        assert (store / f"runs/{name}/metrics.jsonl").stat().st_mtime_ns == before
    for old, new in zip(first["proxies"], second["proxies"], strict=False):
        assert old["weights"] == new["weights"]
        assert {**new["losses"], **old["losses"]} == pytest.approx(new["losses"], rel=1e-6)
        assert new["losses"].keys() == set(SOURCES)
    assert len([*store.glob("artifacts/checkpoint-evaluation/*/evaluation.json")]) == 4
    garbage, _ = find_garbage(Store(str(store)))
    assert not [each.name for each in garbage if "evaluation" in each.name]
    assert second["weights"].keys() == set(SOURCES)
    assert second["key"] != first["key"]

    # The check trained one more proxy, with the proposed weights.
    trained = {path.parent.name for path in store.glob("runs/*/metrics.jsonl")}
    (checked,) = trained - {proxy["name"] for proxy in second["proxies"]}
    found = resolve.load(str(store / "runs" / checked / "profile.yaml")).data.schedule
    assert found[0].weights == pytest.approx(list(second["weights"].values()))
    assert second["outcome"][-1]["source"] is None
    assert "Outcome of a proxy" in Path(second["page"]).read_text()

    # Both ways to apply the weights describe the same run.
    written = resolve.load(second["profile"])
    target = str(Path(write_mixture(3)).with_name("target.yaml"))
    same = resolve.load(target, ["checkpoint.every=0", *second["overrides"]], "mix")
    resolve.check(written)
    assert written == same
    assert [source.weight for source in written.data.sources] == list(second["weights"].values())

    print_mixture(Console(width=120), second)
    printed = capsys.readouterr().out
    assert "--set data.sources.2.weight=" in printed
    assert "third" in printed


@pytest.mark.parametrize(
    ("count", "changes", "says"),
    [
        (1, {}, "has one training source; a mixture needs at least two"),
        (2, {"objective": {"text": 1.0}}, "objective.text = 1.0: is not a source of the target; nearest valid: texts"),
        (2, {"objective": {"texts": 0.0}}, "objective: gives all sources weight 0"),
        (2, {"minimum_weight": 0.5}, "minimum_weight = 0.5: leaves nothing to vary among 2 sources"),
        (2, {"proxies": [{"count": 3}]}, "proxies.0.count = 3: makes 3 proxies, too few for 2 sources; at least 4"),
        (3, {"proxies": [{"sources": ["texts", "others"]}]}, "has no group over all sources, third too"),
        (3, {"proxies": [{"sources": ["texts", "other"]}]}, "proxies.0.sources = other: is not a training source"),
        (2, {"proxies": [{}, {"count": 4}]}, "are the sources of an earlier group"),
        (2, {"proxy": {**PROXY, "hidden_size": 12}}, "proxy.hidden_size = 12: is not a multiple of 8"),
        (2, {"overrides": ["data.schedule=[{step: 2, weights: [1, 0]}]"], "weights": [1.0, 1.0]}, "data.schedule"),
        (3, {"overrides": ["tokenizer.source=train", "tokenizer.vocabulary_size=300"],
             "proxies": [{"sources": ["texts", "others"]}, {}]}, "tokenizer.source = train: is trained on the sources"),
    ],
)  # fmt: skip
def test_a_bad_mixture_is_rejected_before_any_work(write_mixture, capsys, count, changes, says):
    assert main(["mixture", "plan", str(write_mixture(count, **changes))]) == 2
    assert says in capsys.readouterr().err


def test_the_plan_lists_every_proxy_and_the_total(write_mixture, capsys):
    path = write_mixture(3, weights=[2.0, 1.0, 1.0])
    assert main(["mixture", "plan", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["proxies"]) == 12
    assert found["proxies"][0]["weights"] == {"texts": 0.5, "others": 0.25, "third": 0.25}
    assert found["total"]["flops"] == sum(proxy["flops"] for proxy in found["proxies"])
    assert main(["mixture", "plan", str(path)]) == 0
    assert "50 25 25" in capsys.readouterr().out
