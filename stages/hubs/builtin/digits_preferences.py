"""Dataset `builtin/digits-preferences`: pictures of `builtin/digits`, each with its number and a wrong one.

`prompt`, `chosen` and `rejected` are lists of messages.
"""

import random
from pathlib import Path

from stages.hubs.builtin.addition import message, write_rows
from stages.hubs.builtin.digits import NUM_ROWS, Drawing, Split, question, write_pictures

NUM_PAIRS: dict[Split, int] = {"train": 2000, "validation": NUM_ROWS["validation"]}


def make(folder: Path) -> None:
    """Write training and validation pairs in JSON Lines files, with their pictures beside them."""
    for split, num_pairs in NUM_PAIRS.items():
        drawn = write_pictures(folder, split, num_pairs)
        write_rows(folder / f"{split}.jsonl", (_preference(drawing, path) for drawing, path in drawn))


def wrong_number(drawing: Drawing) -> str:
    """Return another number that differs in one digit."""
    chance = random.Random(f"wrong {drawing.split} {drawing.index}")  # noqa: S311 - drawn, not secret
    digits = [*drawing.number]
    place = chance.randrange(len(digits))
    digits[place] = str((int(digits[place]) + chance.randint(1, 9)) % 10)
    return "".join(digits)


def _preference(drawing: Drawing, path: str) -> dict[str, object]:
    return {
        "prompt": [question()],
        "chosen": [message("assistant", drawing.number)],
        "rejected": [message("assistant", wrong_number(drawing))],
        "images": [path],
    }
