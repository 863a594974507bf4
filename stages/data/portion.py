"""Which rows are trained on and which are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from stages.data.config import DataConfig
from stages.data.files import BadRow, Row


@dataclass(frozen=True)
class Portion:
    """All rows of a split, or one side of it: the `fraction` of it that is held out, or the rest."""

    name: Literal["training", "evaluation"]
    split: str
    fraction: float | None = None

    def select(self, rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
        """The rows of this portion. Equal rows are on the same side; what cannot be read counts as training data."""
        if self.fraction is None:
            yield from rows
            return
        for row in rows:
            held_out = isinstance(row, Row) and is_held_out(row.content, self.fraction)
            if held_out == (self.name == "evaluation"):
                yield row


def portions(config: DataConfig) -> list[Portion]:
    """The training portion, and the evaluation portion if the recipe asks for one."""
    if config.evaluation_split:
        return [Portion("training", config.split), Portion("evaluation", config.evaluation_split)]
    if config.evaluation_fraction:
        return [
            Portion("training", config.split, config.evaluation_fraction),
            Portion("evaluation", config.split, config.evaluation_fraction),
        ]
    return [Portion("training", config.split)]


def is_held_out(content: object, fraction: float) -> bool:
    """Whether a row of this content is held out, by its hash alone: the same in every run and every order."""
    canonical = json.dumps(content, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(canonical, digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
