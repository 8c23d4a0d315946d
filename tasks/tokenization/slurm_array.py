"""SlurmArray: tokenizes shards on a cluster, as a Slurm job array of `worker` processes.

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


class SlurmArray:
    """Processes shards in a Slurm job array on the partition `cluster.shards_partition`.

    Args:
        token: for the hub; passed in the jobs' environment and written to no file.
    """

    def __init__(self, cluster: Cluster, store: Store, token: str | None = None) -> None:
        changes = {"partition": cluster.shards_partition, **CPU_NODES}
        self._launcher = create("slurm", cluster.model_copy(update=changes))
        self._store, self._secrets = store, (("HF_TOKEN", token),) if token else ()

    def run(self, plan: DatasetPlan, operation: str, numbers: Sequence[int]) -> None:
        """Apply an operation to shards and wait. Raises SourceError if a job rejects a shard, else JobFailed."""
        contents = {"plan.json": plan.to_json(), "shards.json": list(numbers)}
        # The folder depends on the contents, or flows that share a store would replace each other's arrays.
        folder = self._store.local_cache / "array" / keys.digest({"order": operation, **contents})
        for name, value in contents.items():
            FolderBackend(folder).write(name, json.dumps(value).encode())
        count = min(MAX_JOBS, len(numbers))
        options: tuple[object, ...] = (
            *("--plan", folder / "plan.json", "--shards", folder / "shards.json", "--of", count),
            *("--store", self._store.uri, "--work-dir", self._store.work_dir, "--operation", operation),
        )
        worker, arguments = "tasks.tokenization.worker", tuple(map(str, options))
        job = Job(operation, worker, arguments, folder, array=count, secrets=self._secrets)
        try:
            execute(self._launcher, job, grace=0)  # finished shards are in the store
        except JobFailed as failure:
            errors = [line for line in failure.detail.splitlines() if line.startswith(ERROR_PREFIX)]
            if failure.exit_code == REJECTED and errors:  # a retry would fail again
                raise SourceError(errors[-1].removeprefix(ERROR_PREFIX)) from failure
            raise
