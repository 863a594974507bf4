"""Program that submits a stage as a job to a cluster and follows the job until the stage has ended.

python -m flows.launch.agent WORK_FOLDER

It runs on the refresh's machine, under the supervisor, where a local stage's own process would run: whatever ends the
refresh ends this program too, which cancels the job. It exits with the stage's exit code. A job that was preempted,
lost a node or reached its time limit is submitted again; the stage continues from its last checkpoint.
"""

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from flows.launch.cluster import CLUSTERS
from flows.launch.cluster_job import Failed, Finished, Interrupted, JobFolder, JobOrder, JobOutcome, Jobs, Waiting
from flows.launch.failures import INTERRUPTED, leave_error
from flows.launch.through_bucket import JobMirror, insist
from stages.core.errors import LifecycleError, RefreshStoppedError, StageCrashError, StageTimeoutError, TransientError
from stages.core.metric_series import metrics_size
from stages.core.supervised import was_killed

TICK_S = 0.5
TICKS_PER_LOOK = 10
"""Ticks of 0.5 s between heartbeats and between queries, which are rare, since all users share the controller."""
COMPLETING_PATIENCE_TICKS = 60
"""Ticks of 0.5 s that a cluster may take to report a job's end: a dead node keeps the job in COMPLETING."""


class Agent:
    """Follower of one stage's cluster jobs, which submits another job after an interruption.

    check: called during transfers; raises once this program is asked to end.
    """

    def __init__(
        self, folder: JobFolder, order: JobOrder, jobs: Jobs, mirror: JobMirror | None, check: Callable[[], None]
    ) -> None:
        self.folder = folder
        self.order = order
        self.jobs = jobs
        self.mirror = mirror
        self.check = check
        self._last_message = ""
        self._num_fruitless = 0

    def run(self) -> int:
        """Submit jobs until one ends the stage; return its exit code, or raise its error if the cluster ended it."""
        while True:
            # Steps that are repeated after a checkpoint are not logged again, so the file grows only with progress.
            before = metrics_size(self.order.work)
            if self.mirror:
                self.mirror.send(self.check)
            job_id = self.jobs.submit()
            ended = self._follow(job_id)
            if isinstance(ended, Interrupted) or ended == Finished(INTERRUPTED):
                # Nothing of it may be left: the next job has the same name and the same work folder.
                self.jobs.cancel()
            if self.mirror:
                # Only now: in its grace period the job has sent its last checkpoint.
                insist(self._fetch)
            end = self.folder.end(job_id)
            if isinstance(ended, Interrupted) and end and end.exit_code == 0:
                ended = Finished(0)  # the stage was done before its pod went
            elif isinstance(ended, Finished) and not end:
                ended = self._unexplained(job_id, ended)
            if isinstance(ended, Finished):
                return ended.exit_code
            if isinstance(ended, Failed):
                raise ended.error
            self._go_on(job_id, ended, progressed=metrics_size(self.order.work) > before)

    def _follow(self, job_id: str) -> JobOutcome:
        """Wait for a job's end and return its outcome; query it every tick once its processes ended, rarely before."""
        num_ticks_finished = 0
        for tick in itertools.count():
            if tick % TICKS_PER_LOOK == 0:
                self._beat()
            end = self.folder.end(job_id)
            num_ticks_finished += bool(end and end.exit_code is not None)
            # Looking costs the cluster's controller, so until the processes have ended it is rare.
            if num_ticks_finished or tick % TICKS_PER_LOOK == 0:
                ended = self._look(job_id)
                if ended:
                    return ended
            if num_ticks_finished > COMPLETING_PATIENCE_TICKS and end and end.exit_code is not None:
                return Finished(end.exit_code)
            time.sleep(TICK_S)
        raise AssertionError("itertools.count has an end")

    def _beat(self) -> None:
        """Give the job a sign of life, and take what it has sent."""
        self.folder.beat()
        try:
            self._fetch()
        except TransientError as error:
            self._say("warning", f"{error}; trying again")

    def _fetch(self) -> None:
        if self.mirror:
            self.mirror.fetch(self.check)

    def _unexplained(self, job_id: str, ended: Finished) -> JobOutcome:
        """Return the outcome of a job whose program left no end of the stage."""
        code = ended.exit_code
        if code == INTERRUPTED:
            return Interrupted("a request to end, or for want of heartbeats")
        if self.mirror is None:
            return ended
        message = (
            f"{self.jobs.name_of(job_id)} of {self.order.stage} exited with {code}, and left no end of the stage in "
            f"{self.order.through}; check that its image holds this version of the program and the package obstore, "
            f"and that execution.{self.order.launcher}.secrets names the bucket's credentials"
        )
        if code == TransientError.exit_code:
            return Failed(TransientError(message))
        return Failed(StageCrashError(message, died=was_killed(code)))

    def _look(self, job_id: str) -> JobOutcome | None:
        """Return a job's outcome; None while it runs or waits, when it reports each new reason to wait."""
        try:
            state = self.jobs.look(job_id)
        except TransientError as error:
            self._say("warning", f"{error}; asking again")
            return None
        if isinstance(state, Waiting):
            self._say("milestone", f"{self.jobs.name_of(job_id)} waits: {state.reason}")
        return state if isinstance(state, JobOutcome) else None

    def _say(self, event: Literal["milestone", "warning"], message: str) -> None:
        """Report a milestone or a warning about a cluster job to the refresh, unless it equals the previous message."""
        if message != self._last_message:
            self._last_message = message
            self.folder.report(event, message)

    def _go_on(self, job_id: str, ended: Interrupted, *, progressed: bool) -> None:
        """Report that an interrupted stage is submitted again.

        Raises `StageTimeoutError` or `TransientError` when the stage makes no progress from job to job.
        """
        what = f"{self.jobs.name_of(job_id)} of {self.order.stage} was ended by {ended.by}"
        if ended.by_time_limit and not progressed:
            field = f"execution.{self.order.launcher}.time_limit"
            remedy = f"raise {field}, or save more often (execution.checkpoint_every_steps)"
            raise StageTimeoutError(f"{what}, and the stage had got no further than before; {remedy}")
        self._num_fruitless = 0 if progressed else self._num_fruitless + 1
        if self._num_fruitless > self.order.interruptions_without_progress:
            raise TransientError(f"{what}; {self._num_fruitless} jobs in a row got no further than the ones before")
        self._say("milestone", f"{what}; submitting it again, to continue from its last checkpoint")


