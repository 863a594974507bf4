"""Base of the environments that others lead: a server, or a program of the author's, whose episodes may fail."""

import threading
from typing import Annotated, Literal

from pydantic import Field

from stages.core.errors import DataError
from stages.rollouts.environments.environment import Environment, EnvironmentConfig, Step

MOST_FAILURES = 20
"""Number of failures of episodes without a success between them, after which the stage ends."""
NumTogether = Annotated[int, Field(ge=1, le=256)]


class LedEnvironment(EnvironmentConfig):
    """Base class of the configs, whose episodes share nothing but bounds: a session or a process is of one episode."""

    num_together: NumTogether

    @property
    def writes(self) -> tuple[Literal["tool", "user"], ...]:
        return ("user",)

    @property
    def num_threads(self) -> int:
        return self.num_together

    @property
    def most_together(self) -> int:
        return self.num_together


class Failures:
    """Counter of the failures of episodes, in a row. leader: what leads them. remedy: what people should do then."""

    def __init__(self, leader: str, remedy: str) -> None:
        self._leader, self._remedy = leader, remedy
        self._count, self._lock = 0, threading.Lock()

    def succeeded(self) -> None:
        with self._lock:
            self._count = 0

    def failed(self, reason: str) -> Step:
        """Count a failure, and return the step that ends its episode; raise DataError after too many."""
        with self._lock:
            self._count += 1
            count = self._count
        if count >= MOST_FAILURES:
            raise DataError(
                f"{self._leader} failed {count} episodes in a row, the last since it {reason}; {self._remedy}"
            )
        return Step((), failure=f"{self._leader} {reason}")


class LedEpisode(Environment):
    """Episode of such an environment, which a failure ends without a further reward."""

    def __init__(self, failures: Failures) -> None:
        """Create the episode. failures: counter of its environment's."""
        self._failures = failures
        self._has_failed = False

    def _failed(self, reason: str) -> Step:
        self._has_failed = True
        return self._failures.failed(reason)

    @property
    def metrics(self) -> dict[str, float]:
        return {"environment_failed": float(self._has_failed)}
