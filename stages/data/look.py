"""Checks of a stage's training data while a refresh is planned, and the preview that `lifecycle data` shows.

Data are prepared as the stage will prepare them, in the same cache, as far as a time limit allows.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stages.core.errors import DataError, DownloadError, LifecycleError, ModelError, TransientError
from stages.data.any_rows import check_formats
from stages.data.config import ROW_KINDS, DataConfig, RowKind
from stages.data.dataset import PackedDataset
from stages.data.files import find_files, portions
from stages.data.media.images import thumbnail
from stages.data.media.videos import first_frame
from stages.data.media_reference import MediaReference
from stages.data.mixture import joined
from stages.data.prepare import (
    BAD_ROWS,
    CACHE_FOLDER,
    PIECES_FOLDER,
    OutOfTimeError,
    Preprocessing,
    check_together,
    naming_dataset,
    prepare_portion,
)
from stages.data.seen_rows import check_held_out
from stages.data.summaries import (
    Bar,
    DataLook,
    DroppedRows,
    ShownDocument,
    ShownPicture,
    ShownPortion,
    ShownRow,
    TokenSpan,
)
from stages.data.tokenizer import DocumentTokenizer
from stages.models.facts import ModelFacts
from stages.models.media import Sound, Video
from stages.remote.pointers import size_bytes

if TYPE_CHECKING:
    from stages.models.media import Medium

CHECK_SECONDS = 20.0
"""Limit of CPU seconds for checking one split while a refresh is planned, so that a busy machine checks as much.

A split of more than `LARGE_BYTES` is not finished by then, and hashing it for the cache would be slow."""
LARGE_BYTES = 1 << 30


class NullReporter:
    """Receiver of progress and warnings that discards both, because the stage itself will report them."""

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None:
        pass

    def warn(self, message: str) -> None:
        pass


def data_problems(
    folder: Path, config: DataConfig, model: ModelFacts, *, rows: RowKind, cache: Path
) -> Iterator[tuple[str, LifecycleError | str]]:
    """Prepare a stage's data for some seconds and yield each problem found, with the field of `config` to blame."""
    problems = [*_missing_splits(folder, config), *_bad_template(config, model)]
    yield from problems
    if problems:
        return
    prepared = []
    for portion in portions(config):
        files = find_files(folder, portion.split)
        task = Preprocessing(
            portion, folder, files, config, model, rows, NullReporter(), cache / PIECES_FOLDER, CHECK_SECONDS
        )
        try:
            if folder_of_rows := _prepared(task, cache / CACHE_FOLDER):
                prepared.append(folder_of_rows)
        except OutOfTimeError as error:
            seen = f"{portion.name} rows after {error.last} were not looked at"
            yield "dataset", f"{seen}: there are {CHECK_SECONDS:g} s for them"
        except TransientError as error:
            yield "dataset", f"{portion.name} rows could not be looked at: {error}"
        except (DataError, DownloadError, ModelError) as error:
            yield "dataset", type(error)(f"{portion.name} rows: {error}")
    try:
        _ = len(prepared) > 1 and check_held_out(*prepared)
    except DataError as error:
        yield "evaluation_split", error


def _prepared(task: Preprocessing, cache: Path) -> Path | None:
    """Return the folder of a split's packed rows in the cache; None for a large split, which is only checked."""
    if sum(map(size_bytes, task.files)) <= LARGE_BYTES:
        return prepare_portion(task, cache).folder
    with tempfile.TemporaryDirectory() as scratch:
        task.run(Path(scratch))
    return None


def _missing_splits(folder: Path, config: DataConfig) -> Iterator[tuple[str, LifecycleError]]:
    for name, split in (("split", config.split), ("evaluation_split", config.evaluation_split)):
        try:
            _ = split and find_files(folder, split)
        except DataError as error:
            yield name, error


def _bad_template(config: DataConfig, model: ModelFacts) -> Iterator[tuple[str, LifecycleError]]:
    try:
        _ = config.chat_template and DocumentTokenizer(model.folder, config.chat_template, config.train_on).template
    except (DataError, ModelError) as error:
        yield "chat_template", error


LOOK_SECONDS = 10.0
"""Limit of CPU seconds for preparing data that is not in the cache, when `lifecycle data` shows it."""
MAX_SHOWN_TOKENS = 4096
"""Largest number of tokens of a packed row that `lifecycle data` shows."""
NUM_BARS = 16
MIN_REPEATED = 4
NUM_REASONS = 20


@dataclass(frozen=True)
class Visits:
    """First rows that a training will visit, and each dataset's share and number of epochs, for the data preview.

    rows: of the first step. shares: of all that is learned. epochs: passes. problems: why the training will be refused.
    """

    rows: Sequence[int]
    shares: Mapping[str, float] = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)
    problems: Sequence[str] = ()


