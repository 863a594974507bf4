"""Environment of Reasoning Gym's tasks, which makes its own rows: a question, and a score for the model's answer."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, PositiveInt

from stages.core.errors import DataError, ResourceError
from stages.core.fields import Seconds
from stages.core.program import Program, ProgramEndedError, ProgramError
from stages.core.redaction import shortened
from stages.core.shipped import install_command
from stages.data.messages import RowError
from stages.rewards import code_program
from stages.rollouts.environments.environment import (
    Action,
    Environment,
    EnvironmentConfig,
    MakeEnvironment,
    SeedRange,
    Step,
)
from stages.serving.interpreter import find_interpreter

MADE_FROM = "reasoning_gym"
"""Column of a row with the name, seed, size and index by which its task makes it again."""
ROWS_AT_ONCE = 16
MOST_ROWS, MOST_SEEDS = 1_000_000, 2**31
START_TIMEOUT_S = 300.0
Made = tuple[str, str, int, int]
"""Arguments that make a task's rows: its name, its options as JSON, the seed of the first row, and their number."""


def find_reasoning_gym() -> tuple[Path, str]:
    """Return the interpreter and the version of the installed Reasoning Gym. Raises ResourceError without one."""
    return find_interpreter(
        "reasoning-gym",
        title="Reasoning Gym",
        variable="LIFECYCLE_REASONING_GYM",
        environment=".venv-reasoning-gym",
        how=install_command("reasoning-gym"),
    )


class ReasoningGymEnvironment(EnvironmentConfig):
    """Environment of one procedural task: `{reasoning_gym: chain_sum, size: 1000}`. The answer ends the episode."""

    reasoning_gym: Annotated[str, Field(pattern=r"^[a-z]\w{0,99}$")] = Field(
        description="Name of the task, such as chain_sum."
    )
    options: dict[str, JsonValue] = Field(
        {}, description="Options of the task, such as its difficulty: {max_terms: 2}."
    )
    size: PositiveInt = Field(1000, le=MOST_ROWS, description="Number of rows to make.")
    seed: int = Field(
        0,
        ge=0,
        lt=MOST_SEEDS,
        description="Seed of the first row; each further row has the next one. Stages that train and evaluate must "
        "not share seeds of a task.",
    )
    answer_tag: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,49}$")] | None = Field(
        None,
        description="Tag between which the model writes its answer: with answer, `<answer>3</answer>`, the last of "
        "them. Default: the whole turn is the answer.",
    )
    timeout_s: Seconds = Field(
        20.0, description="Time limit of making 16 rows, or of scoring an answer, in seconds; a slower score is 0."
    )
    memory_gib: float = Field(
        4.0, ge=0.5, le=1024, description="Limit on the address space of the package's process, in GiB."
    )

    @property
    def name(self) -> str:
        return self.reasoning_gym

    @property
    def gives_rewards(self) -> bool:
        return True

    @property
    def makes_rows(self) -> bool:
        return True

    @property
    def writes(self) -> tuple[Literal["tool", "user"], ...]:
        return ()  # an episode is one turn

    @property
    def seed_ranges(self) -> tuple[SeedRange, ...]:
        return (SeedRange(self.reasoning_gym, self.seed, self.size),)

    def versions(self) -> dict[str, JsonValue]:
        return {"reasoning_gym_version": find_reasoning_gym()[1]}

    def problems(self) -> Iterator[tuple[str, str]]:
        with contextlib.suppress(ResourceError):  # a missing package is found when its version is looked for
            made = self._made(self.seed, 1)
            if problem := _problem(*find_reasoning_gym(), made, self.memory_gib, self.timeout_s):
                yield "reasoning_gym", problem

    def rows(self) -> Iterator[dict[str, Any]]:
        made = self._made(self.seed, self.size)
        for index, row in enumerate(_rows(*find_reasoning_gym(), made, self.memory_gib, self.timeout_s)):
            made_from = {"task": self.reasoning_gym, "seed": self.seed, "size": self.size, "index": index}
            yield {**row, MADE_FROM: made_from}

    def check_row(self, row: Mapping[str, Any]) -> None:
        made_from = row.get(MADE_FROM)
        made_from = made_from if isinstance(made_from, dict) else {}
        given = [made_from.get(name) for name in ("index", "size", "seed")]
        numbers = [number for number in given if type(number) is int]
        if made_from.get("task") != self.reasoning_gym or len(numbers) < len(given) or not _is_within(*numbers):
            raise RowError(
                f"is no row of the task {self.reasoning_gym}, which says in `{MADE_FROM}` how it is made; take rows of "
                "this environment, or leave `dataset` out"
            )

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[MakeEnvironment]:
        with self._program() as program:
            _asked(program, {"of": self._made(self.seed, self.size)}, self.timeout_s)  # imports the package

            def score(question: dict[str, Any]) -> float | None:
                return self._score(program, question)

            yield lambda: ReasoningGymEpisode(self, score)

    def warnings(self) -> Iterator[str]:
        if not code_program.landlock_version():
            yield (
                "scoring by Reasoning Gym evaluates what the model writes, and can read the stage's environment "
                "variables on this machine: its kernel has no Landlock (Linux 5.13 and later)"
            )

    def question(self, row: Mapping[str, Any], text: str) -> dict[str, Any]:
        """Return the question for the score of a text as the answer to a row."""
        made_from = row[MADE_FROM]
        scored = [made_from["index"], row["prompt"], text, self.answer_tag]
        return {"of": self._made(made_from["seed"], made_from["size"]), "score": scored}

    def _made(self, seed: int, size: int) -> Made:
        return self.reasoning_gym, json.dumps(self.options, sort_keys=True), seed, size

    def _program(self) -> Program:
        return _program(find_reasoning_gym()[0], self.memory_gib, self.timeout_s)

    def _score(self, program: Program, question: dict[str, Any]) -> float | None:
        """Return the package's score of an answer; None where scoring it ends in an error, or takes too long."""
        program.start(START_TIMEOUT_S)
        try:
            score = program.ask_hostile(question, self.timeout_s + 1.0)
        except TimeoutError:
            return None
        except ProgramError as error:
            if error.kind == "RefusedError":
                raise DataError(f"Reasoning Gym {error}") from error
            return None  # the package's own error for an answer that it did not expect
        return float(score) if math.isfinite(score) else None


