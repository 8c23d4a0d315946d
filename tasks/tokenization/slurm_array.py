"""Tokenizes shards on a cluster, as a Slurm job array of `worker` processes.

The store's locks and manifests ensure that each shard is made once and only seen complete, so a job that dies loses only its own
shards, which the next attempt finds missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from profiles.files.exit_codes import REJECTED
from profiles.schema import Cluster
from tasks import keys
from tasks.launchers import Job, JobFailed, create, execute
from tasks.sources.shard import SourceError
from tasks.store.backends.folder import FolderBackend
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import DatasetPlan
from tasks.tokenization.worker import ERROR_PREFIX

CPU_NODES = {"constraint": None, "exclusive": False, "device": "cpu"}  # shards need no accelerator
MAX_JOBS = 1000  # of an array; Slurm's default MaxArraySize is 1001


def process_shards(
    plan: DatasetPlan,
    store: Store,
    cluster: Cluster,
    operation: str,
    numbers: Sequence[int],
    token: str | None,
) -> None:
    """Apply an operation to shards in a job array on the partition `cluster.shards_partition`, and wait.

    Args:
        token: for the hub; passed in the jobs' environment and written to no file.

    Raises:
        SourceError: a job rejects a shard.
        JobFailed: a job failed for another reason.
    """
    contents = {"plan.json": plan.to_json(), "shards.json": list(numbers)}
    # The folder depends on the contents, or flows that share a store would replace each other's arrays.
    folder = store.local_cache / "array" / keys.digest({"order": operation, **contents})
    for name, value in contents.items():
        FolderBackend(folder).write(name, json.dumps(value).encode())
    count = min(MAX_JOBS, len(numbers))
    options: tuple[object, ...] = (
        *("--plan", folder / "plan.json", "--shards", folder / "shards.json", "--of", count),
        *("--store", store.uri, "--work-dir", store.work_dir, "--operation", operation),
    )
    worker, arguments = "tasks.tokenization.worker", tuple(map(str, options))
    secrets = (("HF_TOKEN", token),) if token else ()
    job = Job(operation, worker, arguments, folder, array=count, secrets=secrets)
    launcher = create(
        "slurm", cluster.model_copy(update={"partition": cluster.shards_partition, **CPU_NODES})
    )
    try:
        execute(launcher, job, grace=0)  # finished shards are in the store
    except JobFailed as failure:
        errors = [line for line in failure.detail.splitlines() if line.startswith(ERROR_PREFIX)]
        if failure.exit_code == REJECTED and errors:  # a retry would fail again
            raise SourceError(errors[-1].removeprefix(ERROR_PREFIX)) from failure
        raise
