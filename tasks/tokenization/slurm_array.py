"""Shards done by a cluster: an array of Slurm's jobs, job k of n taking every n-th shard from the k-th on.

    python -m tasks.tokenization.slurm_array --plan FILE --shards FILE --store URI --work-dir FOLDER --order tokenize …

The store's locks and manifests see to it that a shard is made once and never seen half, whoever makes it; so a job that dies
costs its own shards alone, which the next attempt finds missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from modeling.exit_codes import REJECTED
from profiles.schema import Cluster
from tasks import keys
from tasks.launchers import Job, JobFailed, create, execute
from tasks.sources.shard import SourceError
from tasks.store.backends import FolderBackend
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import DatasetPlan

MOST = 1000  # jobs of an array; a cluster that is not told otherwise takes 1001
SAID = "trainshed: "
log = logging.getLogger("trainshed")


class SlurmArray:
    """Processes shards on the partition `cluster.shards_partition`, as many at a time as it has room for.

    Args:
        token: for the hub; it goes with the jobs' environment, and into no file of ours.
    """

    def __init__(self, cluster: Cluster, store: Store, token: str | None = None) -> None:
        own = {"partition": cluster.shards_partition, "constraint": None, "exclusive": False, "device": "cpu"}
        self._launcher = create("slurm", cluster.model_copy(update=own))
        self._store, self._secrets = store, (("HF_TOKEN", token),) if token else ()

    def run(self, plan: DatasetPlan, order: str, numbers: Sequence[int]) -> None:
        """Process shards of a plan; returns once the results of all of them are in the store."""
        contents = {"plan.json": plan.to_json(), "shards.json": list(numbers)}
        # A folder for each array, after what it does: flows that share a store would stop each other's, or do another's plan.
        folder = self._store.local_cache / "array" / keys.digest({"order": order, **contents})
        for name, value in contents.items():
            FolderBackend(folder).write(name, json.dumps(value).encode())
        count = min(MOST, len(numbers))
        arguments = ("--plan", folder / "plan.json", "--shards", folder / "shards.json")
        arguments += ("--store", self._store.uri, "--work-dir", self._store.work_dir)
        arguments += ("--order", order, "--of", count)
        job = Job(
            order,
            "tasks.tokenization.slurm_array",
            tuple(map(str, arguments)),
            folder,
            array=count,
            secrets=self._secrets,
        )
        try:
            execute(self._launcher, job, grace=0)  # what is done is in the store
        except JobFailed as failure:
            said = [line for line in failure.detail.splitlines() if line.startswith(SAID)]
            if failure.exit_code == REJECTED and said:  # which another attempt would not change
                raise SourceError(said[-1].removeprefix(SAID)) from failure
            raise


def main(arguments: list[str] | None = None) -> int:
    from tasks.tokenization.tokenize_shard import ORDERS

    parser = argparse.ArgumentParser(prog="tasks.tokenization.slurm_array")
    parser.add_argument("--plan", type=Path, required=True, help="file of a plan")
    parser.add_argument(
        "--shards", type=Path, required=True, help="file with the numbers of the shards to do"
    )
    parser.add_argument("--store", required=True, help="folder or s3:// prefix")
    parser.add_argument("--work-dir", required=True, help="local folder, where the store is on S3")
    parser.add_argument("--order", required=True, choices=ORDERS, help="what to do with each")
    parser.add_argument("--of", type=int, required=True, help="jobs of the array")
    parser.add_argument("--index", type=int, required=True, help="number of this one, from 0")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    threads = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
    plan = DatasetPlan.from_json(json.loads(options.plan.read_text()))
    store = Store(options.store, options.work_dir)
    try:
        for number in json.loads(options.shards.read_text())[options.index :: options.of]:
            ORDERS[options.order](plan, store, number, lambda tokens: None, threads)
            log.info(f"{options.order} {plan.shards[number].name}: done")
    except ValueError as error:  # of the profile or a source, in words of its own
        print(f"{SAID}{error}", file=sys.stderr)
        return REJECTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
