"""Dataset `builtin/calculator`: products of two numbers of three digits as chats that call a calculator.

A chat asks "What is 374 * 852?", calls the tool, gets its answer and repeats it. The problems are drawn by fixed seeds
and none is drawn twice, so those of validation, and of the evaluation's file, are in no training chat.
"""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from stages.data.calculator import DEFINITION, calculate
from stages.hubs.builtin.addition import message, write_rows

SEED = 0
NUM_VALIDATION, NUM_TRAIN = 300, 10_000
NUM_PROBLEMS = NUM_VALIDATION + NUM_TRAIN
LEAST, MOST = 100, 999


def make(folder: Path) -> None:
    """Write the dataset's training and validation problems as chats, in JSON Lines files."""
    problems = chats(NUM_PROBLEMS)
    rows: list[dict[str, object]] = [{"messages": chat, "tools": [DEFINITION]} for chat in problems]
    write_rows(folder / "validation.jsonl", rows[:NUM_VALIDATION])
    write_rows(folder / "train.jsonl", rows[NUM_VALIDATION:])


def chats(count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the first `count` chats, those of validation before those of training."""
    for expression in islice(expressions(), count):
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        answer = calculate(expression)
        yield [
            message("user", f"What is {expression}?"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            message("tool", answer),
            message("assistant", answer),
        ]


def expressions() -> Iterator[str]:
    """Yield the products of this dataset, then as many others, which `builtin/products` asks for."""
    for number in random.Random(SEED).sample(range((MOST + 1 - LEAST) ** 2), 2 * NUM_PROBLEMS):  # noqa: S311
        first, second = divmod(number, MOST + 1 - LEAST)
        yield f"{LEAST + first} * {LEAST + second}"
