"""Runs a function of a person's file for each completion: `python -m stages.rewards.python_program FILE FUNCTION`.

A completion is a line of JSON on the standard input; its answer, {"score": number} or {"error": text}, is one on what
was the standard output. What the function prints goes to the standard error. The first answer is of the import.
Neither the environment nor the memory of the stage, which has keys of servers, is within the function's reach.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.rewards import landlock

ARGUMENTS = ("prompt", "completion", "reference", "row")


def main(file: str, function: str) -> None:
    """Answers until the standard input ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(content: dict[str, Any]) -> None:
            print(json.dumps(content), file=answers, flush=True)

        with contextlib.suppress(OSError):  # without Landlock, which the stage warns of
            landlock.hide_other_processes()
        sys.path.insert(0, str(Path(file).parent))  # for what the file imports from beside it
        try:
            score: Callable[..., Any] = runpy.run_path(file)[function]
        except KeyError as error:
            answer({"error": f"has no function {error}"})
            return
        except BaseException as error:  # SystemExit as well: a script that does its work when it is run
            answer({"error": f"cannot be imported: {type(error).__name__}: {error}"})
            return
        if problem := _unlike_a_score(score):
            answer({"error": problem})
            return
        answer({"score": 0})
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                found = score(asked["prompt"], asked["text"], asked["reference"], asked["row"])
                answer({"score": found.item() if hasattr(found, "item") else found})
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})


def _unlike_a_score(score: object) -> str | None:
    """Why it cannot be called as it will be, as far as its signature tells."""
    if not callable(score):
        return f"is {type(score).__name__}; expected a function"
    with contextlib.suppress(ValueError):  # some of C have no signature
        try:
            inspect.signature(score).bind(*ARGUMENTS)
        except TypeError as error:
            return f"takes {inspect.signature(score)} ({error}); expected a function of {', '.join(ARGUMENTS)}"
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
