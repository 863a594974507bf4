"""Program that writes the held-out rows of the quickstarts' lm-eval tasks: `addition.jsonl` or `digits.jsonl`.

A comment of the task file names the module's former address, since its content decides the versions of evaluations.
"""

import sys
from pathlib import Path

from stages.hubs.builtin.addition import split_problems, write_rows
from stages.hubs.builtin.digits import QUESTION, drawings


def write_held_out(path: Path) -> None:
    """Write the held-out problems of the quickstart's addition task as lines of JSON with `question` and `answer`."""
    write_rows(path, ({"question": problem.question, "answer": problem.answer} for problem in split_problems().test))


def write_held_out_pictures(path: Path) -> None:
    """Write the held-out pictures of the task `digits` as lines of JSON with `question`, `answer` and `image`."""
    held_out = drawings("test")
    write_rows(path, ({"question": QUESTION, "answer": one.number, "image": one.address} for one in held_out))


if __name__ == "__main__":
    write = write_held_out_pictures if Path(sys.argv[1]).stem == "digits" else write_held_out
    write(Path(sys.argv[1]))
