"""KubernetesLauncher on an emulated API server: several nodes, lost nodes, outages, manifests."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from profiles import resolve
from profiles.errors import ProfileError
from profiles.files import exit_codes
from tasks.launchers import Job, create, execute, manifests
from tasks.launchers.base import Unavailable
from tasks.launchers.conformance import SECRET, facts, wait
from tests.tasks.launchers.test_conformance import SETTINGS

pytestmark = pytest.mark.slow


@pytest.fixture
def launcher(cluster):
    return create(resolve.load("tiny", SETTINGS).cluster)


def waiting(folder: Path, **options) -> Job:
    return Job("work", "tasks.launchers.conformance_job", (str(folder),), folder / "logs", **options)


def test_nodes_of_a_job_rendezvous_at_the_first_one(cluster, launcher, tmp_path):
    (tmp_path / "finish").touch()
    job = waiting(tmp_path, nodes=2, processes=1, threads=1)
    execute(launcher, job, timeout=120)
    assert [facts(tmp_path, rank=rank)["world_size"] for rank in (0, 1)] == ["2", "2"]
    assert "[rank 1] rank 1 runs\n" in job.log_file.read_text()
    assert cluster.services.keys() == cluster.jobs.keys()


def test_lost_node_is_the_cause_of_the_failure(cluster, launcher, tmp_path):
    handle = launcher.submit(waiting(tmp_path))
    facts(tmp_path, 120)
    cluster.evict(f"{handle.identifier}-0-abcde")
    wait(lambda: not launcher.poll(handle).running, 120)
    failure = launcher.failure(handle, launcher.poll(handle))
    assert f"{handle.identifier}-0-abcde on node-0 was evicted, or its node failed" in str(failure)


ROOT_CAUSE = "Root Cause:\n  time : 2026-01-01_00:00:00\n  rank : 1\n  exitcode : {}\n"
STOPPED = {"exitCode": 143, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
FAILED = {"exitCode": 3, "reason": "Error", "finishedAt": "2026-01-01T00:00:02Z"}
FAILED_LATER = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:04Z"}
OOM_KILLED = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:03Z"}


@pytest.mark.parametrize(
    ("first", "second", "cause", "code", "message"),
    [
        (STOPPED, FAILED, None, 3, "ended with exit code 3"),
        (FAILED_LATER, FAILED, None, 3, "ended with exit code 3"),
        (FAILED, OOM_KILLED, None, exit_codes.OUT_OF_MEMORY, "-1-abcde on node-1 ran out of"),
        (FAILED, OOM_KILLED, -signal.SIGKILL, exit_codes.OUT_OF_MEMORY, "-1-abcde on node-1 ran out of"),
        (FAILED, OOM_KILLED, exit_codes.HUNG, exit_codes.HUNG, "rank 1 on node-1 ended with exit code 75"),
    ],
)
def test_pod_that_failed_first_or_was_oom_killed_is_the_cause(
    cluster, launcher, tmp_path, first, second, cause, code, message
):
    job = waiting(tmp_path, nodes=2, processes=1, threads=1)
    handle = launcher.submit(job)
    with cluster.lock:
        for index, state in enumerate((first, second)):
            cluster.terminate(f"{handle.identifier}-{index}-abcde", **state)
    job.log_file.write_text(ROOT_CAUSE.format(cause) if cause else "")
    failure = launcher.failure(handle, launcher.poll(handle))
    assert failure.exit_code == code
    assert message in str(failure)


def test_unreachable_api_server_does_not_end_the_job(cluster, launcher, tmp_path, caplog):
    job, calls = waiting(tmp_path), []

    def watch():
        calls.append(len(calls))
        if calls[-1] == 1:
            cluster.unavailable = 3
        if calls[-1] > 5 and cluster.unavailable == 0:
            (tmp_path / "finish").touch()

    execute(launcher, job, watch, timeout=120)
    assert sum("cannot get the job's status; retrying" in record.message for record in caplog.records) == 1


def test_unreachable_api_server_at_a_restart_is_an_outage(cluster, launcher, tmp_path):
    cluster.unavailable = 1
    with pytest.raises(Unavailable, match="list_namespaced_job: Service Unavailable"):
        execute(launcher, waiting(tmp_path))
    cluster.close()
    with pytest.raises(Unavailable, match=r"list_namespaced_job: .* Connection refused"):
        execute(launcher, waiting(tmp_path))


def test_reattaching_completes_an_interrupted_submission(cluster, launcher, tmp_path):
    job = waiting(tmp_path, secrets=(SECRET,))
    handle = launcher.submit(job)
    cluster.services.clear()
    cluster.secrets.clear()
    job.handle_file.unlink()
    assert launcher.find(job) == handle
    assert cluster.services.keys() == cluster.secrets.keys() == {handle.identifier}
    assert json.loads(job.handle_file.read_text())["identifier"] == handle.identifier
    assert launcher.submit(job) == handle  # which finds everything complete


def test_manifest_has_the_profiles_settings(cluster, tmp_path):
    profile = resolve.load("llama3-8b-h100", overrides())
    resolve.check(profile)
    launcher = create(profile.cluster)
    handle = launcher.submit(waiting(tmp_path, nodes=2, processes=8, threads=4))
    (sent,) = cluster.submitted
    launcher.cancel(handle, 0)
    assert sent["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert (sent["spec"]["completions"], sent["spec"]["parallelism"]) == (2, 2)
    pod = sent["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["image"] == "registry/trainshed:1"
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in container["env"]
    assert container["env"][-2:] == [
        {"name": "FI_PROVIDER", "value": "efa"},
        {"name": "PS1", "value": "$$(HOME)"},  # literal: Kubernetes would replace $(HOME)
    ]
    assert {"name": "store", "mountPath": "/fsx"} in container["volumeMounts"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("trainer", "high")
    assert pod["terminationGracePeriodSeconds"] == 45
    command = " ".join(container["command"])
    assert " --shutdown-timeout 45 " in command
    assert " --rdzv-conf timeout=86400 " in command  # nodes may be added one by one
    assert pod["subdomain"] == sent["metadata"]["name"]


def overrides() -> list[str]:
    settings = {
        "image": "registry/trainshed:1",
        "namespace": "research",
        "claim": "shared",
        "mount": "/fsx",
        "queue": "team",
        "service_account": "trainer",
        "priority_class": "high",
        "node_selector": "[zone=a]",
        "tolerations": "[nvidia.com/gpu]",
        "environment": "[FI_PROVIDER=efa, PS1=$(HOME)]",
    }
    return [
        "cluster.launcher=kubernetes",
        "cluster.nodes=2",
        "cluster.grace=45",
        *(f"cluster.kubernetes.{key}={value}" for key, value in settings.items()),
    ]


@pytest.mark.parametrize(("log", "code"), [("missing/log", 1), ("log", 3)])
def test_log_that_cannot_be_opened_does_not_count_as_rejected_input(tmp_path, log, code):
    command = ["/bin/sh", "-c", manifests.SHELL, "-", str(tmp_path / log), "", "sh", "-c", "exit 3"]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == code


def test_incomplete_settings_and_unknown_launchers_are_rejected(monkeypatch, tmp_path):
    for changes, message in (
        (
            ["cluster.launcher=kubernets"],
            "cluster.launcher = kubernets: is not one of the choices: .* nearest valid: kubernetes",
        ),
        (["cluster.launcher=kubernetes"], "cluster.kubernetes.image: is missing"),
        (
            [*SETTINGS, "cluster.kubernetes.mount=store"],
            "cluster.kubernetes.mount = store: is not an absolute path",
        ),
    ):
        with pytest.raises(ProfileError, match=message):
            resolve.check(resolve.load("tiny", changes))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ProfileError, match="no Kubernetes cluster is configured here"):
        create(resolve.load("tiny", SETTINGS).cluster)
