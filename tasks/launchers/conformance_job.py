"""Job of the conformance suite: `python -m tasks.launchers.conformance_job FOLDER [ORDER ...]`.

Writes what it finds to FOLDER/rank-<rank>.json, then waits for FOLDER/finish. Orders: `fail` ends with exit code 3; `stubborn`
ignores the signals to stop, SIGTERM and SIGUSR1 as in training, which otherwise make it write FOLDER/saved-<rank> and end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from profiles.arguments import Parser
from profiles.files import state_files

FAILURE = 3  # exit code
SECRETS = ("CONFORMANCE_SECRET", "PREFECT_API_KEY")


def main() -> int:
    parser = Parser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("orders", nargs="*")
    parser.add_argument("--attempt", type=int)
    options = parser.parse_args()
    rank = os.environ.get("RANK", "0")

    def stop(*_: object) -> None:
        (options.folder / f"saved-{rank}").touch()
        sys.exit(143)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if "stubborn" in options.orders else stop)
    facts = {
        "pid": os.getpid(),
        "rank": rank,
        "world_size": os.environ.get("WORLD_SIZE"),
        "folder": os.getcwd(),
        "attempt": options.attempt,
        "safe_path": sys.flags.safe_path,
        "secrets": {name: os.environ.get(name) for name in SECRETS},
    }
    # Each in one write, and the file complete at once.
    print(f"rank {rank} runs\n", end="", flush=True)
    partial = options.folder / f"rank-{rank}.partial"
    partial.write_text(json.dumps(facts))
    partial.rename(options.folder / f"rank-{rank}.json")
    while not state_files.exists(options.folder / "finish"):
        time.sleep(0.05)
    if "fail" in options.orders:
        return FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
