"""Worker process: applies an operation ("tokenize", "fingerprint") to shards of a dataset plan.

    python -m tasks.tokenization.worker --plan FILE --store URI --serve
    python -m tasks.tokenization.worker --plan FILE --store URI --operation tokenize --shards FILE --index I --of N

With --serve it reads requests ("tokenize 7") from stdin and answers with lines of JSON on stdout, until stdin is closed.
Otherwise it is job I of N and processes every N-th of the listed shards, from the I-th on.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from modeling import job_log
from profiles.arguments import Parser
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.files.exit_codes import REJECTED, follows_failed_read
from tasks.sources import duplicates
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import DatasetPlan
from tasks.tokenization.tokenize_shard import tokenize

ERROR_PREFIX = "trainshed: "  # of the stderr line that explains exit code REJECTED
OPERATIONS = {"tokenize": tokenize, "fingerprint": duplicates.fingerprint}
log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="tasks.tokenization.worker")
    parser.add_argument("--plan", type=Path, required=True, help="JSON file of a dataset plan")
    parser.add_argument("--store", required=True, help="folder or s3:// prefix")
    parser.add_argument("--work-dir", default="store", help="local folder of a store on S3")
    cores = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
    parser.add_argument("--threads", type=int, default=cores, help="of the engine")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--serve", action="store_true", help="read requests from stdin")
    mode.add_argument("--shards", type=Path, help="JSON file with the numbers of the shards to process")
    parser.add_argument("--operation", choices=OPERATIONS, default="tokenize", help="applied to --shards")
    parser.add_argument("--index", type=int, default=0, help="number of this job, from 0")
    parser.add_argument("--of", type=int, default=1, help="number of jobs that share the shards")
    options = parser.parse_args(arguments)
    job_log.configure(sys.stderr)
    # Read by rayon, the thread pool of both engines.
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if options.threads > 1 else "false"
    plan = DatasetPlan(**json.loads(state_files.contents(options.plan)))
    store = Store(options.store, options.work_dir)
    if options.serve:
        logging.getLogger().addHandler(_LogForwarder())
        for line in sys.stdin:
            operation, _, k = line.partition(" ")
            send(answer(partial(_process, operation, plan, store, int(k), options.threads)))
        return 0
    try:
        for k in json.loads(state_files.contents(options.shards))[options.index :: options.of]:
            _process(options.operation, plan, store, k, options.threads)
            log.info(f"{options.operation} {plan.shards[k].name}: done")
    except ValueError as error:  # the profile or a source is rejected
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return REJECTED
    return 0


def _process(operation: str, plan: DatasetPlan, store: Store, k: int, threads: int) -> dict[str, Any]:
    return asdict(OPERATIONS[operation](plan, store, k, threads=threads))


def answer(work: Callable[[], Any]) -> dict[str, Any]:
    """The result of a function as an answer, or why it failed."""
    try:
        return {"done": work()}
    except ProfileError as error:
        return {"rejected": [error.key, error.value, error.reason, list(error.choices)]}
    except Exception as error:
        if isinstance(error, ValueError) and not follows_failed_read(error):
            return {"corrupted": str(error)}
        log.exception("failed")
        return {"failed": f"{type(error).__name__}: {error}"}


class _LogForwarder(logging.Handler):
    """Sends Trainshed's log records as answers; stderr is only read if the worker dies."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in ("tasks", "modeling", "__main__") and not record.exc_info:
            send({"log": [record.levelno, record.getMessage()]})


def send(answer: dict[str, Any]) -> None:
    """Write an answer as a line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
