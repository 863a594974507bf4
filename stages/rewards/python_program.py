"""Program that calls an author's reward function: `python -m stages.rewards.python_program FILE FUNCTION`.

A question is a completion; the answer is what the function returned, without access to the environment or memory of the
stage, which has keys of servers.
"""

import contextlib
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.core.program_loop import RefusedError, answer_questions
from stages.rewards import code_program

ARGUMENTS = ("prompt", "completion", "reference", "row")


def begin(file: str, function: str) -> Callable[[dict[str, Any]], Any]:
    """Import the author's file and return a caller of its reward function; RefusedError if there is none."""
    with contextlib.suppress(OSError):  # without Landlock, which the stage warns of
        code_program.hide_other_processes()
    sys.path.insert(0, str(Path(file).parent))  # for what the file imports from beside it
    try:
        names = runpy.run_path(file)
    except BaseException as error:  # SystemExit as well: a script that does its work when it is run
        raise RefusedError(f"cannot be imported: {type(error).__name__}: {error}") from error
    if function not in names:
        raise RefusedError(f"has no function {function!r}")
    score: Callable[..., Any] = names[function]
    if problem := _unlike_a_score(score):
        raise RefusedError(problem)

    def scored(completion: dict[str, Any]) -> Any:
        value = score(completion["prompt"], completion["text"], completion["reference"], completion["row"])
        return value.item() if hasattr(value, "item") else value  # numbers of NumPy and torch

    return scored


def _unlike_a_score(score: object) -> str | None:
    """Return the reason why an author's reward function cannot take the expected arguments, judged by its signature."""
    if not callable(score):
        return f"is {type(score).__name__}; expected a function"
    with contextlib.suppress(ValueError):  # some of C have no signature
        try:
            inspect.signature(score).bind(*ARGUMENTS)
        except TypeError as error:
            return f"takes {inspect.signature(score)} ({error}); expected a function of {', '.join(ARGUMENTS)}"
    return None


if __name__ == "__main__":
    file, function = sys.argv[1:]
    answer_questions(lambda: begin(file, function))
