"""The jobs of one stage in Slurm, and what Slurm's words for them mean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.launch import local
from flows.launch.cluster_job import (
    Failed,
    Finished,
    Interrupted,
    JobEnd,
    JobFolder,
    JobOrder,
    JobOutcome,
    Running,
    Waiting,
)
from flows.store.content import LOG_FILE
from stages.core.errors import (
    LifecycleError,
    RecipeError,
    ResourceError,
    StageCrashError,
    StageTimeoutError,
    TransientError,
)
from stages.core.supervised import was_killed

COMMAND_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.5
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF", "KRB5CCNAME")
UNREACHABLE = re.compile(r"unable to contact|timed out|connection refused|try again|temporarily", re.IGNORECASE)
FIELDS = ("JobState", "Reason", "NodeList", "Restarts", "ExitCode")
SCRIPT = Path(__file__).with_name("slurm_job.sh")
CANCEL_PATIENCE_S = 30.0
INTERRUPTIONS = {
    "TIMEOUT": "its time limit",
    "PREEMPTED": "a preemption",
    "NODE_FAIL": "the failure of a node",
    "BOOT_FAIL": "the failure of a node to boot",
}
KILLED = frozenset({"CANCELLED", "REVOKED", "OUT_OF_MEMORY", "DEADLINE"})
OVER = frozenset({"COMPLETED", "FAILED", *INTERRUPTIONS, *KILLED})
"""States of Slurm in which a job will never run again."""


class SlurmJobs:
    """Submits the jobs of an order, one after another, looks at them, and cancels them."""

    def __init__(self, folder: JobFolder, order: JobOrder) -> None:
        self.folder = folder
        self.order = order

    def submit(self) -> str:
        """Returns the id of the job. Raises what `_submit` raises."""
        return _submit(sbatch_arguments(self.order, self.folder))

    def look(self, job_id: str) -> JobOutcome | Waiting | Running:
        """Raises `TransientError` when Slurm does not answer."""
        view = _look(job_id)
        if view is None or view.state in OVER:
            return outcome(view, self.folder.end(job_id), self.order, job_id)
        if view.state in ("PENDING", "REQUEUED") and view.reason != "None":
            return Waiting(f"{view.reason}, after {view.restarts} restarts" if view.restarts else view.reason)
        return Running()

    def name_of(self, job_id: str) -> str:
        """For people."""
        return f"Slurm job {job_id}"

    def cancel(self) -> bool:
        """Returns whether no job is left. Raises `TransientError` when Slurm does not answer."""
        return _cancel(self.order.job, CANCEL_PATIENCE_S)


def sbatch_arguments(order: JobOrder, folder: JobFolder) -> list[str]:
    """Options, script and its arguments. No environment is handed to Slurm, which would keep it in its records."""
    asked = order.slurm
    options = {
        "job-name": order.job,
        "chdir": str(order.work),
        "output": str(order.work / LOG_FILE).replace("%", "%%"),
        "open-mode": "append",
        "export": "NONE",
        "nodes": order.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": asked.cpus_per_node or order.cores_per_node,
        "signal": f"B:TERM@{asked.warning_s}",
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "time": asked.time_limit,
        "gpus-per-node": asked.gpus_per_node,
        "mem": asked.memory_gib_per_node and f"{round(asked.memory_gib_per_node * 1024)}M",
    }
    script = [SCRIPT, sys.executable, local.code_folder(), folder.path, os.environ.get("PATH", os.defpath)]
    chosen = [f"--{name}={value}" for name, value in options.items() if value]
    return ["--requeue", *chosen, *asked.options, *map(str, script)]


def outcome(view: JobView | None, end: JobEnd | None, order: JobOrder, job_id: str) -> JobOutcome:
    """view: the ended job, None when Slurm has forgotten it. end: what its batch step noted, if it could."""
    if view and view.state in INTERRUPTIONS:
        return Interrupted(INTERRUPTIONS[view.state], by_time_limit=view.state == "TIMEOUT")
    if view and view.state in KILLED:
        return Failed(_error_of(view, order, job_id))
    if end and end.exit_code is not None:
        return Finished(end.exit_code)
    if end:  # it got SIGTERM, and nobody else cancelled it
        return Interrupted(INTERRUPTIONS["TIMEOUT"], by_time_limit=True)
    return Failed(_unexplained(view, order, job_id))


def _error_of(view: JobView, order: JobOrder, job_id: str) -> LifecycleError:
    job = f"Slurm job {job_id} of {order.stage}"
    if view.state in ("CANCELLED", "REVOKED"):
        return StageCrashError(
            f"{job} was cancelled by somebody else (scancel); run again to continue from the last checkpoint"
        )
    if view.state == "OUT_OF_MEMORY":
        remedy = "raise execution.slurm.memory_gib_per_node, or lower layout.micro_batch_size"
        return ResourceError(f"{job} took more memory than it had asked for on {view.nodes}; {remedy}")
    return StageTimeoutError(f"{job} could not end before its deadline; see the options of execution.slurm")


def _unexplained(view: JobView | None, order: JobOrder, job_id: str) -> LifecycleError:
    signal_number = int(view.exit_code.partition(":")[2] or 0) if view else 0  # Slurm writes CODE:SIGNAL
    if view and was_killed(-signal_number):
        what = f"the batch step of Slurm job {job_id} of {order.stage} was killed by signal {signal_number}"
        return StageCrashError(f"{what} on {view.nodes}; run again to continue from the last checkpoint", died=True)
    state = f"ended as {view.state} ({view.reason}, exit code {view.exit_code})" if view else "is unknown to Slurm"
    return StageCrashError(
        f"Slurm job {job_id} of {order.stage} {state} before its first process ran; check that the nodes "
        f"see {order.work} and this Python environment under the same paths"
    )


@dataclass(frozen=True)
class JobView:
    """A job as Slurm sees it: `state` and `reason` are Slurm's words."""

    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: str


