"""Calibration samples of a dataset for a quantizer: a few whole tokenized documents, without packing."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from stages.core.errors import DataError
from stages.data.files import BadRow, RowLocation, find_files, read_rows
from stages.data.formats import FORMATS, RowReader, likeliest_format, rename_columns
from stages.data.media.folder import MediaFolder
from stages.data.messages import RowError, kind_of
from stages.data.templates import Rendered, TemplateLimitError
from stages.data.tokenizer import DocumentTokenizer, TokenizedDocument
from stages.models.processor_files import reads_media


def calibration_samples(
    folder: Path,
    split: str,
    tokenizer_folder: Path,
    num_samples: int,
    sequence_length: int,
    *,
    train_on: Literal["assistant", "all"],
    num_skipped: int = 0,
    passed_over: dict[RowLocation, str] | None = None,
    media: MediaFolder | None = None,
) -> list[TokenizedDocument]:
    """Return the first usable rows of a dataset as tokens, cut to `sequence_length`, to calibrate a quantizer with.

    Conversations are rendered with the model's chat template; of pairs the chosen answer counts. There may be fewer
    than `num_samples`. train_on: which tokens the masks mark. passed_over: receives place and reason of each bad row,
    and of those whose media would be cut. media: where the rows' media are; None for a model that reads text alone.
    Raises DataError when there are none, ModelError for a folder without a usable tokenizer.
    """
    tokenizer = DocumentTokenizer(tokenizer_folder, None, train_on)
    bad = {} if passed_over is None else passed_over
    texts = _texts(folder, split, tokenizer, bad, media)
    whole = _with_whole_media(texts, tokenizer, sequence_length, bad)
    wanted = list(islice(whole, num_skipped, num_skipped + num_samples))
    if not wanted:
        after = f" after the first {num_skipped}" if num_skipped else ""
        raise DataError(f"the split {split!r} of {folder} has no usable rows{after} to calibrate with")
    return [tokens.cut(sequence_length) for tokens in wanted]


def media_folder(folder: Path, split: str, model_folder: Path) -> MediaFolder | None:
    """Return the folder of the media of a dataset's rows; None for a model that reads text alone."""
    return MediaFolder.of(folder, find_files(folder, split)) if reads_media(model_folder) else None


def _with_whole_media(
    texts: Iterator[tuple[RowLocation, Rendered]],
    tokenizer: DocumentTokenizer,
    sequence_length: int,
    passed_over: dict[RowLocation, str],
) -> Iterator[TokenizedDocument]:
    for place, text in texts:
        (tokens,) = tokenizer.encode([text])
        if tokens.media_end > sequence_length:
            passed_over[place] = (
                f"has media up to token {tokens.media_end}, which a sequence_length of {sequence_length} would cut"
            )
        else:
            yield tokens


def _texts(
    folder: Path,
    split: str,
    tokenizer: DocumentTokenizer,
    passed_over: dict[RowLocation, str],
    media: MediaFolder | None,
) -> Iterator[tuple[RowLocation, Rendered]]:
    reader: RowReader | None = None
    for row in read_rows(folder, find_files(folder, split)):
        if isinstance(row, BadRow) or not isinstance(row.content, dict):
            passed_over[row.place] = row.reason if isinstance(row, BadRow) else f"is {kind_of(row.content)}, no row"
            continue
        try:
            if reader is None:
                likeliest = likeliest_format(rename_columns(row.content, {}))
                is_pairs = likeliest is not None and FORMATS[likeliest].rows == "pairs"
                reader = RowReader("auto", "pairs" if is_pairs else "examples", media=media)
            units = tokenizer.render_units(reader.read(row.content, row.place)[:1])
            yield row.place, units[-1][0]  # the longest text of a conversation
        except RowError as error:
            passed_over[row.place] = str(error)
        except TemplateLimitError as error:
            raise DataError(f"{row.place}: {error}") from error
