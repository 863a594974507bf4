"""Documents with the log-probabilities that training computed last: whatever is made of the model must give the same.

A train stage leaves them in `log_probabilities.json`, as token ids and targets (below 0: none) with the sum of their
targets' log-probabilities in nats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.core.errors import ModelError
from stages.core.files import write_atomically

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


def write_record(artifact: Path, documents: Sequence[RecordedDocument], compute_dtype: str) -> None:
    """compute_dtype: what the log-probabilities were computed in, such as float32."""
    content = {"compute_dtype": compute_dtype, "documents": [asdict(one) for one in documents]}
    write_atomically(artifact / RECORD, json.dumps(content) + "\n")


@dataclass(frozen=True)
class Differences:
    """From what was recorded, in nats per target token: of the document that differs most, and over all tokens."""

    most: float
    mean: float

    def metrics(self) -> dict[str, float]:
        """By the names that they have in MLflow, whichever stage measures them."""
        return {"max_abs_logprob_difference": self.most, "mean_abs_logprob_difference": self.mean}


def differences(given: Sequence[float], documents: Sequence[RecordedDocument]) -> Differences:
    """given: of each document, the sum of its targets' log-probabilities now, by any engine."""
    found = [abs(now - one.log_probability) for now, one in zip(given, documents, strict=True)]
    counts = [one.num_targets for one in documents]
    per_token = [value / max(1, count) for value, count in zip(found, counts, strict=True)]
    return Differences(max(per_token), sum(found) / max(1, sum(counts)))
