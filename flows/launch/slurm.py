"""Launcher `slurm`: submits, observes and cancels a stage's jobs through Slurm's commands.

The commands get an environment without our variables, so that no secret reaches Slurm's records.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.launch import local
from flows.launch.cluster_job import (
    Cluster,
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
from flows.launch.network import FIRST_MACHINE, Rendezvous
from flows.store.content import LOG_FILE
from stages.core.errors import RecipeError, ResourceError, StageCrashError, StageTimeoutError, TransientError
from stages.core.launchers.slurm import SlurmOptions
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
"""Slurm's job states after which a job never runs again."""


class SlurmJobs:
    """Client that submits, observes and cancels the Slurm jobs of one stage, one job after another."""

    def __init__(self, folder: JobFolder, order: JobOrder) -> None:
        self.folder = folder
        self.order = order

    def submit(self) -> str:
        """Submit the stage as a batch script and return the id of the Slurm job.

        Raises `RecipeError` when Slurm refuses it, `TransientError` when Slurm does not answer.
        """
        try:
            output = _run("sbatch", "--parsable", *sbatch_arguments(self.order, self.folder))
        except _RefusedError as error:
            remedy = "see execution.slurm of the stage, and `sinfo` for what there is"
            raise RecipeError(f"Slurm refused the job: {error}; {remedy}") from error
        # JOB, or JOB;CLUSTER where Slurm has several clusters.
        return output.strip().partition(";")[0]

    def look(self, job_id: str) -> JobOutcome | Waiting | Running:
        try:
            view = parse_job(_run("scontrol", "show", "job", job_id, "--oneliner"))
        except _RefusedError:  # Slurm forgets a job some minutes after its end
            view = None
        if view is None or view.state in OVER:
            return outcome(view, self.folder.end(job_id), self.order, job_id)
        if view.state in ("PENDING", "REQUEUED") and view.reason != "None":
            return Waiting(f"{view.reason}, after {view.restarts} restarts" if view.restarts else view.reason)
        return Running()

    def name_of(self, job_id: str) -> str:
        return f"Slurm job {job_id}"

    def cancel(self) -> bool:
        """Cancel the stage's jobs; return whether none is left. Raises `TransientError` when Slurm does not answer."""
        end_s = time.monotonic() + CANCEL_PATIENCE_S
        # By name: a job is found, too, whose submission was killed before its id was read.
        while jobs := _run("squeue", "--noheader", f"--name={self.order.job}", "--format=%i").split():
            _run("scancel", "--quiet", *jobs)
            if time.monotonic() > end_s:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True


def sbatch_arguments(order: JobOrder, folder: JobFolder) -> list[str]:
    """Return `sbatch`'s options, batch script and its arguments, without environment, which Slurm would record."""
    asked = order.block(SlurmOptions)
    options = {
        "job-name": order.job,
        "chdir": str(order.work),
        "output": str(order.work / LOG_FILE).replace("%", "%%"),  # sbatch expands % in file names
        "open-mode": "append",  # a requeued job continues the log
        "export": "NONE",
        "nodes": order.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": asked.cpus_per_node or order.cores_per_node,
        "signal": f"B:TERM@{asked.warning_s}",  # B: to the batch step alone, which ends the stage in order
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
    """Return the outcome of a Slurm job that is over: finished, failed or interrupted.

    view: the job as Slurm shows it; None when it has forgotten the job. end: as the batch step recorded it, if it
    could.
    """
    if view and view.state in INTERRUPTIONS:
        return Interrupted(INTERRUPTIONS[view.state], by_time_limit=view.state == "TIMEOUT")
    if view and view.state in KILLED:
        return _killed(view, order, job_id)
    if end and end.exit_code is not None:
        return Finished(end.exit_code)
    if end:  # it got SIGTERM, but Slurm does not name a cancellation: only the time limit sends that
        return Interrupted(INTERRUPTIONS["TIMEOUT"], by_time_limit=True)
    return _unexplained(view, order, job_id)


def _killed(view: JobView, order: JobOrder, job_id: str) -> Failed:
    job = f"Slurm job {job_id} of {order.stage}"
    if view.state in ("CANCELLED", "REVOKED"):
        remedy = "run again to continue from the last checkpoint"
        return Failed(StageCrashError(f"{job} was cancelled by somebody else (scancel); {remedy}"))
    if view.state == "OUT_OF_MEMORY":
        remedy = "raise execution.slurm.memory_gib_per_node, or lower layout.micro_batch_size"
        return Failed(ResourceError(f"{job} took more memory than it had asked for on {view.nodes}; {remedy}"))
    return Failed(StageTimeoutError(f"{job} could not end before its deadline; see the options of execution.slurm"))


def _unexplained(view: JobView | None, order: JobOrder, job_id: str) -> Failed:
    signal_number = int(view.exit_code.partition(":")[2] or 0) if view else 0  # Slurm writes CODE:SIGNAL
    if view and was_killed(-signal_number):
        event = f"the batch step of Slurm job {job_id} of {order.stage} was killed by signal {signal_number}"
        remedy = "run again to continue from the last checkpoint"
        return Failed(StageCrashError(f"{event} on {view.nodes}; {remedy}", died=True))
    state = f"ended as {view.state} ({view.reason}, exit code {view.exit_code})" if view else "is unknown to Slurm"
    remedy = f"check that the nodes see {order.work} and this Python environment under the same paths"
    return Failed(
        StageCrashError(f"Slurm job {job_id} of {order.stage} {state} before its first process ran; {remedy}")
    )


@dataclass(frozen=True)
class JobView:
    """Status of a job as `scontrol` shows it; `state` and `reason` are Slurm's words."""

    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: str


def parse_job(line: str) -> JobView:
    """Return the status of a job from the output of `scontrol show job --oneliner`."""
    # With the space before it: `NodeList` is also the end of `ReqNodeList` and `ExcNodeList`.
    fields = {name: match[1] for name in FIELDS if (match := re.search(rf"(?:^| ){name}=(\S*)", line))}
    return JobView(
        state=fields["JobState"],
        reason=fields["Reason"],
        nodes="" if fields.get("NodeList") == "(null)" else fields.get("NodeList", ""),
        restarts=int(fields.get("Restarts", "0")),
        exit_code=fields.get("ExitCode", "0:0"),
    )


class _RefusedError(Exception):
    """Error when Slurm refuses a command, with Slurm's error message."""


def _run(program: str, *arguments: str) -> str:
    """Run one of Slurm's commands and return its output.

    Raises `_RefusedError` with its complaint, `ResourceError` without the program, `TransientError` without an answer.
    """
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


def way_in() -> str | None:
    """Return a text for `lifecycle doctor` that names the command which submits jobs; None without Slurm."""
    return (program := shutil.which("sbatch")) and f"jobs are submitted with {program}"


def rendezvous_of(environment: Mapping[str, str]) -> Rendezvous:
    """Return this node's rank and the rendezvous address, from the variables of a Slurm job step."""
    address = environment.get("MASTER_ADDR") or environment["SLURM_LAUNCH_NODE_IPADDR"]
    rank, port = int(environment["SLURM_PROCID"]), environment["MASTER_PORT"]
    return Rendezvous(rank, address, port, environment.get(FIRST_MACHINE))


CLUSTER = Cluster(
    connect=SlurmJobs,
    environment=local.user_environment,
    place=rendezvous_of,
    way_in=way_in,
    collects_output=True,
    records_end=True,  # the batch step, `slurm_batch.py`
)
