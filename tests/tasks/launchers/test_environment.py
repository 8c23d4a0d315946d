"""Every launcher sets the device's environment variables for its jobs, unless the user has set them."""

import json
import os
import re
import subprocess
import sys

import pytest

from profiles import resolve
from tasks.launchers import Job, execute, slurm, slurm_queue
from tasks.launchers.plugins import create

NAMES = ("PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NEURON_RT_ROOT_COMM_ID")
PRINT = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {NAMES}}}))"
USERS = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}


@pytest.fixture(params=["local", "slurm", pytest.param("kubernetes", marks=pytest.mark.slow)])
def submitted(request, monkeypatch, tmp_path):
    """Variables of a GPU job that the launcher submits, with the user's variables."""

    def submit(users: dict[str, str]) -> dict[str, str | None]:
        chosen = ",".join(f"{name}={value}" for name, value in users.items())
        settings = {"image": "i", "claim": "c", "mount": "/mount", "environment": f"[{chosen}]"}
        changes = [f"cluster.kubernetes.{key}={value}" for key, value in settings.items()]
        profile = resolve.load("llama3-8b-h100", changes)
        assert profile.train.deterministic
        for name, value in users.items() if request.param != "kubernetes" else ():
            monkeypatch.setenv(name, value)
        cluster = profile.cluster.model_copy(update={"launcher": request.param})
        return VARIABLES[request.param](request, cluster, tmp_path)

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return submit


def in_local_job(request, cluster, folder):
    job = Job("print", "timeit", ("-n1", "-r1", PRINT), folder)
    execute(create(cluster), job)
    return json.loads(job.log_file.read_text().splitlines()[0])


def in_batch_script(request, cluster, folder):
    job = Job("print", "timeit", (), folder)
    with pytest.MonkeyPatch.context() as patch:  # a submission without a cluster
        patch.setattr(slurm.SlurmLauncher, "_active", lambda *_: [])
        patch.setattr(slurm.SlurmLauncher, "_sbatch", lambda *_: "1")
        patch.setenv("SBATCH_EXPORT", "NONE")
        slurm._warn_of_export.cache_clear()
        create(cluster).submit(job)
    assert request.getfixturevalue("caplog").text.count("SBATCH_EXPORT=NONE has no effect") == 1
    lines = (folder / "print.sbatch").read_text().splitlines()
    exports = [line for line in lines if line.startswith("export ") and "PET_" not in line]
    command = ["bash", "-c", "\n".join([*exports, '"$@"']), "-", sys.executable, "-c", PRINT]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def in_manifest(request, cluster, folder):
    emulated = request.getfixturevalue("cluster")
    launcher = create(cluster)
    launcher.cancel(launcher.submit(Job("print", "timeit", (), folder)), 0)
    (sent,) = emulated.submitted
    (container,) = sent["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    return {name: variables.get(name) for name in NAMES}


VARIABLES = {"local": in_local_job, "slurm": in_batch_script, "kubernetes": in_manifest}
DEFAULTS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NEURON_RT_ROOT_COMM_ID": None,
}


@pytest.mark.parametrize("users", [{}, USERS], ids=["defaults", "user's"])
def test_gpu_jobs_get_the_devices_variables_unless_the_user_has_set_them(submitted, users, caplog):
    assert submitted(users) == DEFAULTS | users
    kept = [each.message for each in caplog.records if "is kept" in each.message]
    assert kept == [
        f"print: {name}={value} is kept; the default is {DEFAULTS[name]}" for name, value in users.items()
    ]


def test_local_jobs_on_trainium_get_an_address_for_their_collectives(tmp_path, monkeypatch):
    """Without it, the Neuron runtime hangs at startup."""
    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)
    cluster = resolve.load("llama3-8b", ["cluster.launcher=local"]).cluster
    found = in_local_job(None, cluster, tmp_path)["NEURON_RT_ROOT_COMM_ID"]
    assert re.fullmatch(r"127\.0\.0\.1:2\d{4}|127\.0\.0\.1:3[01]\d{3}", found)


def test_job_submitted_from_a_job_does_not_get_the_address_of_its_collectives(monkeypatch):
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "10.0.0.1:20001")
    environments = []
    monkeypatch.setattr(slurm_queue.subprocess, "run", lambda *_, env, **__: environments.append(env) or DONE)
    for job in ("", "7"):
        monkeypatch.setattr(os, "environ", {**os.environ, **({"SLURM_JOB_ID": job} if job else {})})
        slurm_queue.run_command(["squeue"])
    assert ["NEURON_RT_ROOT_COMM_ID" in each for each in environments] == [True, False]


DONE = subprocess.CompletedProcess([], 0, "", "")
