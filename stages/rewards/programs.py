"""Programs of ours that answer each line of JSON with one: in a process of its own, with a bare environment.

The first answer says that it has begun.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from stages.rewards.environment import bare_environment

GRACE_S = 5.0


class ProgramEndedError(Exception):
    """The process is gone."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"ended its process with exit code {exit_code}")


class Program:
    """A running one; ended by `close`, or with the block that it is used in."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="reward-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=bare_environment(Path(self._home.name)),
            text=True,
            encoding="utf-8",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Raises as `answer`."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the answer, or that there is none, says why
            self._process.stdin.write(json.dumps(question, default=str) + "\n")
            self._process.stdin.flush()
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next one. Raises TimeoutError for none in time, ProgramEndedError."""
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError
        line = self._process.stdout.readline()
        if not line:
            raise ProgramEndedError(self._process.wait(GRACE_S))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """At once, whatever it does."""
        self._process.kill()
        with self._process:  # closes the pipes, and waits
            pass
        self._home.cleanup()
