"""Calibration and evaluation rows of a quantization: reading, tokenizing and batching."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import DataError
from stages.kinds.quantize.config import CalibrationConfig
from stages.kinds.quantize.registry import RowPictures

if TYPE_CHECKING:
    import torch

    from stages.data.files import RowLocation
    from stages.data.media.folder import MediaFolder
    from stages.data.tokenizer import TokenizedDocument


@dataclass(frozen=True)
class Samples:
    """Token ids of the calibration and evaluation rows, a list a row of at least two tokens, and their pictures.

    evaluated: whether the prediction of each token of `evaluation` counts; never that of a row's first. pictures: of
    the calibration rows, either of each or None; of the evaluation rows, of those that have any. num_left_out: number
    of rows that do not calibrate, since they have media of other kinds, or none.
    """

    calibration: list[list[int]]
    evaluation: list[list[int]]
    evaluated: list[list[bool]]
    calibration_pictures: RowPictures | None = None
    evaluation_pictures: RowPictures | None = None
    num_left_out: int = 0


def read_samples(data: Path, model_folder: Path, config: CalibrationConfig, warn: Callable[[str], None]) -> Samples:
    """Read and tokenize the calibration and evaluation rows of a quantization as training would.

    Without `evaluation_split`, the rows after the calibration rows are evaluated. A quantizer follows one path through
    a model: of calibration rows with media, those with the commonest kinds are taken, and no others. warn: gets the
    number of bad rows that were left out, and the first of them. Raises DataError if either kind has no usable rows.
    """
    from stages.data.calibration import calibration_samples, media_folder

    passed_over: dict[RowLocation, str] = {}
    evaluation_split = config.evaluation_split or config.split
    folders = [media_folder(data, split, model_folder) for split in (config.split, evaluation_split)]
    calibration = calibration_samples(
        data,
        config.split,
        model_folder,
        config.num_samples,
        config.sequence_length,
        train_on="all",
        passed_over=passed_over,
        media=folders[0],
    )
    evaluation = calibration_samples(
        data,
        evaluation_split,
        model_folder,
        config.num_evaluation_samples,
        config.sequence_length,
        train_on=config.evaluate_on,
        num_skipped=0 if config.evaluation_split else len(calibration),
        passed_over=passed_over,
        media=folders[1],
    )
    for place, reason in islice(passed_over.items(), 1):
        warn(f"{len(passed_over)} bad rows of {config.dataset} are passed over: {place} {reason}")
    predicted = [sample for sample in evaluation if sample.loss.any()]
    if not predicted:
        raise DataError(
            f"no row of the evaluation split has a token to predict within {config.sequence_length} tokens "
            f"(evaluate_on: {config.evaluate_on}); raise sequence_length or take other rows"
        )
    calibrating = _predictable(calibration, config.split)
    calibrates = _of_one_path(calibrating)
    return Samples(
        [sample.ids.tolist() for sample in calibrates],
        [sample.ids.tolist() for sample in predicted],
        [sample.loss.tolist() for sample in predicted],
        _pictures(calibrates, folders[0], model_folder),
        _pictures(predicted, folders[1], model_folder),
        len(calibrating) - len(calibrates),
    )


def _of_one_path(rows: list[TokenizedDocument]) -> list[TokenizedDocument]:
    """Return the rows with media of the commonest kinds; all rows if none has media."""
    kinds = [frozenset(medium.kind for medium in row.media) for row in rows]
    commonest = Counter(filter(None, kinds)).most_common(1)
    return [row for row, found in zip(rows, kinds, strict=True) if not commonest or found == commonest[0][0]]


def batches(
    samples: Sequence[Sequence[int]], max_tokens: int, pictures: RowPictures | None = None
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Yield batches, the numbers of their rows and the model's arguments with tokens [rows, tokens], in a fixed order.

    Each has rows of one length, at most `max_tokens` tokens or one row; a row with pictures is alone. No padding: it
    would count as activations that a quantizer has to represent.
    """
    import torch

    of_length: dict[int, list[int]] = defaultdict(list)
    alone = pictures.media if pictures else {}
    for number, sample in enumerate(samples):
        if number not in alone:
            of_length[len(sample)].append(number)
    for length, numbers in of_length.items():
        num_rows = max(1, max_tokens // length)
        for first in range(0, len(numbers), num_rows):
            chosen = numbers[first : first + num_rows]
            ids = torch.tensor([samples[number] for number in chosen])
            yield chosen, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for number in alone:
        assert pictures
        yield [number], pictures.inputs(number, samples[number])


def _pictures(rows: Sequence[TokenizedDocument], folder: MediaFolder | None, model_folder: Path) -> RowPictures | None:
    media = {number: row.media for number, row in enumerate(rows) if row.media}
    if folder is None or not media:
        return None
    from stages.models.processor import MediaProcessor  # texts do without it

    return RowPictures(media, folder, MediaProcessor(model_folder))


def _predictable(samples: list[TokenizedDocument], what: str) -> list[TokenizedDocument]:
    """Return the rows with at least two tokens, as a single token leaves nothing to predict."""
    rows = [sample for sample in samples if len(sample) > 1]
    if not rows:
        raise DataError(f"no row of the {what} split has two tokens or more; raise sequence_length or take other rows")
    return rows
