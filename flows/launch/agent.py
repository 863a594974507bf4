"""Submits a stage to a cluster and follows its job to the end: the local process of a stage that runs there.

    python -m flows.launch.agent WORK_FOLDER

Runs under the supervisor like a stage's own process, so whatever ends the refresh ends this program, and this program
cancels the job. Exits like the stage. A job that was preempted, lost a node or reached its time limit is submitted
again, and continues from the stage's last checkpoint.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, Protocol

from flows.launch.cluster_job import Failed, Finished, Interrupted, JobFolder, JobOrder, JobOutcome, Running, Waiting
from flows.launch.failures import leave_error
from stages.core.errors import LifecycleError, StageTimeoutError, TransientError

TICK_S = 0.5
TICKS_PER_LOOK = 10
"""Between two questions to the cluster's controller, which serves everybody, and between two heartbeats."""
COMPLETING_PATIENCE_TICKS = 60
"""A job whose processes have ended may be kept by a node that does not answer."""


class Jobs(Protocol):
    """The jobs of one stage in some cluster."""

    def submit(self) -> str:
        """Returns the id of the job."""

    def look(self, job_id: str) -> JobOutcome | Waiting | Running:
        """Raises `TransientError` when the cluster does not answer."""

    def name_of(self, job_id: str) -> str:
        """For people."""

    def cancel(self) -> bool:
        """End every job of the stage; returns whether none is left."""


class Agent:
    """Follows one stage."""

    def __init__(self, folder: JobFolder, order: JobOrder, jobs: Jobs) -> None:
        self.folder = folder
        self.order = order
        self.jobs = jobs
        self._said = ""
        self._num_fruitless = 0

    def run(self) -> int:
        """Submit until a job ends the stage; returns the stage's exit code, or raises what the cluster did to it."""
        while True:
            before = self._num_metrics_bytes()
            job_id = self.jobs.submit()
            ended = self._follow(job_id)
            if isinstance(ended, Finished):
                return ended.exit_code
            if isinstance(ended, Failed):
                raise ended.error
            self._go_on(job_id, ended, progressed=self._num_metrics_bytes() > before)

    def _follow(self, job_id: str) -> JobOutcome:
        """Wait until the job is over; asks more often once its processes have ended."""
        num_ticks_finished = 0
        for tick in itertools.count():
            if tick % TICKS_PER_LOOK == 0:
                self.folder.beat()
            end = self.folder.end(job_id)
            num_ticks_finished += bool(end and end.exit_code is not None)
            if num_ticks_finished or tick % TICKS_PER_LOOK == 0:
                ended = self._look(job_id)
                if ended:
                    return ended
            if num_ticks_finished > COMPLETING_PATIENCE_TICKS and end and end.exit_code is not None:
                return Finished(end.exit_code)
            time.sleep(TICK_S)
        raise AssertionError("itertools.count has an end")

    def _look(self, job_id: str) -> JobOutcome | None:
        """The outcome once the job is over; until then, say what has changed. A running job speaks for itself."""
        try:
            found = self.jobs.look(job_id)
        except TransientError as error:
            self._say("warning", f"{error}; asking again")
            return None
        if isinstance(found, Waiting):
            self._say("milestone", f"{self.jobs.name_of(job_id)} waits: {found.reason}")
        return None if isinstance(found, Waiting | Running) else found

    def _say(self, event: Literal["milestone", "warning"], message: str) -> None:
        """Report it, unless it was the last thing reported."""
        if message != self._said:
            self._said = message
            self.folder.report(event, message)

    def _go_on(self, job_id: str, ended: Interrupted, *, progressed: bool) -> None:
        """Make sure that the old job is gone. Raises what is to be said when going on leads nowhere."""
        self.jobs.cancel()
        what = f"{self.jobs.name_of(job_id)} of {self.order.stage} was ended by {ended.by}"
        if ended.by_time_limit and not progressed:
            remedy = "raise execution.slurm.time_limit, or save more often (execution.checkpoint_every_steps)"
            raise StageTimeoutError(f"{what}, and the stage had got no further than before; {remedy}")
        self._num_fruitless = 0 if progressed else self._num_fruitless + 1
        if self._num_fruitless > self.order.interruptions_without_progress:
            raise TransientError(f"{what}; {self._num_fruitless} jobs in a row got no further than the ones before")
        self._say("milestone", f"{what}; submitting it again, to continue from its last checkpoint")

    def _num_metrics_bytes(self) -> int:
        """Grows when the stage gets on: steps that are done again are not logged again."""
        file = self.order.work / "metrics.jsonl"
        return file.stat().st_size if file.exists() else 0


def jobs_of(folder: JobFolder, order: JobOrder) -> Jobs:
    """The jobs of an order in the cluster that it names."""
    if order.launcher == "slurm":
        from flows.launch.slurm_jobs import SlurmJobs

        return SlurmJobs(folder, order)
    from flows.launch.kubernetes_jobs import KubernetesJobs  # its client is heavy

    return KubernetesJobs.connect(folder, order)


def main() -> int:
    """Run the stage of a work folder as a job; no job of it is left in the end."""
    work = Path(sys.argv[1])
    folder = JobFolder.of(work)
    order = folder.order()
    assert order, f"no order in {folder.path}"
    signal.signal(signal.SIGTERM, _end)
    jobs: Jobs | None = None
    try:
        jobs = jobs_of(folder, order)
        return Agent(folder, order, jobs).run()
    except LifecycleError as error:
        return leave_error(work, error)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        folder.forget_environment()
        if jobs:
            _cancel(jobs, folder, order)


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _cancel(jobs: Jobs, folder: JobFolder, order: JobOrder) -> None:
    """Without the cluster's answer the job ends itself, when it misses the heartbeat."""
    try:
        if jobs.cancel():
            folder.close()
        else:
            print(f"warning: the cluster still keeps the job {order.job}, which was cancelled", flush=True)
    except LifecycleError as error:
        print(f"warning: the job {order.job} may be left in the cluster: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
