"""Interrupt complete runs at random moments until they finish; compare them with an undisturbed run.

Each chain is one run of a small profile with compiled graphs (without them with `--eager`), on an empty store. While it runs,
the command receives SIGINT, SIGTERM or SIGKILL, or a rank receives SIGKILL, at a random moment between the first second and
the duration of the undisturbed run. The command is then started again, until the chain has had all its interruptions and
finishes. The losses of every step in full precision, the evaluations and the exported files must be bit-identical to the
undisturbed run's; otherwise the exit code is 1.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.processes import has_ended, training_ranks
from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from flows.server.shared_server import start_module
from tasks.keys import file_digest
from tests.flows.micro import settings, write_profile

OVERRIDES = (
    *("train.steps=60", "checkpoint.every=7", "evaluate.every=10", "cluster.grace=20"),
    *("parallel.tensor=2", "cluster.devices_per_node=2", "cluster.retries=9"),
)
FAULTS = ("SIGINT", "SIGTERM", "SIGKILL", "rank")
TIMEOUT = 900  # seconds for one start of the command


@dataclass
class Chain:
    """One run in its own folder, and the faults injected into it."""

    folder: Path
    store: str
    compiled: bool
    faults: list[str] = field(default_factory=list)

    @property
    def run_folder(self) -> Path:
        return self.folder / "store/runs/micro"

    def start(self) -> subprocess.Popen[bytes]:
        others = f"cluster.work_dir={self.folder / 'store'}", f"compile.enabled={str(self.compiled).lower()}"
        arguments = ["run", str(self.folder.parent / "micro.yaml"), "--store", self.store]
        arguments += settings(*OVERRIDES, *others)
        return start_module(["flows.cli.main", *arguments], self.folder / "out", cwd=self.folder)

    def finish(self) -> float:
        """Let the command end by itself. Returns seconds; raises RuntimeError if it fails or takes too long."""
        begun = time.monotonic()
        if not has_ended(self.start(), self.folder / "out", TIMEOUT):
            raise RuntimeError(f"{self.folder}: not done after {TIMEOUT} s")
        return time.monotonic() - begun

    def interrupt(self, chance: random.Random, longest: float) -> bool:
        """Start the command and inject one fault. Returns True if the run finished before that."""
        process = self.start()
        delay, fault = chance.uniform(1, longest), chance.choice(FAULTS)
        if has_ended(process, self.folder / "out", delay):
            return True
        self.faults.append(f"{fault} after {delay:.1f} s")
        ranks = training_ranks(self.run_folder)
        if fault == "rank" and ranks:
            chance.choice(ranks).kill()
            process.wait(TIMEOUT)  # the command recovers by itself
        else:
            process.send_signal(signal.SIGKILL if fault in ("rank", "SIGKILL") else getattr(signal, fault))
            process.wait(TIMEOUT)
        return False

    def results(self) -> dict[str, object]:
        """Everything that must not depend on interruptions."""
        rows = map(json.loads, (self.run_folder / "metrics.jsonl").read_text().splitlines())
        losses = [[row["step"], row.get("loss"), row.get("validation_loss")] for row in rows]
        export = {path.name: file_digest(path) for path in sorted((self.run_folder / "export").iterdir())}
        return {"losses": losses, "export": export}


def run_chains(
    folder: Path, chains: int, faults: int, seed: int, bucket: str, compiled: bool
) -> Iterator[tuple[Chain, bool]]:
    """Run the chains; yields each, and whether its results equal those of an undisturbed run."""
    write_profile(folder)

    def chain(name: str) -> Chain:
        (folder / name).mkdir()
        store = f"{bucket}/{name}" if bucket else str(folder / name / "store")
        return Chain(folder / name, store, compiled)

    reference = chain("reference")
    longest = reference.finish()
    expected = reference.results()
    for number in range(chains):
        chance, faulty = random.Random(seed + number), chain(f"chain-{number}")
        while len(faulty.faults) < faults:
            if faulty.interrupt(chance, longest):
                break
        faulty.finish()
        yield faulty, faulty.results() == expected


def main() -> int:
    parser = make_parser(__doc__, out="interruptions")
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--faults", type=int, default=4, help="interruptions of each chain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--s3", action="store_true", help="use a store on S3 (moto on loopback)")
    parser.add("--eager", "train without compiled graphs, in a tenth of the time")
    options = parser.parse_args()
    results, equal = Results(options.out), 0
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        address = ""
        if options.s3:
            import pytest

            from tests.s3 import bucket

            logging.getLogger("werkzeug").setLevel(logging.WARNING)  # moto reports each request
            address = stack.enter_context(bucket(stack.enter_context(pytest.MonkeyPatch.context())))
        for key in ("PREFECT_API_URL", "PREFECT_PROFILE"):
            os.environ.pop(key, None)
        chosen = (options.chains, options.faults, options.seed, address, not options.eager)
        chains = run_chains(Path(name), *chosen)
        for number, (chain, same) in enumerate(chains):
            equal += same
            name, faults = f"chain {number}", "; ".join(chain.faults) or "no fault"
            results.add(
                name, f"{name}: {'equal' if same else 'DIFFERENT'} after {faults}", equal=same, faults=faults
            )
    print(f"{equal} of {options.chains} chains ended with equal losses, evaluations and exports")
    return 0 if equal == options.chains else 1


if __name__ == "__main__":
    sys.exit(main())
