"""`builtin/addition-preferences`: the problems of `builtin/addition`, each with the right and a plausible wrong sum.

Rows are conversational preferences: `prompt`, `chosen` and `rejected` are lists of messages.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from stages.hubs.builtin.addition import Problem, message, split_problems, write_rows


def make(folder: Path) -> None:
    """Write the preference pairs of the training and validation problems."""
    split = split_problems()
    write_rows(folder / "train.jsonl", (_preference(problem) for problem in split.train))
    write_rows(folder / "validation.jsonl", (_preference(problem) for problem in split.validation))


def wrong_sums(problem: Problem) -> list[int]:
    """Return sums with common mistakes: off by one, off by ten, the carry forgotten, two digits swapped."""
    right = problem.first + problem.second
    tens = problem.first // 10 + problem.second // 10
    carry_forgotten = 10 * tens + (problem.first % 10 + problem.second % 10) % 10
    swapped = int(str(right)[:-2] + str(right)[-2:][::-1])
    slips = {right - 1, right + 1, right - 10, right + 10, carry_forgotten, swapped}
    return sorted(slip for slip in slips if slip >= 0 and slip != right)


def _preference(problem: Problem) -> dict[str, object]:
    slips = wrong_sums(problem)
    draw = int.from_bytes(hashlib.sha256(f"wrong {problem.question}".encode()).digest()[:8], "big")
    return {
        "prompt": [message("user", problem.question)],
        "chosen": [message("assistant", problem.answer)],
        "rejected": [message("assistant", str(slips[draw % len(slips)]))],
    }
