"""Data that a stage will be trained on hours later → what is wrong with it, found in seconds.

It is prepared as the stage will, into the same cache. What takes longer than there is time for is left to the stage:
then the rows that were seen are checked, and no more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from stages.core.errors import DataError, DownloadError, LifecycleError, ModelError, TransientError
from stages.data.config import DataConfig, RowKind
from stages.data.files import find_files
from stages.data.portion import portions
from stages.data.prepare import CACHE_FOLDER, PIECES_FOLDER, prepare_portion
from stages.data.preprocessing import OutOfTimeError, Preprocessing
from stages.data.seen_rows import check_held_out
from stages.data.tokenizer import DocumentTokenizer
from stages.remote.pointers import size_bytes

SECONDS = 20.0
"""Of the processor, for a split: on a busy machine no less is checked. One that is larger than these bytes cannot be
done by then, and hashing it for the cache is slow."""
LARGE_BYTES = 1 << 30


class Silent:
    """A `Report` to nobody: progress and warnings are the stage's."""

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None:
        pass

    def warn(self, message: str) -> None:
        pass


def data_problems(
    folder: Path, config: DataConfig, tokenizer_folder: Path, *, rows: RowKind, cache: Path
) -> Iterator[tuple[str, LifecycleError | str]]:
    """Field of `config` and error, of all that the first seconds of `prepare` with the same arguments show; or, instead
    of an error, what there was no time to look at."""
    problems = [*_missing_splits(folder, config), *_bad_template(config, tokenizer_folder)]
    yield from problems
    if problems:
        return
    prepared = []
    for portion in portions(config):
        files = find_files(folder, portion.split)
        task = Preprocessing(
            portion, folder, files, config, tokenizer_folder, rows, Silent(), cache / PIECES_FOLDER, SECONDS
        )
        try:
            if folder_of_rows := _prepared(task, cache / CACHE_FOLDER):
                prepared.append(folder_of_rows)
        except OutOfTimeError as error:
            seen = f"{portion.name} rows after {error.last} were not looked at"
            yield "dataset", f"{seen}: there are {SECONDS:g} s for them"
        except TransientError as error:
            yield "dataset", f"{portion.name} rows could not be looked at: {error}"
        except (DataError, DownloadError, ModelError) as error:
            yield "dataset", type(error)(f"{portion.name} rows: {error}")
    try:
        _ = len(prepared) > 1 and check_held_out(*prepared)
    except DataError as error:
        yield "evaluation_split", error


def _prepared(task: Preprocessing, cache: Path) -> Path | None:
    """The folder of packed rows; None for a split that is too large to be kept."""
    if sum(map(size_bytes, task.files)) <= LARGE_BYTES:
        return prepare_portion(task, cache).folder
    with tempfile.TemporaryDirectory() as scratch:
        task.run(Path(scratch))
    return None


def _missing_splits(folder: Path, config: DataConfig) -> Iterator[tuple[str, LifecycleError]]:
    for field, split in (("split", config.split), ("evaluation_split", config.evaluation_split)):
        try:
            _ = split and find_files(folder, split)
        except DataError as error:
            yield field, error


def _bad_template(config: DataConfig, tokenizer_folder: Path) -> Iterator[tuple[str, LifecycleError]]:
    try:
        _ = config.chat_template and DocumentTokenizer(tokenizer_folder, config.chat_template, config.train_on).template
    except (DataError, ModelError) as error:
        yield "chat_template", error
