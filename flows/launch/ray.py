"""Launcher `ray`: submits, observes and stops a stage's job by the jobs API of a Ray cluster, which is plain HTTP.

The job is one command on one node, which sees the home, this code and this Python environment under the same paths. Ray
is not imported. Its records hold no variable of the user's.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flows.launch import local
from flows.launch.cluster_job import (
    Cluster,
    Failed,
    Finished,
    Interrupted,
    JobFolder,
    JobOrder,
    JobOutcome,
    Running,
    Waiting,
)
from flows.launch.network import Rendezvous
from stages.core.errors import RecipeError, ResourceError, StageCrashError, TransientError
from stages.core.launchers.ray import RayOptions
from stages.core.redaction import quoted, shortened
from stages.remote.http import Answer, AnswerModel, Expected, ask_httpx, httpx_client

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
ADDRESS = re.compile(r"https?://[^/?#@\s]+")
KEY_VARIABLE = "RAY_AUTH_TOKEN"
KEY_FILE = Path(".ray") / "auth_token"
"""Path of the file, below the user's home, into which `ray get-auth-token --generate` writes the cluster's key."""
REQUEST_TIMEOUT_S = 60.0
ANSWER_BYTES = 4 * 2**20
GRACE_S = 25
"""Seconds between SIGTERM and SIGKILL when a job is stopped; Ray's default of 3 is too few to end a checkpoint."""
CANCEL_PATIENCE_S = 35.0
POLL_INTERVAL_S = 0.5
GIB = 2**30
NOT_FOUND = 404
MESSAGE_CHARACTERS = 300
UNDER_WAY = ("PENDING", "RUNNING")
NO_ONE = "no job"
"""Owner of a work folder whose job was cancelled before it started."""
INTERRUPTIONS = {
    "JOB_SUPERVISOR_ACTOR_DIED": "the loss of its node, or of Ray's process there",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": "the loss of its node, or of Ray's process there",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": "Ray's limit for waiting (RAY_JOB_START_TIMEOUT_SECONDS of its head)",
}
"""Ray's errors after which the same job may go on elsewhere or later; its monitor calls a lost node by either name."""


class JobView(AnswerModel):
    """Status of a job as Ray shows it, in Ray's words."""

    status: Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
    message: str | None = None
    error_type: str | None = None
    driver_exit_code: int | None = None


