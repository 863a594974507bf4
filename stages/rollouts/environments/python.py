"""Environment that the recipe's author wrote as a Python class, run in a process of its own without network."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from stages.core.contract import OutsidePath
from stages.core.errors import DataError
from stages.core.fields import Seconds
from stages.core.program import Program, ProgramEndedError, ProgramError
from stages.core.redaction import shortened
from stages.data.messages import RowError, Tool, make_message, parse_tools
from stages.rewards import code_program
from stages.rollouts.environments.environment import (
    Action,
    Environment,
    EnvironmentConfig,
    MakeEnvironment,
    Step,
    tool_message,
)

MAX_SHOWN = 60
Ask = Callable[[dict[str, Any]], Any]
"""Function that asks the author's process; DataError, with one sentence, for whatever goes wrong there."""


class PythonEnvironment(EnvironmentConfig):
    """Environment of the recipe's author: `{python: env.py, class_name: Game}`, with `reset` and `step`."""

    python: OutsidePath = Field(
        description="Python file with the environment's class; a change of its content builds the stage again."
    )
    class_name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] = Field(
        "Environment", description="Name of the class in the file."
    )
    answers_as: Literal["user", "tool"] = Field(
        "user", description="Role in which the environment answers a turn that calls no tool."
    )
    timeout_s: Seconds = Field(
        60.0, description="Time limit of one call of the class, in seconds; the first call also imports the file."
    )
    memory_gib: float = Field(
        2.0, ge=0.125, le=1024, description="Limit on the address space of the environments' process, in GiB."
    )

    @property
    def gives_rewards(self) -> bool:
        return True

    @property
    def writes(self) -> tuple[Literal["tool", "user"], ...]:
        return (self.answers_as,)

    @property
    def definitions(self) -> tuple[Tool, ...]:
        """Definitions of the class's tools (`tools`, a list by JSON schema), for which its process is started."""
        with self._program() as program:
            tools = self._ask(program, {"tools": True})
        try:
            return parse_tools({"tools": tools})
        except RowError as error:
            raise DataError(f"{self.custom_code()} {error}") from error

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[MakeEnvironment]:
        numbers = itertools.count()
        with self._program() as program:
            self._ask(program, {"tools": True})  # imports the file

            def ask(question: dict[str, Any]) -> Any:
                return self._ask(program, question)

            yield lambda: PythonEpisode(self, ask, next(numbers))

    def warnings(self) -> Iterator[str]:
        if not code_program.landlock_version():
            yield (
                f"the environment {self.custom_code()} can read the stage's environment variables on this machine: its "
                "kernel has no Landlock (Linux 5.13 and later)"
            )

    def custom_code(self) -> str:
        return f"{self.python}: {self.class_name}"

    def _program(self) -> Program:
        memory_bytes = str(int(self.memory_gib * 2**30))
        module = "stages.rollouts.environments.python_program"
        return Program(module, str(self.python), self.class_name, memory_bytes, needs_home=True)

    def _ask(self, program: Program, question: dict[str, Any]) -> Any:
        try:
            program.start(self.timeout_s)
            return program.ask(question, self.timeout_s)
        except TimeoutError as error:
            raise DataError(f"{self.custom_code()} gave no answer within timeout_s, {self.timeout_s:g} s") from error
        except ProgramError as error:
            raise DataError(f"{self.custom_code()}: {shortened(str(error), 500)}") from error
        except ProgramEndedError as error:
            raise DataError(f"{self.custom_code()} {error}") from error


class PythonEpisode(Environment):
    """Episode in an object of the author's class, which is known by its number in their process."""

    def __init__(self, config: PythonEnvironment, ask: Ask, number: int) -> None:
        """Create the episode. number: of its object."""
        self._config = config
        self._ask = ask
        self._number = number

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        text = self._ask({"episode": self._number, "reset": [row, seed]})
        if not isinstance(text, str | None):
            raise DataError(f"{self._config.custom_code()}: reset gave {_shown(text)}; expected a text, or None")
        return text

    def step(self, action: Action) -> Step:
        asked = {"text": action.text, "malformed": action.malformed}
        calls = [{"name": call.name, "arguments": call.arguments} for call in action.calls]
        outcome = self._ask({"episode": self._number, "step": {**asked, "calls": calls}})
        if not isinstance(outcome, list) or len(outcome) != 3:
            raise self._error(outcome, "three values: an observation, a reward and whether it is done")
        observation, reward, done = outcome
        if not isinstance(reward, int | float) or isinstance(reward, bool) or not math.isfinite(reward):
            raise self._error(reward, "a finite number as reward")
        if not isinstance(done, bool):
            raise self._error(done, "true or false for done")
        if done:
            return Step((), float(reward), done=True)
        texts = observation if isinstance(observation, list) else [observation]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise self._error(observation, "a text as observation, or a list with one for each call")
        if calls and len(texts) != len(calls):
            raise self._error(observation, f"a text for each of the {len(calls)} calls")
        is_tool = calls or self._config.answers_as == "tool"
        messages = tuple(tool_message(text) if is_tool else make_message("user", text) for text in texts)
        return Step(messages, float(reward))

    def close(self) -> None:
        self._ask({"close": self._number})

    def _error(self, value: object, expected: str) -> DataError:
        return DataError(f"{self._config.custom_code()}: step gave {_shown(value)}; expected {expected}")


def _shown(value: object) -> str:
    return shortened(json.dumps(value, default=str), MAX_SHOWN)
