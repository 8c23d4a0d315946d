"""Emulated Kubernetes: the API subset the launcher uses, on loopback, with Pods as local processes.

No real API server runs where these tests do. Emulated are Jobs of completion mode Indexed with backoffLimit 0, Services and
Secrets that belong to them, and Pods with an index, a termination grace period and DNS names, which all resolve to this machine.
Bodies are checked against the schemas of Kubernetes' published API description; an unknown field is an error too.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import psutil
import yaml

from tasks.launchers.manifests import PORT
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
KINDS = {"jobs": "Job", "services": "Service", "secrets": "Secret"}
VERSION = "1.37"  # of Kubernetes, whose schemas bodies must follow
PATH = re.compile(r"/(?:api|apis/batch)/v1/namespaces/([^/]+)/(\w+)(?:/([^/]+))?")
INDEX = "batch.kubernetes.io/job-completion-index"
NAME = "batch.kubernetes.io/job-name"


class Pod:
    """A Pod, whose container is a process once the Secret that it needs exists."""

    def __init__(self, cluster: "Cluster", job: dict, index: int) -> None:
        self.cluster, self.job, self.index = cluster, job, index
        self.name = f"{job['metadata']['name']}-{index}-abcde"
        self.disrupted = False
        self.terminated: dict | None = None  # state of the ended container; None: its process's
        self.spec = job["spec"]["template"]["spec"]
        self.process = self._start() if not self._needed() - cluster.secrets.keys() else None

    def _needed(self) -> set[str]:
        (container,) = self.spec["containers"]
        return {each["secretRef"]["name"] for each in container.get("envFrom", ())}

    def _start(self) -> subprocess.Popen:
        (container,) = self.spec["containers"]
        port = self.cluster.ports.setdefault(self.job["metadata"]["name"], free_port())
        names = {f"{self.spec['subdomain']}-{each}.{self.spec['subdomain']}" for each in range(8)}
        command = []
        for part in container["command"]:
            text = part.replace("$$(", "\0").replace("$(JOB_COMPLETION_INDEX)", str(self.index))
            replaced = {str(PORT): str(port), **dict.fromkeys(names, "127.0.0.1")}
            command.append(replaced.get(text, text.replace("\0", "$(")))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": os.environ["HOME"],
            "PYTHONPATH": str(ROOT),  # the image has Trainshed installed
            "JOB_COMPLETION_INDEX": str(self.index),
            **{each["name"]: each["value"] for each in container["env"]},
        }
        for name in self._needed():
            environment |= self.cluster.secrets[name]["stringData"]
        settings = {"cwd": container["workingDir"], "env": environment, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, start_new_session=True, **settings)

    def observe(self) -> int | None:
        """Start the container if that was not possible before; returns its exit code, None while it runs."""
        if self.process is None and not self._needed() - self.cluster.secrets.keys():
            self.process = self._start()
        if self.terminated is not None:
            return self.terminated["exitCode"]
        return self.process.poll() if self.process else None

    def end(self, grace: float) -> None:
        """SIGTERM to the container's first process, SIGKILL to all after the grace time."""
        if self.process is None:
            return
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self.process.pid)
            everything = [first, *first.children(recursive=True)]
            if grace:
                first.terminate()
                psutil.wait_procs(everything, grace)
            for process in everything:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.process.wait()

    def document(self) -> dict:
        code = self.observe()
        state = (
            {"running": {}}
            if code is None
            else {"terminated": self.terminated or {"exitCode": code if code >= 0 else 128 - code}}
        )
        status = {
            "phase": "Running" if code is None else "Failed" if code else "Succeeded",
            "containerStatuses": [
                {
                    "name": "trainshed",
                    "image": "i",
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": state,
                }
            ],
            "conditions": [{"type": "DisruptionTarget", "status": "True"}] if self.disrupted else [],
        }
        metadata = {"name": self.name, "labels": {NAME: self.job["metadata"]["name"]}}
        metadata["annotations"] = {INDEX: str(self.index)}
        return {
            "metadata": metadata,
            "spec": {**self.spec, "nodeName": f"node-{self.index}"},
            "status": status,
        }


