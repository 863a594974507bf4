"""Dataset `builtin/addition-crawled`: addition problems with known faults, such as copies, to test data curation.

Beside `NUM_GOOD` good rows: exact copies, copies written otherwise, problems of the task `addition`, addresses.
"""

import hashlib
from pathlib import Path

from stages.hubs.builtin.addition import Problem, message, split_problems, write_rows

NUM_GOOD = 2000
NUM_COPIES = 200
NUM_REWRITTEN = 100
NUM_LEAKED = 100
NUM_WITH_ADDRESS = 50


def make(folder: Path) -> None:
    """Write the dataset in one order: good rows and faulty ones (copies, leaked test problems, e-mail addresses)."""
    split = split_problems()
    good = split.train[:NUM_GOOD]
    rows = [_row(problem) for problem in good[NUM_WITH_ADDRESS:]]
    rows += [_row(one, f"{one.question} Tell ann{one.first}@example.com.") for one in good[:NUM_WITH_ADDRESS]]
    rows += rows[:NUM_COPIES]
    rows += [_row(one, one.question.upper().rstrip("?") + " ?!") for one in good[-NUM_REWRITTEN:]]
    rows += [_row(one) for one in split.test[:NUM_LEAKED]]
    keyed = sorted((hashlib.sha256(f"{number} {row}".encode()).digest(), number) for number, row in enumerate(rows))
    write_rows(folder / "train.jsonl", (rows[number] for _, number in keyed))


def _row(problem: Problem, question: str | None = None) -> dict[str, object]:
    return {"messages": [message("user", question or problem.question), message("assistant", problem.answer)]}