def look_at(
    inputs: Mapping[str, Path],
    config: DataConfig,
    model: ModelFacts,
    *,
    rows: RowKind,
    visits: Callable[[PackedDataset], Visits],
    cache: Path,
    scratch: Path,
) -> DataLook:
    """Return a preview of training data: the rows of the first training step, and counts for each dataset.

    inputs: folders of artifacts by stage. visits: returns the visits for the training rows. scratch: for temporary
    files. Other arguments and errors as of `prepare`.
    """
    if config.is_mixture:
        check_formats(inputs, config, rows)
    shown: list[ShownPortion] = []
    training: dict[str, PackedDataset] = {}
    held_out: dict[str, PackedDataset] = {}
    warnings: list[str] = []
    for name, part in zip(config.names, config.parts.values(), strict=True):
        of = f" of {name}" if config.datasets else ""
        for portion, into in zip(portions(part), (training, held_out), strict=False):
            folder, so_far = inputs[part.dataset_stage] / "data", scratch / f"part-{portion.name}{of}"
            pieces = cache / PIECES_FOLDER
            with naming_dataset(name) if config.is_mixture else nullcontext():
                files = find_files(folder, portion.split)
                task = Preprocessing(
                    portion, folder, files, part, model, rows, NullReporter(), pieces, LOOK_SECONDS, so_far
                )
                into[name], unread_after = _opened(task, cache / CACHE_FOLDER, scratch)
            shown.append(_portion(f"{portion.name}{of}", into[name], part, unread_after))
        leak = check_held_out(training[name].folder, held_out[name].folder) if name in held_out else None
        warnings += [f"{name}: {leak}" if config.datasets else leak] if leak else []
    tokenizer = DocumentTokenizer(model.folder, config.chat_template, config.train_on)
    whole = joined(training)
    of_training = visits(whole)
    if not any(portion.unread_after for portion in shown):
        warnings += [*check_together(training, held_out), *of_training.problems]
        shown = [_with_visits(portion, of_training) for portion in shown]
    return DataLook(
        what=ROW_KINDS[rows].title,
        portions=tuple(shown),
        rows=tuple(_row(whole, row, tokenizer, ROW_KINDS[rows].documents) for row in of_training.rows),
        warnings=tuple(warnings),
    )


def _with_visits(portion: ShownPortion, visits: Visits) -> ShownPortion:
    name = portion.name.removeprefix("training of ")
    return portion.model_copy(update={"share": visits.shares.get(name), "epochs": visits.epochs.get(name)})


def _opened(task: Preprocessing, cache: Path, scratch: Path) -> tuple[PackedDataset, str | None]:
    """Return the dataset of packed rows; if the time limit ended reading early, also the place of the last row read."""
    assert task.part
    try:
        if sum(map(size_bytes, task.files)) <= LARGE_BYTES:
            return prepare_portion(task, cache), None
        whole = Path(tempfile.mkdtemp(dir=scratch))
        task.run(whole)
        return PackedDataset(whole, task.media), None
    except OutOfTimeError as error:
        return PackedDataset(task.part, task.media), str(error.last)


def _portion(name: str, dataset: PackedDataset, config: DataConfig, unread_after: str | None) -> ShownPortion:
    about = dataset.about
    return ShownPortion(
        name=name,
        **about.model_dump(
            include={
                "num_source_rows",
                "num_rows",
                "num_documents",
                "num_tokens",
                "num_target_tokens",
                "num_over_long",
                "num_bad_rows",
                "sequence_length",
                "warnings",
            }
        ),
        padding_fraction=dataset.padding_fraction,
        over_long=config.over_long,
        dropped=_dropped(dataset.folder / BAD_ROWS),
        lengths=histogram(dataset.document_lengths),
        unread_after=unread_after,
    )


