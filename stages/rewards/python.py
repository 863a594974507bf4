"""A person's own reward: a function of a Python file, run in a process of its own."""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from stages.core.contract import OutsidePath
from stages.core.errors import DataError
from stages.core.fields import AddedLater
from stages.rewards import landlock
from stages.rewards.environment import bare_environment
from stages.rewards.reward import Completion, Reward, RewardContext, Scores

GRACE_S = 5.0


class PythonReward(Reward):
    """What a function of the recipe's own says: `score(prompt, completion, reference, row) -> float`."""

    type: Literal["python"]
    file: OutsidePath = Field(description="Python file; what is in it is identity.")
    function: str = Field("score", pattern=r"^[A-Za-z_]\w*$", description="Its name.")
    timeout_s: PositiveFloat = Field(60.0, description="Of one call; the first one also imports the file.")

    minimum: Annotated[float | None, AddedLater()] = Field(
        None, allow_inf_nan=False, description="Least number that it may give; default: any."
    )
    maximum: Annotated[float | None, AddedLater()] = Field(
        None, allow_inf_nan=False, description="Largest number that it may give; default: any."
    )

    def score(self, completion: Completion) -> float:
        with self._running() as process:
            return self._asked(process, completion)

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """Raises DataError for a file that cannot be imported, or has no such function."""
        if not landlock.version():
            context.warn(
                f"the reward {name} runs {self.custom_code()}, which can read the stage's environment on this machine: "
                "its kernel has no Landlock (Linux 5.13 and later)"
            )
        with self._running() as process:
            yield lambda completions: (self._asked(process, one) for one in completions)

    @property
    def bounds(self) -> tuple[float, float]:
        least = -math.inf if self.minimum is None else self.minimum
        return least, math.inf if self.maximum is None else self.maximum

    def custom_code(self) -> str:
        return f"{self.file}: {self.function}"

    @model_validator(mode="after")
    def _some_number_is_within(self) -> Self:
        if self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"`minimum` is {self.minimum:g}; expected less than `maximum`, {self.maximum:g}")
        return self

    @contextlib.contextmanager
    def _running(self) -> Iterator[subprocess.Popen[str]]:
        """The program that runs the function, when it has imported the file."""
        command = [sys.executable, "-m", "stages.rewards.python_program", str(self.file), self.function]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with tempfile.TemporaryDirectory(prefix="reward-") as home:
            environment = bare_environment(Path(home))
            with subprocess.Popen(command, text=True, encoding="utf-8", env=environment, **pipes) as process:  # type: ignore[call-overload]
                try:
                    self._answer(process)
                    yield process
                finally:
                    process.kill()

    def _asked(self, process: subprocess.Popen[str], completion: Completion) -> float:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # the answer, or that there is none, says why
            asked = {name: getattr(completion, name) for name in ("prompt", "text", "reference", "row")}
            process.stdin.write(json.dumps(asked, default=str) + "\n")
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
