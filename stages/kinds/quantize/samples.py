"""Calibration and evaluation rows of a quantization: reading, tokenizing and batching."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import DataError
from stages.kinds.quantize.config import CalibrationConfig

if TYPE_CHECKING:
    import torch

    from stages.data.files import RowLocation


@dataclass(frozen=True)
class Samples:
    """Token ids of the calibration and evaluation rows, a list a row of at least two tokens.

    evaluated: whether the prediction of each token of `evaluation` counts; never that of a row's first.
    """

    calibration: list[list[int]]
    evaluation: list[list[int]]
    evaluated: list[list[bool]]


def read_samples(data: Path, tokenizer_folder: Path, config: CalibrationConfig, warn: Callable[[str], None]) -> Samples:
    """Read and tokenize the calibration and evaluation rows of a quantization as training would.

    Without `evaluation_split`, the rows after the calibration rows are evaluated. warn: gets the number of bad rows
    that were left out, and the first of them. Raises DataError if either kind has no usable rows.
    """
    from stages.data.calibration import calibration_samples

    passed_over: dict[RowLocation, str] = {}
    calibration = calibration_samples(
        data,
        config.split,
        tokenizer_folder,
        config.num_samples,
        config.sequence_length,
        train_on="all",
        passed_over=passed_over,
    )
    evaluation = calibration_samples(
        data,
        config.evaluation_split or config.split,
        tokenizer_folder,
        config.num_evaluation_samples,
        config.sequence_length,
        train_on=config.evaluate_on,
        num_skipped=0 if config.evaluation_split else len(calibration),
        passed_over=passed_over,
    )
    for place, reason in islice(passed_over.items(), 1):
        warn(f"{len(passed_over)} bad rows of {config.dataset} are passed over: {place} {reason}")
    predicted = [sample for sample in evaluation if sample.loss.any()]
    if not predicted:
        raise DataError(
            f"no row of the evaluation split has a token to predict within {config.sequence_length} tokens "
            f"(evaluate_on: {config.evaluate_on}); raise sequence_length or take other rows"
        )
    return Samples(
        _predictable([sample.ids.tolist() for sample in calibration], config.split),
        [sample.ids.tolist() for sample in predicted],
        [sample.loss.tolist() for sample in predicted],
    )


def batches_of_one_length(samples: Sequence[Sequence[int]], max_tokens: int) -> Iterator[torch.Tensor]:
    """Yield batches [rows, tokens] of rows of equal length, at most `max_tokens` tokens or one row, in a fixed order.

    No padding: it would count as activations that a quantizer has to represent.
    """
    import torch

    by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
    for sample in samples:
        by_length[len(sample)].append(sample)
    for length, rows in by_length.items():
        num_rows = max(1, max_tokens // length)
        for first in range(0, len(rows), num_rows):
            yield torch.tensor(rows[first : first + num_rows])


def _predictable(samples: list[list[int]], what: str) -> list[list[int]]:
    """Return the rows with at least two tokens, as a single token leaves nothing to predict."""
    rows = [sample for sample in samples if len(sample) > 1]
    if not rows:
        raise DataError(f"no row of the {what} split has two tokens or more; raise sequence_length or take other rows")
    return rows