def _dropped(bad_rows: Path) -> tuple[DroppedRows, ...]:
    """Return each reason why rows were dropped with its count, most frequent first; rare reasons are summed up."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    with bad_rows.open(encoding="utf-8") as stream:
        for row in map(json.loads, stream):
            counts[row["reason"]] += 1
            place = f"{row['file']}:{row['line']}" if "line" in row else f"{row['file']} row {row['row']}"
            examples.setdefault(row["reason"], place)
    commonest = counts.most_common()
    named = [
        DroppedRows(reason=reason, count=count, example=examples[reason]) for reason, count in commonest[:NUM_REASONS]
    ]
    if others := commonest[NUM_REASONS:]:
        count = sum(count for _, count in others)
        named.append(DroppedRows(reason=f"{len(others)} other reasons", count=count, example=examples[others[0][0]]))
    return tuple(named)


def histogram(lengths: NDArray[np.int64]) -> tuple[Bar, ...]:
    """Return a histogram of document lengths (int64 [num_documents], tokens) of at most `NUM_BARS` bars."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // NUM_BARS)  # rounded up
    # [bars]: shortest 3, width 2, lengths [3, 4, 6] -> [2, 1]
    counts = np.bincount((lengths - shortest) // width)
    firsts = range(shortest, longest + 1, width)
    return tuple(
        Bar(first=first, last=min(first + width - 1, longest), count=int(count))
        for first, count in zip(firsts, counts, strict=True)
    )


def _row(dataset: PackedDataset, row: int, tokenizer: DocumentTokenizer, names: Sequence[str]) -> ShownRow:
    labels, media = dataset.labels(row), dataset.media(row)
    pictures = dataset.pictures(row, tokenizer.processor) if any(media) else [[] for _ in media]
    documents, left = [], MAX_SHOWN_TOKENS
    for number, (tokens, loss) in enumerate(dataset.documents(row)):
        name = {True: "good answer", False: "bad answer"}[labels[number]] if labels else names[number % len(names)]
        shown = shown_document(name, tokens, loss, tokenizer, max(0, left))
        seen = zip(media[number], pictures[number], strict=True)
        documents.append(shown.model_copy(update={"pictures": tuple(shown_picture(*one, tokenizer) for one in seen)}))
        left -= len(tokens)
    num_padding = dataset.about.sequence_length - sum(one.num_tokens for one in documents)
    name, rows = next((name, rows) for name, rows in dataset.member_rows.items() if row in rows)
    return ShownRow(
        name=f"row {row - rows.start + 1} of {len(rows)}{f' of {name}' if name else ''}",
        documents=tuple(documents),
        num_padding_tokens=num_padding if dataset.about.packing else None,
    )


def shown_picture(reference: MediaReference, medium: Medium, tokenizer: DocumentTokenizer) -> ShownPicture:
    """Return a document's picture, or a video's first frame, for the data preview, with its size and tokens."""
    return ShownPicture(
        path=reference.path,
        width=reference.width,
        height=reference.height,
        num_tokens=tokenizer.processor.num_tokens(reference.size),
        **_of_kind(medium),
    )


def _of_kind(medium: Medium) -> dict[str, Any]:
    """Return the fields of a shown medium that differ by its kind."""
    if isinstance(medium, Sound):
        return {"seconds": medium.size.seconds}
    if isinstance(medium, Video):
        frames = {"seconds": medium.size.seconds, "num_frames": len(medium.frames)}
        return {**frames, "thumbnail": thumbnail(first_frame(medium))}
    return {"thumbnail": thumbnail(medium)}


def shown_document(
    name: str, tokens: NDArray[np.int32], loss: NDArray[np.bool_], tokenizer: DocumentTokenizer, max_tokens: int
) -> ShownDocument:
    """Return a document's first `max_tokens` tokens as text for the data preview, marking those with loss."""
    ids, flags = tokens[:max_tokens].tolist(), loss[:max_tokens].tolist()
    return ShownDocument(
        name=name,
        num_tokens=len(tokens),
        num_target_tokens=int(loss.sum()),
        pieces=tuple(_pieces(ids, flags, tokenizer)),
        num_hidden_tokens=len(tokens) - len(ids),
    )


def _pieces(ids: list[int], learned: list[bool], tokenizer: DocumentTokenizer) -> Iterator[TokenSpan]:
    """Yield runs of tokens of equal loss and kind as text; alone, some tokenizers would drop a run's first space.

    Many equal special tokens, as stand for a picture, are one with their number.
    """
    repeated = _repeated(ids)
    marks = [
        (flag, token in tokenizer.special_ids, token in tokenizer.special_ids and many)
        for token, flag, many in zip(ids, learned, repeated, strict=True)
    ]
    ends = [end for end in range(1, len(ids) + 1) if end == len(ids) or marks[end] != marks[end - 1]]
    begin, before = 0, ""
    for end in ends:
        text = tokenizer.decode(ids[:end])
        added = text[len(before) :] if text.startswith(before) else tokenizer.decode(ids[begin:end])
        if marks[begin][2]:
            added = f"{tokenizer.decode(ids[begin : begin + 1])} × {end - begin}"
        yield TokenSpan(text=added, learned=marks[begin][0], special=marks[begin][1])
        begin, before = end, text


def _repeated(ids: list[int]) -> list[bool]:
    """Return, for each token, whether it stands in a run of at least `MIN_REPEATED` equal ones."""
    flags: list[bool] = []
    for _, run in groupby(ids):
        num_tokens = len(list(run))
        flags += [num_tokens >= MIN_REPEATED] * num_tokens
    return flags