class RayJobs:
    """Client that submits, observes and stops the Ray job of one stage, by the address and key of the environment."""

    def __init__(self, folder: JobFolder, order: JobOrder) -> None:
        self.folder = folder
        self.order = order
        self._address = os.environ.get(ADDRESS_VARIABLE, "").rstrip("/")
        if not ADDRESS.fullmatch(self._address):
            wanted = f"set {ADDRESS_VARIABLE} to the address of the head's dashboard, such as http://127.0.0.1:8265"
            raise ResourceError(f"looking for Ray: the environment names no http(s)://HOST:PORT; {wanted}")
        self._expected = Expected(f"Ray at {self._address}", ANSWER_BYTES, REQUEST_TIMEOUT_S, TransientError, _key())

    def submit(self) -> str:
        """Submit the stage as a job, under a name that no other start of it has; return the name.

        Raises `RecipeError` or `ResourceError` when Ray refuses it, `TransientError` when it does not answer.
        """
        # A name is never used twice: Ray's monitor of an ended job may bring back the record of one that is deleted.
        name = f"{self.order.job}-{os.urandom(3).hex()}"
        self.folder.claim(name)
        self._ask("submit the job", "POST", "", submission(name, self.order, self.folder)).check()
        return name

    def look(self, job_id: str) -> JobOutcome | Waiting | Running:
        return outcome(self._find(job_id), self.name_of(job_id), self.order)

    def name_of(self, job_id: str) -> str:
        return f"Ray job {job_id}"

    def cancel(self) -> bool:
        end_s, waited = time.monotonic() + CANCEL_PATIENCE_S, False
        # The latest start, the only one that may not be over.
        name = self.folder.owner() or ""
        while name.startswith(self.order.job) and (job := self._find(name)) and job.status in UNDER_WAY:
            if time.monotonic() > end_s:
                return False
            self._ask("stop the job", "POST", f"{name}/stop")
            if job.status == "PENDING":
                if waited:
                    return True
                # Ray stops a job on its node only, where `node_task` now sees that this one is not wanted.
                self.folder.claim(NO_ONE)
                waited = True
            time.sleep(POLL_INTERVAL_S)
        return True

    def _find(self, name: str) -> JobView | None:
        """Return a job as Ray has it; None when it does not exist."""
        answer = self._ask("look at the job", "GET", name)
        return None if answer.status == NOT_FOUND else answer.parsed(JobView)

    def _ask(self, doing: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send a request about a job; return the answer, unless it is a refusal that another try would get, too."""
        import httpx

        headers = {"Authorization": f"Bearer {self._expected.key}"} if self._expected.key else {}
        try:
            with httpx_client(timeout=REQUEST_TIMEOUT_S) as client:
                url = f"{self._address}/api/jobs/{path}"
                answer = ask_httpx(client, self._expected, method, url, headers=headers, json=body)
        except (httpx.TransportError, TimeoutError) as error:
            raise TransientError(f"{self._expected.server} does not answer, asked to {doing}: {error}") from error
        if answer.status in (401, 403):
            remedy = f"put the cluster's key into {KEY_VARIABLE} or ~/{KEY_FILE} (`ray get-auth-token`)"
            raise ResourceError(f"{self._expected.server} does not let us {doing}: {answer.status}; {remedy}")
        if answer.status == 400:
            # Ray sends a traceback, whose last line is the message.
            reason = self._expected.quoted((answer.body.strip().splitlines() or [b""])[-1])
            raise RecipeError(f"{self._expected.server} refused to {doing}: {reason}; see execution.ray of the stage")
        return answer


def submission(name: str, order: JobOrder, folder: JobFolder) -> dict[str, Any]:
    """Return the request that submits a stage's job: its command on the node, and the resources that it takes there."""
    asked = order.block(RayOptions)
    # -P: the folder in which Ray starts the command must not hold our packages.
    program = [sys.executable, "-P", "-m", "flows.launch.node_task", str(folder.path), name]
    request = {
        "submission_id": name,
        "entrypoint": shlex.join(["exec", "env", f"PYTHONPATH={local.code_folder()}", *program]),
        "entrypoint_num_cpus": asked.cpus_per_node or order.cores_per_node,
        "entrypoint_num_gpus": asked.gpus_per_node,
        "entrypoint_memory": asked.memory_gib_per_node and round(asked.memory_gib_per_node * GIB),
        "entrypoint_resources": asked.resources,
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S)}},
    }
    return {name: value for name, value in request.items() if value}


def outcome(job: JobView | None, name: str, order: JobOrder) -> JobOutcome | Waiting | Running:
    """Return a job's state from what Ray shows of it; None when Ray does not know it."""
    if job is None:
        return Interrupted("a restart of the Ray cluster, which knows nothing of it any more")
    if job.status == "PENDING":
        return Waiting(shortened(job.message or job.status, MESSAGE_CHARACTERS))
    if job.status == "RUNNING":
        return Running()
    if job.status == "SUCCEEDED":
        return Finished(0)
    if job.status == "STOPPED":
        stopped = f"{name} of {order.stage} was stopped by somebody else"
        return Failed(StageCrashError(f"{stopped}; run again to continue from the last checkpoint"))
    if (code := job.driver_exit_code) is not None:
        return Finished(code if code >= 0 else 128 - code)
    if job.error_type in INTERRUPTIONS:
        return Interrupted(INTERRUPTIONS[job.error_type])
    reason = f"{job.error_type}: {quoted(job.message or '', MESSAGE_CHARACTERS)}"
    return Failed(StageCrashError(f"{name} of {order.stage} failed before its first process ran: {reason}"))


def way_in() -> str | None:
    """Return a text for `lifecycle doctor` that names the cluster's address; None where the environment has none."""
    address = os.environ.get(ADDRESS_VARIABLE, "").rstrip("/")
    return f"jobs are submitted to {address}" if ADDRESS.fullmatch(address) else None


def _key() -> str:
    file = Path.home() / KEY_FILE
    return os.environ.get(KEY_VARIABLE) or (file.read_text().strip() if file.is_file() else "")


def _rendezvous(environment: Mapping[str, str]) -> Rendezvous:
    raise AssertionError("a job of Ray has one node")


CLUSTER = Cluster(
    connect=RayJobs,
    environment=local.user_environment,
    place=_rendezvous,
    way_in=way_in,
    collects_output=False,  # Ray keeps the output in files of the node
    records_end=False,
)
