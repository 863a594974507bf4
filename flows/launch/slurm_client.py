"""Slurm's commands: submit, look, cancel. They get a clean environment: no secret of ours reaches Slurm's records."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stages.core.errors import RecipeError, ResourceError, TransientError

COMMAND_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.5
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF", "KRB5CCNAME")
UNREACHABLE = re.compile(r"unable to contact|timed out|connection refused|try again|temporarily", re.IGNORECASE)
FIELDS = ("JobState", "Reason", "NodeList", "Restarts", "ExitCode")


@dataclass(frozen=True)
class JobView:
    """A job as Slurm sees it: `state` and `reason` are Slurm's words."""

    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: str


def submit(arguments: Sequence[str]) -> str:
    """Submit a batch script; returns the id of the job.

    Raises `RecipeError` when Slurm refuses it, `TransientError` when Slurm does not answer.
    """
    try:
        said = _run("sbatch", "--parsable", *arguments)
    except _RefusedError as error:
        remedy = "see execution.slurm of the stage, and `sinfo` for what there is"
        raise RecipeError(f"Slurm refused the job: {error}; {remedy}") from error
    return said.strip().partition(";")[0]


def look(job_id: str) -> JobView | None:
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


def cancel(job_name: str, patience_s: float) -> bool:
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
    """What the program prints. Raises `_RefusedError` with its complaint, or what `submit` says."""
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
