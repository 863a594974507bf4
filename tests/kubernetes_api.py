"""Stand-in for a Kubernetes API server and its nodes: pods of Jobs run as processes on this machine.

It speaks what the launcher uses: create, get and delete of namespaced objects, lists by label, Kueue's Workloads, over
HTTP with a bearer token. No cluster can run beside these tests; the published schemas show which manifests a real one
accepts.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.http_server import LoopbackServer

TOKEN = "token-of-the-test"
Tree = dict[str, Any]


class Cluster:
    """State of the stand-in for Kubernetes: its API objects, and the local process that runs each pod.

    own_disk: folder that is empty for every pod, in place of what this machine has there, and goes with the pod.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Tree] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.conditions: dict[str, list[Tree]] = {}
        self.schedulable = True
        self.own_disk: Path | None = None
        self.queued: str | None = None
        self.lock = threading.Lock()

    def create(self, collection: str, manifest: Tree) -> Tree:
        with self.lock:
            self.objects[collection, manifest["metadata"]["name"]] = manifest
            if manifest["kind"] == "Job" and self.schedulable and not self.queued:
                self._run_pods(manifest)
        return manifest

    def admit(self) -> None:
        """Resume the jobs that wait in the queue, as Kueue does when their quota is free."""
        with self.lock:
            self.queued = None
            for name in self.jobs():
                self._run_pods(next(job for (_, known), job in self.objects.items() if known == name))

    def workloads(self) -> list[Tree]:
        """Return Kueue's Workloads of the waiting jobs; `queued` is the message of their missing quota."""
        missing = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": self.queued}
        return [{"spec": {"queueName": "research"}, "status": {"conditions": [missing]}}] if self.queued else []

    def read(self, collection: str, name: str) -> Tree | None:
        with self.lock:
            found = self.objects.get((collection, name))
            return {**found, "status": self._status(found)} if found else None

    def delete(self, collection: str, name: str) -> Tree | None:
        with self.lock:
            found = self.objects.pop((collection, name), None)
            if found and found["kind"] == "Job":
                self.end_pods(name)
        return found

    def pods(self, job: str) -> list[Tree]:
        with self.lock:
            return [self._pod(name) for name in self.processes if name.startswith(job)] or self._unscheduled(job)

    def end_pods(self, job: str) -> None:
        for name in [name for name in self.processes if name.startswith(job)]:
            process = self.processes.pop(name)
            process.terminate()
            process.wait(30)

    def jobs(self) -> list[str]:
        return [name for (_, name), manifest in self.objects.items() if manifest["kind"] == "Job"]

    def _run_pods(self, manifest: Tree) -> None:
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        for index in range(manifest["spec"]["completions"]):
            plain = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
            # There is no name service here: every pod is on this machine.
            plain |= {"MASTER_ADDR": "127.0.0.1"} if "MASTER_ADDR" in plain else {}
            environment = {"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": str(index), **plain}
            environment["PYTHONPATH"] = str(Path(__file__).parents[1])
            by_reference = [variable["name"] for variable in container["env"] if "valueFrom" in variable]
            environment |= {name: os.environ[name] for name in by_reference}
            command = [sys.executable, *container["command"][1:]]
            if self.own_disk:
                hidden = f'mount -t tmpfs tmpfs {self.own_disk} && exec "$@"'
                command = ["unshare", "--map-root-user", "--mount", "sh", "-c", hidden, "sh", *command]
            self.processes[f"{manifest['metadata']['name']}-{index}"] = subprocess.Popen(command, env=environment)

    def _status(self, manifest: Tree) -> Tree:
        name = manifest["metadata"]["name"]
        codes = [process.poll() for pod, process in self.processes.items() if pod.startswith(name)]
        if self.queued:
            return {"conditions": [{"type": "Suspended", "status": "True", "message": "Job suspended"}]}
        if any(codes):
            return {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
        if codes and all(code == 0 for code in codes):
            return {"conditions": [{"type": "Complete", "status": "True"}]}
        return {}

    def _pod(self, name: str) -> Tree:
        code = self.processes[name].poll()
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        status = {"containerStatuses": [{"state": state}], "conditions": self.conditions.get(name, [])}
        return {"metadata": {"name": name}, "status": status}

    def _unscheduled(self, job: str) -> list[Tree]:
        if job not in self.jobs():
            return []
        why = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available: insufficient memory"}
        return [{"metadata": {"name": f"{job}-0"}, "status": {"phase": "Pending", "conditions": [why]}}]


@contextmanager
def running_api(folder: Path) -> Iterator[Cluster]:
    """Run the stand-in for Kubernetes' API server, and set KUBECONFIG to a file that names its address."""
    cluster = Cluster()
    server = LoopbackServer(("127.0.0.1", 0), _handler(cluster))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(json.dumps(_kubeconfig(server.server_port)))
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(config)
    try:
        yield cluster
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        cluster.end_pods("")
        os.environ.pop("KUBECONFIG")
        if before is not None:
            os.environ["KUBECONFIG"] = before


def _kubeconfig(port: int) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            refusal = cluster.refusals.get(body["kind"])
            if refusal:
                return self._answer(refusal[0], {"kind": "Status", "message": refusal[1]})
            return self._answer(201, cluster.create(self.path, body))

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path.endswith("/pods"):
                (selector,) = parse_qs(url.query)["labelSelector"]
                return self._answer(200, {"kind": "PodList", "items": cluster.pods(selector.partition("=")[2])})
            if url.path == "/apis/kueue.x-k8s.io/v1beta1/namespaces/ml/workloads":  # an older Kueue
                return self._answer(200, {"kind": "WorkloadList", "items": cluster.workloads()})
            return self._answer_object(cluster.read(*self._place(url.path)))

        def do_DELETE(self) -> None:
            return self._answer_object(cluster.delete(*self._place(urlsplit(self.path).path)))

        def _place(self, path: str) -> tuple[str, str]:
            collection, _, name = path.rpartition("/")
            return collection, name

        def _answer_object(self, found: Tree | None) -> None:
            self._answer(200 if found else 404, found or {"kind": "Status", "message": "not found"})

        def _answer(self, status: int, tree: Tree) -> None:
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                status, tree = 401, {"kind": "Status", "message": "Unauthorized"}
            content = json.dumps(tree).encode()
            with contextlib.suppress(BrokenPipeError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Suppress the server's log of requests."""

    return Handler
