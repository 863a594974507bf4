"""Dataset `builtin/addition`: additions of two numbers below 100 as chats, with training and validation splits.

10,000 ordered pairs are split by a hash. Test problems are in no dataset: they are the lm-eval task `addition`
(`configs/tasks`).
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NUM_TEST = 500
NUM_VALIDATION = 300


@dataclass(frozen=True)
class Problem:
    """Addition problem of two numbers, with its question and answer as text."""

    first: int
    second: int

    @property
    def question(self) -> str:
        return f"What is {self.first} + {self.second}?"

    @property
    def answer(self) -> str:
        return str(self.first + self.second)


@dataclass(frozen=True)
class Split:
    """Disjoint test, validation and training problems of the dataset `builtin/addition`."""

    test: list[Problem]
    validation: list[Problem]
    train: list[Problem]


def split_problems() -> Split:
    """Return all additions of two numbers below 100, split reproducibly into test, validation and training problems."""
    problems = [Problem(first, second) for first in range(100) for second in range(100)]
    problems.sort(key=lambda problem: hashlib.sha256(problem.question.encode()).digest())
    end_of_validation = NUM_TEST + NUM_VALIDATION
    return Split(problems[:NUM_TEST], problems[NUM_TEST:end_of_validation], problems[end_of_validation:])


def make(folder: Path) -> None:
    """Write the dataset's training and validation problems as chats, in JSON Lines files."""
    split = split_problems()
    write_rows(folder / "train.jsonl", (_chat(problem) for problem in split.train))
    write_rows(folder / "validation.jsonl", (_chat(problem) for problem in split.validation))


def write_rows(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Write rows as JSON Lines, one object a line."""
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def _chat(problem: Problem) -> dict[str, object]:
    return {"messages": [message("user", problem.question), message("assistant", problem.answer)]}


def message(role: str, content: str) -> dict[str, str]:
    """Return a chat message of a role and a text."""
    return {"role": role, "content": content}