def main() -> int:
    """Submit a stage's work folder as a cluster job, follow the job to its end, and leave no job in the cluster."""
    work = Path(sys.argv[1])
    folder = JobFolder.of(work)
    order = folder.order()
    assert order, f"no order in {folder.path}"
    stage, stop, is_over = order.stage, threading.Event(), threading.Event()

    def end(number: int, _: object) -> None:
        stop.set()  # for transfers, which run in other threads
        sys.exit(128 + number)  # an exit by exception, so that `finally` cancels the job

    def check() -> None:
        if stop.is_set():
            raise RefreshStoppedError(f"{stage} was stopped between the bucket and this machine")

    signal.signal(signal.SIGTERM, end)
    jobs: Jobs | None = None
    mirror: JobMirror | None = None
    pulse: threading.Thread | None = None
    try:
        if order.through:
            mirror = JobMirror(order)
            pulse = threading.Thread(target=mirror.beat, args=[is_over], daemon=True)
            pulse.start()
        jobs = CLUSTERS[order.launcher].connect(folder, order)
        return Agent(folder, order, jobs, mirror, check).run()
    except LifecycleError as error:
        return leave_error(work, error)
    finally:
        # A second request must not cut the cancellation short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        folder.forget_environment()
        if jobs:
            _cancel(jobs, folder, order)
        if mirror and pulse:
            is_over.set()
            pulse.join()
            # What cannot be fetched stays in the bucket, whose garbage collection takes it.
            with suppress(LifecycleError):
                mirror.fetch()
                mirror.close()


def _cancel(jobs: Jobs, folder: JobFolder, order: JobOrder) -> None:
    """Cancel the stage's cluster jobs; warn if one may be left, which ends without the agent's heartbeats."""
    try:
        if jobs.cancel():
            folder.close()
        else:
            print(f"warning: the cluster still keeps the job {order.job}, which was cancelled", flush=True)
    except LifecycleError as error:
        print(f"warning: the job {order.job} may be left in the cluster: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
