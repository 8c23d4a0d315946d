"""Compare programs traced with the emulated device and without it.

    python -m tests.emulation.digests [--all] [--full] [--out FILE] [PROFILE ...]

Traces each profile twice, for the device and in a process that rejects any use of it. By default, as few shipped profiles as have
every feature of all of them, but those of GPUs: every family, parallel axis and setting of graphs; --all takes all of these.
Layers are as wide as in the profile, but few, and so are ranks: --full keeps both. Profiles of which FILE has a row without
difference are not traced again, if sources, torch and the settings traced are the same: an interrupted comparison resumes. Exit
code 1 if a digest differs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.results import Results, read
from modeling.compilation.manifest import Manifest
from modeling.models.build import partition_layers
from modeling.tracing.trace import Recorder, run_stage
from parallel.torch_internals import FakeTensorMode
from profiles.arguments import Parser
from profiles.recompute import modes_of
from profiles.resolve import load, names
from profiles.schema import Profile, Train
from profiles.sections.roles import keys_of
from tasks.keys import code_digest
from tests.emulation import usage
from tests.emulation.compiler import register_compiler
from tests.emulation.device import install

NEURON = "cluster.device=neuron"
# Keys of `train` without which profiles are of one kind: for how long they train, not what.
LENGTH = {"seed", "global_batch_size"}


def features(profile: Profile) -> set[str]:
    """What shapes a profile's programs besides sizes, such as "model.sliding_window=many"."""
    train = profile.train.model_dump(include={*keys_of(Train, "graphs")} - LENGTH - {"recompute"})
    model, parallel = profile.model.model_dump(), profile.parallel.model_dump(exclude={"pipeline_cuts"})
    heads = profile.model.num_key_value_heads
    model["shares_kv_heads"] = heads < profile.model.num_attention_heads
    parallel["copies_kv_heads"] = heads < profile.parallel.tensor
    train |= {"accumulates": profile.accumulation_steps > 1, "packs": profile.packs}
    sections = {"model": model, "train": train, "parallel": parallel}
    sections |= {name: getattr(profile, name).model_dump() for name in ("objective", "lora")}
    modes = {f"train.recompute={mode}" for mode in modes_of(profile.train.recompute)}
    return modes | {item for name, values in sections.items() for item in _items(name, values)}


def _items(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _items(f"{name}.{key}", each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _items(f"{name}[]", each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield f"{name}={value if value in (0, 1) else 'many'}"
    else:
        yield f"{name}={value}"


def cover(profiles: Iterable[str]) -> list[str]:
    """Few profiles that together have every feature of all, those with the most new ones first."""
    left = {name: features(load(name, [NEURON])) for name in profiles}
    chosen = []
    while any(left.values()):
        chosen.append(max(left, key=lambda name: len(left[name])))
        had = left[chosen[-1]]
        left = {name: found - had for name, found in left.items()}
    return chosen


def small(name: str) -> Profile:
    """A profile with the fewest layers and ranks that have all kinds of layers and parallel axes of it."""
    profile = load(name, [NEURON])
    model, parallel = profile.model, profile.parallel
    kinds_of_layer = [
        (model.window(i), model.has_experts(i), model.is_linear(i), model.has_rope(i))
        for i in range(model.num_hidden_layers)
    ]
    pipeline = min(parallel.pipeline, 2)
    least = max(max(map(kinds_of_layer.index, kinds_of_layer)) + 1, 2 * pipeline)
    expert = min(parallel.expert, 2)
    hybrid = parallel.shard_degree is not None
    data = 4 if hybrid or expert > 1 else 2
    ranks = parallel.tensor * pipeline * parallel.context * data
    samples = profile.train.micro_batch_size * data * min(profile.accumulation_steps, 2)
    overrides = (
        *(f"model.num_hidden_layers={least}", "parallel.pipeline_cuts=null", f"parallel.pipeline={pipeline}"),
        *(f"parallel.expert={expert}", f"train.global_batch_size={samples}"),
        *(f"parallel.shard_degree={2 if hybrid else 'null'}", f"train.recompute={_modes(profile)}"),
        *("cluster.nodes=1", f"cluster.devices_per_node={ranks}"),
    )
    return load(name, [NEURON, *overrides])


def _modes(profile: Profile) -> str:
    """Recomputation in all modes of the profile, one layer of a stage for each but the last."""
    modes = sorted(modes_of(profile.train.recompute))
    return " + ".join([*(f"{mode} 1" for mode in modes[:-1]), modes[-1]])


def differences(profile: Profile) -> tuple[int, list[str]]:
    """Number of a profile's programs, and what differs in those traced without the device."""
    manifests: list[Manifest] = []
    for present in (True, False):
        with mock.patch.object(usage, "present", present):
            torch.compiler.reset()
            recorder = Recorder()
            for number in range(len(partition_layers(profile))):
                run_stage(profile, number, recorder.backend, FakeTensorMode())
            manifests.append(recorder.manifest())
    expected, found = manifests
    if found.programs.keys() != expected.programs.keys():
        return 0, [f"programs {sorted(found.programs)}, with the device {sorted(expected.programs)}"]
    programs = [(name, lines) for name, each in found.programs.items() for lines in each.values()]
    compared = [(name, expected.difference(name, lines)) for name, lines in programs]
    return len(programs), [f"{name}: {difference}" for name, difference in compared if difference]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="tests.emulation.digests", description=__doc__.splitlines()[0])
    parser.add_argument("profile", nargs="*", help="a shipped profile, or the path of a YAML file")
    parser.add_argument("--all", action="store_true", help="all shipped profiles but those of GPUs")
    parser.add_argument("--full", action="store_true", help="keep the number of layers and ranks")
    parser.add_argument("--out", type=Path, help="file for the rows, from which a comparison resumes")
    options = parser.parse_args(arguments)
    shipped = [name for name in names() if load(name).cluster.device != "cuda"]
    chosen = options.profile or (shipped if options.all else cover(shipped))
    print(f"{len(chosen)} of {len(shipped)} profiles", flush=True)
    out = Results(options.out) if options.out else None
    latest_first = read(options.out)[::-1] if options.out else []
    sources = code_digest("modeling", "parallel", "profiles", "tests.emulation")
    rows: dict[str, dict[str, Any]] = {}
    install()
    register_compiler()
    for name in chosen:
        profile = load(name, [NEURON]) if options.full else small(name)
        settings = sha256(profile.model_dump_json().encode()).hexdigest()
        traced = {"row": name, "torch": torch.__version__, "sources": sources, "settings": settings}
        found = next((row for row in latest_first if traced.items() <= row.items()), None)
        if found and not found["differ"]:
            rows[name] = found
            continue
        begun = time.process_time()
        count, differing = differences(profile)
        seconds = time.process_time() - begun
        print(f"{name}: {count} programs, {len(differing)} differ, {seconds:.0f} s of CPU", flush=True)
        print("".join(f"  {line}\n" for line in differing), end="", flush=True)
        rows[name] = {**traced, "programs": count, "differ": len(differing)}
        if out:
            out.append(rows[name])
    total, differ = (sum(rows[name][key] for name in chosen) for key in ("programs", "differ"))
    print(f"{total:,} programs, {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
