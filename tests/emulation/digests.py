"""Compare programs traced with the emulated device and without it.

    python -m tests.emulation.digests [PROFILE ...]

Traces each profile twice at full size, for the device and in a process that rejects any use of it. By default, all shipped
profiles but those of GPUs. Exit code 1 if a digest differs.
"""

from __future__ import annotations

import sys
import time
from unittest import mock

from modeling.compilation.manifest import Manifest
from modeling.tracing.trace import trace
from profiles.arguments import Parser
from profiles.resolve import load, names
from profiles.schema import Profile
from tests.emulation import usage
from tests.emulation.compiler import register_compiler
from tests.emulation.device import install


def differences(profile: Profile) -> tuple[int, list[str]]:
    """Number of a profile's programs, and what differs in those traced without the device."""
    manifests: list[Manifest] = []
    for present in (True, False):
        with mock.patch.object(usage, "present", present):
            manifests.append(trace(profile).manifest)
    expected, found = manifests
    if found.programs.keys() != expected.programs.keys():
        return 0, [f"programs {sorted(found.programs)}, with the device {sorted(expected.programs)}"]
    programs = [(name, lines) for name, each in found.programs.items() for lines in each.values()]
    compared = [(name, expected.difference(name, lines)) for name, lines in programs]
    return len(programs), [f"{name}: {difference}" for name, difference in compared if difference]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="tests.emulation.digests", description=__doc__.splitlines()[0])
    parser.add_argument(
        "profile", nargs="*", help="a shipped profile, or the path of a YAML file (all but those of GPUs)"
    )
    options = parser.parse_args(arguments)
    install()
    register_compiler()
    equal = True
    for name in options.profile or [name for name in names() if load(name).cluster.device != "cuda"]:
        begun = time.perf_counter()
        count, found = differences(load(name, ["cluster.device=neuron"]))
        print(
            f"{name}: {count} programs, {len(found)} differ, {time.perf_counter() - begun:.0f} s", flush=True
        )
        print("".join(f"  {line}\n" for line in found), end="", flush=True)
        equal &= not found
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
