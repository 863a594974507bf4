"""A person's own reward: a function of a Python file, run in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from stages.core.contract import OutsidePath
from stages.core.errors import DataError
from stages.rewards.reward import Completion, Reward, Score
from stages.serving.proxy import API_KEY_VARIABLE

GRACE_S = 5.0


class PythonReward(Reward):
    """What a function of the recipe's own says: `score(prompt, completion, reference, row) -> float`."""

    type: Literal["python"]
    file: OutsidePath = Field(description="Python file; what is in it is identity.")
    function: str = Field("score", pattern=r"^[A-Za-z_]\w*$", description="Its name.")
    timeout_s: PositiveFloat = Field(60.0, description="Of one call; the first one also imports the file.")

    def score(self, completion: Completion) -> float:
        with self.opened() as score:
            return score(completion)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Score]:
        """Raises DataError for a file that cannot be imported, or has no such function."""
        command = [sys.executable, "-m", "stages.rewards.python_program", str(self.file), self.function]
        environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, encoding="utf-8", env=environment, **pipes) as process:  # type: ignore[call-overload]
            try:
                self._answer(process)
                yield lambda completion: self._asked(process, completion)
            finally:
                process.kill()

    def custom_code(self) -> str:
        return f"{self.file}: {self.function}"

    def _asked(self, process: subprocess.Popen[str], completion: Completion) -> float:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # the answer, or that there is none, says why
            process.stdin.write(json.dumps(asdict(completion), default=str) + "\n")
            process.stdin.flush()
        score = self._answer(process)["score"]
        if isinstance(score, bool | int | float):
            return float(score)
        raise DataError(f"{self.custom_code()} gave {json.dumps(score)[:60]}; expected a number")

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The next line that the program writes. Raises DataError for an error, for none in time, and for none."""
        assert process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(self.timeout_s):
                raise DataError(f"{self.custom_code()} gave no answer within timeout_s, {self.timeout_s:g} s")
        line = process.stdout.readline()
        if not line:
            raise DataError(f"{self.custom_code()} ended its process with exit code {process.wait(GRACE_S)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DataError(f"{self.custom_code()}: {answer['error']}")
        return answer
