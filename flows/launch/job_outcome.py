"""What a look at a cluster's job says: it waits, it runs, its stage goes on in another job, is done, or has failed."""

from __future__ import annotations

from dataclasses import dataclass

from stages.core.errors import LifecycleError


@dataclass(frozen=True)
class Waiting:
    """The job does not run yet, in the cluster's words: `Priority`, `0/4 nodes are available`."""

    reason: str


@dataclass(frozen=True)
class Running:
    """It runs, or is about to, or has just ended; there is nothing to report."""


@dataclass(frozen=True)
class Interrupted:
    """The job is over, the stage is not: another job continues from the last checkpoint. `by`: what ended the job."""

    by: str
    by_time_limit: bool = False


@dataclass(frozen=True)
class Finished:
    """The stage's processes ended by themselves; what they left says the rest."""

    exit_code: int


@dataclass(frozen=True)
class Failed:
    """The cluster ended the stage."""

    error: LifecycleError


JobOutcome = Interrupted | Finished | Failed
