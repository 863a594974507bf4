"""Dataset `builtin/addition-preferences`: addition problems, each with the right sum and a plausible wrong one.

`prompt`, `chosen` and `rejected` are lists of messages.
"""

import hashlib
from pathlib import Path

from stages.hubs.builtin.addition import Problem, message, split_problems, write_rows


def make(folder: Path) -> None:
    """Write the dataset's training and validation problems as preference pairs, in JSON Lines files."""
    split = split_problems()
    write_rows(folder / "train.jsonl", (_preference(problem) for problem in split.train))
    write_rows(folder / "validation.jsonl", (_preference(problem) for problem in split.validation))


def wrong_sums(problem: Problem) -> list[int]:
    """Return wrong sums from common mistakes: off by one or ten, a forgotten carry, two swapped digits."""
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
