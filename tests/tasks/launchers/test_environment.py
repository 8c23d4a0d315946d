"""Every launcher sets the device's environment variables for its jobs."""

import json
import re

import pytest

from profiles import resolve
from tasks.launchers import Job, batch, execute, manifests
from tasks.launchers.plugins import create

NAMES = ("PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NEURON_RT_ROOT_COMM_ID")
PRINT = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {NAMES}}}))"


def in_local_job(job, cluster):
    execute(create("local", cluster), job)
    return json.loads(job.log_file.read_text().splitlines()[0])


def in_batch_script(job, cluster):
    lines = batch.script(job, cluster, "submission").splitlines()
    exports = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
    return {name: exports.get(name) for name in NAMES}


def in_manifest(job, cluster):
    (container,) = manifests.manifest("job", job, cluster, 0, None)["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    return {name: variables.get(name) for name in NAMES}


@pytest.mark.parametrize("environment", [in_local_job, in_batch_script, in_manifest])
def test_gpu_jobs_get_expandable_segments_and_deterministic_cublas(environment, tmp_path, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    profile = resolve.load("llama3-8b-h100", ["cluster.kubernetes.image=i"])
    assert profile.train.deterministic
    job = Job("print", "timeit", ("-n1", "-r1", PRINT), tmp_path)
    expected = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NEURON_RT_ROOT_COMM_ID": None,
    }
    assert environment(job, profile.cluster) == expected


def test_local_jobs_on_trainium_get_an_address_for_their_collectives(tmp_path, monkeypatch):
    """Without it, the Neuron runtime hangs at startup."""
    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)
    job = Job("print", "timeit", ("-n1", "-r1", PRINT), tmp_path)
    found = in_local_job(job, resolve.load("llama3-8b").cluster)["NEURON_RT_ROOT_COMM_ID"]
    assert re.fullmatch(r"127\.0\.0\.1:2\d{4}|127\.0\.0\.1:3[01]\d{3}", found)