class ReasoningGymEpisode(Environment):
    """Episode of one turn, which is the answer to the row's question."""

    def __init__(self, config: ReasoningGymEnvironment, score: Callable[[dict[str, Any]], float | None]) -> None:
        """Create the episode. score: function of a question for the package's process."""
        self._config = config
        self._score = score
        self._row: Mapping[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._row = row

    def step(self, action: Action) -> Step:
        score = self._score(self._config.question(self._row, action.text))
        return Step((), score or 0.0, done=True, num_failed=score is None)

    def close(self) -> None:
        return


def _program(python: Path, memory_gib: float, timeout_s: float) -> Program:
    module = "stages.rollouts.environments.reasoning_gym_program"
    return Program(module, str(int(memory_gib * 2**30)), str(timeout_s), needs_home=True, python=python)


def _is_within(index: int, size: int, seed: int) -> bool:
    return 0 <= index < size <= MOST_ROWS and 0 <= seed < MOST_SEEDS


def _asked(program: Program, question: dict[str, Any], timeout_s: float) -> Any:
    try:
        program.start(START_TIMEOUT_S)
        return program.ask(question, timeout_s)
    except TimeoutError as error:
        task = question["of"][0]
        raise DataError(f"Reasoning Gym made no rows of {task} within timeout_s, {timeout_s:g} s; raise it") from error
    except ProgramError as error:
        raise DataError(f"Reasoning Gym {shortened(str(error), 500)}") from error
    except ProgramEndedError as error:
        raise DataError(f"Reasoning Gym {error}") from error


@functools.lru_cache(maxsize=256)
def _problem(python: Path, version: str, made: Made, memory_gib: float, timeout_s: float) -> str | None:
    """Return the package's refusal of a task and its options, as one sentence; None for those that it makes."""
    with _program(python, memory_gib, timeout_s) as program:
        try:
            _asked(program, {"of": made}, timeout_s)
        except DataError as error:
            return str(error)
    return None


@functools.lru_cache(maxsize=4)  # those to train on and those that are held out are chosen from the same rows
def _rows(python: Path, version: str, made: Made, memory_gib: float, timeout_s: float) -> tuple[dict[str, Any], ...]:
    """Return a task's rows, with `prompt` and `answer`."""
    size, rows = made[-1], []
    with _program(python, memory_gib, timeout_s) as program:
        for begin in range(0, size, ROWS_AT_ONCE):
            question = {"of": made, "rows": [begin, min(begin + ROWS_AT_ONCE, size)]}
            rows += _asked(program, question, timeout_s)
    return tuple(rows)
