"""Program that writes the held-out rows of the quickstarts' tasks: `addition.jsonl`, `digits.jsonl`, `products.jsonl`.

A comment of the task file names the module's former address, since its content decides the versions of evaluations.
"""

import sys
from itertools import islice
from pathlib import Path

from stages.data.calculator import calculate
from stages.hubs.builtin.addition import split_problems, write_rows
from stages.hubs.builtin.calculator import NUM_VALIDATION, expressions
from stages.hubs.builtin.digits import QUESTION, drawings


def write_held_out(path: Path) -> None:
    """Write the held-out problems of the quickstart's addition task as lines of JSON with `question` and `answer`."""
    write_rows(path, ({"question": problem.question, "answer": problem.answer} for problem in split_problems().test))


def write_held_out_pictures(path: Path) -> None:
    """Write the held-out pictures of the task `digits` as lines of JSON with `question`, `answer` and `image`."""
    held_out = drawings("test")
    write_rows(path, ({"question": QUESTION, "answer": one.number, "image": one.address} for one in held_out))


def write_held_out_products(path: Path) -> None:
    """Write the products that `builtin/calculator` holds out as lines of JSON with `prompt` and `answer`."""
    held_out = islice(expressions(), NUM_VALIDATION)
    write_rows(path, ({"prompt": f"What is {one}?", "answer": calculate(one)} for one in held_out))


WRITERS = {"addition": write_held_out, "digits": write_held_out_pictures, "products": write_held_out_products}

if __name__ == "__main__":
    WRITERS[Path(sys.argv[1]).stem](Path(sys.argv[1]))
