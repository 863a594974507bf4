"""Program with tasks of Reasoning Gym: `python -m stages.rollouts.environments.reasoning_gym_program BYTES CPU_S`.

It imports the package, confines itself as the authors' environments are confined (no keys, network, processes or
threads), and answers questions about tasks with BYTES of memory, each in CPU_S seconds of CPU time. It imports the
standard library and the package only: the interpreter is that of `.venv-reasoning-gym`.

A row is known by its task's name, options, seed, size and its index. Scoring makes the row again from these, so that
what a score compares with has never been through JSON.
"""

import contextlib
import difflib
import functools
import json
import resource
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from stages.core.program_loop import RefusedError, answer_questions
from stages.rewards import code_program

MOST_CHARACTERS = 1 << 16
"""Largest length of a row's question or answer."""
NUM_NEAR = 4
NOT_OFFERED = {"composite": "which mixes others; name one of those"}
"""Tasks that are refused, with the reason."""


class UnusedModule(ModuleType):
    """Module in which every name is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class WithoutPlots:
    """Finder of empty modules for matplotlib, which takes half of the package's import for plots that are not drawn."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        is_plotting = name.partition(".")[0] in ("matplotlib", "mpl_toolkits")
        return ModuleSpec(name, self, is_package=True) if is_plotting else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return UnusedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


def begin(memory_bytes: int) -> Callable[[dict[str, Any]], Any]:
    """Import the package, confine this process, and return the function that answers questions about its tasks."""
    with contextlib.suppress(OSError):  # without Landlock, which the stage warns of
        code_program.hide_other_processes()  # the environment of the stage's process has keys
    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, WithoutPlots())
    try:
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import extract_answer
    except ImportError as error:
        raise RefusedError(f"cannot be imported: {error}") from error
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        code_program.permit_computing_only()
    except OSError as error:
        raise RefusedError(f"cannot be kept from the network on this machine: {error}") from error

    @functools.lru_cache(maxsize=16)
    def made(task: str, options: str, seed: int, size: int) -> Any:
        return _made(DATASETS, task, json.loads(options), seed, size)

    def answer(question: dict[str, Any]) -> Any:
        task, options, seed, size = question["of"]
        rows = made(task, options, seed, size)
        if "rows" in question:
            return [_shown(rows[index], index) for index in range(*question["rows"])]
        if "score" not in question:
            return None
        index, asked, text, tag = question["score"]
        row = rows[index]
        if row["question"] != asked:
            raise RefusedError(
                f"makes another question at index {index} of the task {task} with seed {seed} than the row has; "
                "make the rows again, or give the options and the version that made them"
            )
        return float(rows.score_answer(extract_answer(text, tag) if tag else text.strip(), row))

    return answer


def _made(known: dict[str, Any], task: str, given: dict[str, Any], seed: int, size: int) -> Any:
    """Return a task's rows, made one by one as they are asked for; refuse unknown tasks and options."""
    if why := NOT_OFFERED.get(task):
        raise RefusedError(f"has the task {task}, {why}")
    if task not in known:
        names = sorted(known.keys() - NOT_OFFERED)
        raise RefusedError(f"has no task {task!r}; near are {_near(task, names)} ({len(names)} in all)")
    make, make_config = known[task]
    fields = [name for name in make_config.__dataclass_fields__ if name not in ("seed", "size")]
    if unknown := next((name for name in given if name not in fields), None):
        raise RefusedError(f"has no option {unknown!r} of the task {task}; near are {_near(unknown, fields)}")
    try:
        config = make_config(seed=seed, size=size, **given)
        config.validate()
        return make(config)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise RefusedError(f"refuses the options {json.dumps(given)} of the task {task}: {reason}") from error


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, NUM_NEAR, 0.5) or names[:NUM_NEAR]
    return ", ".join(near) or "none"


def _shown(row: dict[str, Any], index: int) -> dict[str, str]:
    """Return the question and the answer of a row, which are texts; refuse longer ones than are sent."""
    question, answer = str(row["question"]), str(row["answer"])
    if max(len(question), len(answer)) > MOST_CHARACTERS:
        raise RefusedError(f"makes a row of more than {MOST_CHARACTERS} characters at index {index}")
    return {"prompt": question, "answer": answer}


if __name__ == "__main__":
    memory_bytes, cpu_s = sys.argv[1:]
    answer_questions(lambda: begin(int(memory_bytes)), cpu_s=float(cpu_s))