def _submit(arguments: Sequence[str]) -> str:
    """Submit a batch script; returns the id of the job.

    Raises `RecipeError` when Slurm refuses it, `TransientError` when Slurm does not answer.
    """
    try:
        said = _run("sbatch", "--parsable", *arguments)
    except _RefusedError as error:
        remedy = "see execution.slurm of the stage, and `sinfo` for what there is"
        raise RecipeError(f"Slurm refused the job: {error}; {remedy}") from error
    return said.strip().partition(";")[0]


def _look(job_id: str) -> JobView | None:
    """The job; None when Slurm has forgotten it, which it does some minutes after its end."""
    try:
        return parse_job(_run("scontrol", "show", "job", job_id, "--oneliner"))
    except _RefusedError:
        return None


def parse_job(line: str) -> JobView:
    """What `scontrol show job --oneliner` prints."""
    found = {name: match[1] for name in FIELDS if (match := re.search(rf"(?:^| ){name}=(\S*)", line))}
    return JobView(
        state=found["JobState"],
        reason=found["Reason"],
        nodes="" if found.get("NodeList") == "(null)" else found.get("NodeList", ""),
        restarts=int(found.get("Restarts", "0")),
        exit_code=found.get("ExitCode", "0:0"),
    )


def _cancel(job_name: str, patience_s: float) -> bool:
    """Cancel all jobs of this name. Returns whether none of them is left after at most `patience_s`."""
    end_s = time.monotonic() + patience_s
    while jobs := _run("squeue", "--noheader", f"--name={job_name}", "--format=%i").split():
        _run("scancel", "--quiet", *jobs)
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


class _RefusedError(Exception):
    """Slurm answered, and said no."""


def _run(program: str, *arguments: str) -> str:
    """What the program prints. Raises `_RefusedError` with its complaint, or what `_submit` says."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    try:
        ended = subprocess.run(
            [program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        remedy = "run this on a login node of the cluster, or use another launcher"
        raise ResourceError(f"looking for Slurm: there is no program `{program}` here; {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise TransientError(f"Slurm did not answer `{program}` within {COMMAND_TIMEOUT_S:g} s") from error
    if ended.returncode == 0:
        return ended.stdout
    complaint = " ".join(ended.stderr.split())
    if UNREACHABLE.search(complaint):
        raise TransientError(f"Slurm does not answer: {complaint}")
    raise _RefusedError(complaint)
