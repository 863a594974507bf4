"""Reward by a Python function that the recipe's author wrote, run in a process of its own."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from stages.core.contract import OutsidePath
from stages.core.errors import DataError
from stages.core.fields import AddedLater
from stages.core.program import Program, ProgramEndedError, ProgramError
from stages.core.redaction import shortened
from stages.rewards import code_program
from stages.rewards.reward import Completion, CompletionReward, RewardContext, Scores


class PythonReward(CompletionReward):
    """Number that the recipe's Python function returns: `score(prompt, completion, reference, row) -> float`."""

    type: Literal["python"]
    file: OutsidePath = Field(
        description="Python file with the reward function; a change of its content builds the stage again."
    )
    function: str = Field("score", pattern=r"^[A-Za-z_]\w*$", description="Name of the reward function.")
    timeout_s: PositiveFloat = Field(
        60.0,
        description="Time limit of one call of the reward function, in seconds; the first call also imports the file.",
    )
    minimum: Annotated[float | None, AddedLater()] = Field(
        None, allow_inf_nan=False, description="Least number that the reward function may return; default: any."
    )
    maximum: Annotated[float | None, AddedLater()] = Field(
        None, allow_inf_nan=False, description="Largest number that the reward function may return; default: any."
    )

    def score(self, completion: Completion) -> float:
        with self._program() as program:
            return self._asked(program, completion)

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """Start the process that runs the author's reward function, and yield the function that scores completions.

        Raises DataError for a file that cannot be imported, or has no such function.
        """
        if not code_program.landlock_version():
            context.warn(
                f"the reward {name} runs {self.custom_code()}, which can read the stage's environment on this machine: "
                "its kernel has no Landlock (Linux 5.13 and later)"
            )
        with self._program() as program:
            self._answer(lambda: program.start(self.timeout_s))
            yield lambda completions: (self._asked(program, completion) for completion in completions)

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

    def _program(self) -> Program:
        return Program("stages.rewards.python_program", str(self.file), self.function, needs_home=True)

    def _asked(self, program: Program, completion: Completion) -> float:
        self._answer(lambda: program.start(self.timeout_s))
        asked = {name: getattr(completion, name) for name in ("prompt", "text", "reference", "row")}
        score = self._answer(lambda: program.ask(asked, self.timeout_s))
        if not isinstance(score, bool | int | float):
            raise DataError(f"{self.custom_code()} gave {shortened(json.dumps(score), 60)}; expected a number")
        try:
            return float(score)
        except OverflowError as error:
            most = f"{sys.float_info.max:.3g}"
            raise DataError(
                f"{self.custom_code()} gave {shortened(str(score), 60)}; expected a number from -{most} to {most}"
            ) from error

    def _answer(self, answered: Callable[[], Any]) -> Any:
        """Return a request's result from the reward function's process; DataError for an error or no answer in time."""
        try:
            return answered()
        except TimeoutError as error:
            raise DataError(f"{self.custom_code()} gave no answer within timeout_s, {self.timeout_s:g} s") from error
        except ProgramError as error:
            raise DataError(f"{self.custom_code()}: {shortened(str(error), 500)}") from error
        except ProgramEndedError as error:
            raise DataError(f"{self.custom_code()} {error}") from error
