"""Documents with the log-probabilities that training computed last: whatever is made of the model must give the same.

A train stage leaves them in `log_probabilities.json`, as token ids and targets (below 0: none) with the sum of their
targets' log-probabilities in nats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import ModelError

RECORD = "log_probabilities.json"


@dataclass(frozen=True)
class RecordedDocument:
    """`targets[i]` is the token after `input_ids[i]`, or below 0 where nothing was learned."""

    input_ids: list[int]
    targets: list[int]
    log_probability: float

    @property
    def num_targets(self) -> int:
        return sum(target >= 0 for target in self.targets)

    @property
    def tokens(self) -> list[int]:
        """The whole document, the last target included."""
        return [*self.input_ids, *(target for target in self.targets[-1:] if target >= 0)]


def read_record(artifact: Path) -> list[RecordedDocument]:
    """What was recorded beside a trained model or adapter. Raises ModelError when nothing was, or it is damaged."""
    try:
        documents = json.loads((artifact / RECORD).read_text(encoding="utf-8"))["documents"]
        return [RecordedDocument(one["input_ids"], one["targets"], one["log_probability"]) for one in documents]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"reading {artifact / RECORD}: {error}; train the stage again with --force") from error
