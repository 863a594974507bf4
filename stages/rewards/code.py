"""Reward by tests: 1 where the code in a completion passes the tests in its dataset row within limits, else 0."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from pydantic import Field

from stages.core.fields import Seconds
from stages.core.redaction import shortened
from stages.rewards.reward import Completion, CompletionReward, RewardContext, Scores
from stages.rewards.sandbox import Sandbox

BLOCK_BEGIN = re.compile(r"```[ \t]*(?:python|py)?[0-9.]*[ \t]*", re.IGNORECASE)
BLOCK_END = re.compile(r"```[ \t]*")


class CodeReward(CompletionReward):
    """Reward of 1 where the completion's code (last Python block, or all of it) passes all tests of its row, else 0.

    The code runs in its own process: no network, no other process or thread, no file outside its own folder, no keys.
    """

    type: Literal["code"]
    tests: str = Field("tests", min_length=1, description="Dataset column of the tests: Python code, or a list of it.")
    timeout_s: Seconds = Field(10.0, description="Time limit of a completion's code with all its tests, in seconds.")
    memory_gib: float = Field(
        1.0, ge=0.125, le=1024, description="Limit on the address space of the process that runs the code, in GiB."
    )

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        content = row.get(self.tests)
        if content is None:
            return f"has no tests in `{self.tests}`"
        if not _tests_in(content):
            shown = shortened(json.dumps(content, default=str), 60)
            return f"has no tests in `{self.tests}`, but {shown}; expected code, or a list"
        for test in _tests_in(content):
            try:
                compile(test, self.tests, "exec")
            except (SyntaxError, ValueError) as error:
                return f"has a test in `{self.tests}` that is no Python ({error})"
            except (MemoryError, RecursionError):  # nested too deeply for the parser: it is Python, and a failed test
                continue
        return None

    def score(self, completion: Completion) -> float:
        return float(self._sandbox.passes(_code_in(completion.text), _tests_in(completion.row[self.tests]))[0])

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """Prove that the sandbox works (else ResourceError), and yield the function that scores completions."""
        self._sandbox.prove(f"the reward {name}")
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        try:
            yield lambda completions: pool.map(self.score, completions)
        finally:
            pool.shutdown(cancel_futures=True)

    @property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.timeout_s, self.memory_gib)

    def custom_code(self) -> str:
        return "code in the model's answers, within limits"


def _code_in(text: str) -> str:
    """Return a completion's last Python block, else all; by lines, as a pattern of blocks takes quadratic time."""
    code = text
    block: list[str] | None = None
    for line in text.split("\n"):
        if block is None:
            block = [] if BLOCK_BEGIN.fullmatch(line) else None
        elif BLOCK_END.fullmatch(line):
            code, block = "".join(block), None
        else:
            block.append(f"{line}\n")
    return code


def _tests_in(content: object) -> tuple[str, ...]:
    """Return the tests in the value of a dataset column; empty where there are none."""
    tests = tuple(content) if isinstance(content, list) else (content,)
    return tests if all(isinstance(test, str) and test.strip() for test in tests) else ()