class Cluster:
    """The emulated cluster; `kubeconfig` is the path of a file that names it."""

    def __init__(self, folder: Path) -> None:
        self.jobs: dict[str, dict] = {}
        self.services: dict[str, dict] = {}
        self.secrets: dict[str, dict] = {}
        self.pods: dict[str, Pod] = {}
        self.ports: dict[str, int] = {}  # for a Job's rendezvous, since all Pods share this machine's address
        self.submitted: list[dict] = []  # Jobs, as they were sent
        self.lock = threading.RLock()
        self.unavailable = 0  # requests to answer with 503
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{self._server.server_port}"
        one = {"name": "emulated"}
        contents = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "emulated",
            "clusters": [{**one, "cluster": {"server": address}}],
            "users": [{**one, "user": {}}],
            "contexts": [{**one, "context": {"cluster": "emulated", "user": "emulated"}}],
        }
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(contents))

    def close(self) -> None:
        for name in list(self.jobs):
            self._remove(name, 0)
        self._server.shutdown()
        self._server.server_close()

    def evict(self, pod: str) -> None:
        """End a Pod as a drained node does."""
        self.pods[pod].disrupted = True
        self.pods[pod].end(0)

    def terminate(self, pod: str, **state: object) -> None:
        """End a Pod, whose container gets this state."""
        self.pods[pod].terminated = state
        self.pods[pod].end(0)

    def request(self, method: str, path: str, query: dict, body: dict | None) -> tuple[int, dict]:
        """Answer a request: status and document."""
        _, kind, name = PATH.fullmatch(path).groups()
        with self.lock:
            if self.unavailable:
                self.unavailable -= 1
                return 503, {}
            known = getattr(self, kind)
            if method == "POST":
                return self._create(kind, known, body)
            if name is None:
                selector = query.get("labelSelector", [""])[0]
                return 200, {"items": [each for each in self._documents(kind) if _matches(each, selector)]}
            if name not in known:
                return 404, {}
            if method == "GET":
                return 200, next(each for each in self._documents(kind) if each["metadata"]["name"] == name)
            grace = float(query.get("gracePeriodSeconds", ["30"])[0])
        if kind == "pods":
            threading.Thread(target=self._remove_pod, args=(name, grace), daemon=True).start()
        else:
            threading.Thread(target=self._remove, args=(name, grace), daemon=True).start()
        return 200, {}

    def _create(self, kind: str, known: dict, body: dict) -> tuple[int, dict]:
        assert body["kind"] == KINDS[kind]
        kubernetes_validate.validate(body, VERSION, strict=True)
        name = body["metadata"]["name"]
        if name in known:
            return 409, {}
        assert len(name) + 3 <= 63  # Pods' host names
        if kind == "jobs":
            self.submitted.append(json.loads(json.dumps(body)))
            assert body["spec"]["completionMode"] == "Indexed"
            body["metadata"]["uid"] = str(uuid.uuid4())
        else:
            (owner,) = body["metadata"]["ownerReferences"]
            assert owner["uid"] == self.jobs[owner["name"]]["metadata"]["uid"]
        known[name] = body
        if kind == "jobs":
            for index in range(body["spec"]["completions"]):
                pod = Pod(self, body, index)
                self.pods[pod.name] = pod
        return 201, body

    def _documents(self, kind: str) -> list[dict]:
        if kind == "pods":
            return [pod.document() for pod in list(self.pods.values())]
        if kind == "jobs":
            return [{**job, "status": self._status(name)} for name, job in list(self.jobs.items())]
        return list(getattr(self, kind).values())

    def _status(self, name: str) -> dict:
        """Status of a Job: the first failed Pod fails it and ends the others."""
        pods = [pod for pod in list(self.pods.values()) if pod.job["metadata"]["name"] == name]
        codes = [pod.observe() for pod in pods]
        if any(codes):
            for pod in pods:
                pod.end(0)
            failed = {
                "type": "Failed",
                "status": "True",
                "reason": "BackoffLimitExceeded",
                "message": "failed",
            }
            return {"conditions": [failed]}
        done = pods and all(code == 0 for code in codes)
        return {"conditions": [{"type": "Complete", "status": "True"}]} if done else {"active": len(pods)}

    def _remove(self, name: str, grace: float) -> None:
        """Delete a Job with what belongs to it."""
        with self.lock:
            if (job := self.jobs.get(name)) is None:
                return  # deleted twice
            job["metadata"]["deletionTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for pod in [pod.name for pod in list(self.pods.values()) if pod.job["metadata"]["name"] == name]:
            self._remove_pod(pod, grace)
        for each in (self.jobs, self.services, self.secrets):
            each.pop(name, None)

    def _remove_pod(self, name: str, grace: float) -> None:
        if pod := self.pods.get(name):
            pod.end(grace)
            self.pods.pop(name, None)

    def _handler(cluster) -> type:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                address = urlsplit(self.path)
                try:
                    status, document = cluster.request(
                        self.command, address.path, parse_qs(address.query), body
                    )
                except Exception as error:
                    status, document = 400, {"message": repr(error)}
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_) -> None:
                pass

        return Handler


def _matches(document: dict, selector: str) -> bool:
    labels = document["metadata"].get("labels", {})
    wanted = (term.split("=", 1) for term in selector.split(",") if term)
    return all(labels.get(key) == value for key, value in wanted)
