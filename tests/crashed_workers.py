"""Plugin for pytest-xdist that runs each test once though a worker crashes, and fails the test that crashed it.

pytest-xdist's own scheduler begins the crashed test again in each new worker, up to sixteen times, and may give a new
worker nothing but tests that have run: then the run never ends.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class FilesAfterCrashes(LoadFileScheduling):
    """Scheduler of whole test files that runs the rest of a file whose test crashed a worker, in another worker."""

    def remove_node(self, node: Any) -> str | None:
        """Take a worker out, queue what it has not run, and return the test that it crashed in; None after its end."""
        files = self.assigned_work.pop(node)
        left = [(tests, test) for tests in files.values() for test, has_run in tests.items() if not has_run]
        if not left:
            return None
        tests, crashed = left[0]
        tests[crashed] = True
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def schedule(self) -> None:
        super().schedule()
        # A worker begins its last test when it gets another or is shut down: a new one may have been given only one.
        for node in self.nodes:
            self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> FilesAfterCrashes | None:
    return FilesAfterCrashes(config, log) if config.getvalue("dist") == "loadfile" else None
