"""Program with an author's environments: `python -m stages.rollouts.environments.python_program FILE CLASS BYTES`.

A question resets or steps one of them, by its number, or asks for the tools of the class. Once the file is imported,
its code opens no connection, starts no process and no thread, and has BYTES of memory; it never has keys.
"""

import contextlib
import resource
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.core.program_loop import RefusedError, answer_questions
from stages.rewards import code_program

MOST_EPISODES = 100_000
"""Number of objects that are kept; the oldest make room."""
MOST_ANSWER_CHARACTERS = 1 << 20


def begin(file: str, name: str, memory_bytes: int) -> Callable[[dict[str, Any]], Any]:
    """Import the author's file, confine this process, and return the function that asks their objects."""
    with contextlib.suppress(OSError):  # without Landlock, which the stage warns of
        code_program.hide_other_processes()  # the environment of the stage's process has keys
    sys.path.insert(0, str(Path(file).parent))  # for what the file imports from beside it
    try:
        names = runpy.run_path(file)
    except BaseException as error:  # SystemExit as well: a script that does its work when it is run
        raise RefusedError(f"cannot be imported: {type(error).__name__}: {error}") from error
    made = names.get(name)
    if not isinstance(made, type) or not callable(getattr(made, "reset", None)) or not hasattr(made, "step"):
        raise RefusedError(f"has no class {name!r} with `reset` and `step`")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        code_program.permit_computing_only()
    except OSError as error:
        raise RefusedError(f"cannot be kept from the network on this machine: {error}") from error
    episodes: dict[int, Any] = {}

    def answer(question: dict[str, Any]) -> Any:
        if "tools" in question:
            return getattr(made, "tools", [])
        if "close" in question:
            episodes.pop(question["close"], None)
            return None
        number = question["episode"]
        if "reset" in question:
            while len(episodes) >= MOST_EPISODES:
                del episodes[next(iter(episodes))]
            episodes[number] = made()
            return _bounded(episodes[number].reset(*question["reset"]))
        outcome = episodes[number].step(question["step"])
        if not isinstance(outcome, tuple | list) or len(outcome) != 3:
            return _bounded(repr(outcome))
        observation, reward, done = (value.item() if hasattr(value, "item") else value for value in outcome)
        return [_bounded(observation), reward, done]

    return answer


def _bounded(value: Any) -> Any:
    """Return an observation of bounded length; a text in a list as well."""
    if isinstance(value, str):
        return value[:MOST_ANSWER_CHARACTERS]
    return [_bounded(one) for one in value[:1000]] if isinstance(value, list) else value


if __name__ == "__main__":
    file, name, memory_bytes = sys.argv[1:]
    answer_questions(lambda: begin(file, name, int(memory_bytes)))
