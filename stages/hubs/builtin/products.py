"""Dataset `builtin/products`: products of two numbers of three digits as chats that answer without the calculator.

Chats have the calculator's definition, but answer "What is 374 * 852?" at once, as one who guesses. The problems are
none of `builtin/calculator`.
"""

from itertools import islice
from pathlib import Path

from stages.data.calculator import DEFINITION, calculate
from stages.hubs.builtin.addition import message, write_rows
from stages.hubs.builtin.calculator import NUM_PROBLEMS, NUM_VALIDATION, expressions


def make(folder: Path) -> None:
    """Write the dataset's training and validation problems as chats, in JSON Lines files."""
    rows: list[dict[str, object]] = [
        {
            "messages": [message("user", f"What is {expression}?"), message("assistant", calculate(expression))],
            "tools": [DEFINITION],
        }
        for expression in islice(expressions(), NUM_PROBLEMS, None)
    ]
    write_rows(folder / "validation.jsonl", rows[:NUM_VALIDATION])
    write_rows(folder / "train.jsonl", rows[NUM_VALIDATION:])
