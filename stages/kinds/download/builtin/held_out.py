"""Program that writes the held-out problems of the quickstart's lm-eval task to `configs/tasks/addition.jsonl`.

A comment of the task file names the module's former address, since its content decides the versions of evaluations.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stages.hubs.builtin.addition import split_problems, write_rows


def write_held_out(path: Path) -> None:
    """Write the held-out problems of the quickstart's addition task as lines of JSON with `question` and `answer`."""
    write_rows(path, ({"question": problem.question, "answer": problem.answer} for problem in split_problems().test))


if __name__ == "__main__":
    write_held_out(Path(sys.argv[1]))
