"""A dataset's files → packed, tokenized documents, once: cached by content, every row checked before training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.core.contract import is_main_process
from stages.core.errors import full_disk_named
from stages.data.bad_rows import write_list
from stages.data.cache import cached_folder, content_key, file_digest, is_intact, is_sealed, write_seal
from stages.data.config import DataConfig, RowKind
from stages.data.dataset import PackedDataset, is_complete
from stages.data.files import find_files, name_of
from stages.data.keys import key_parts
from stages.data.parts import FileState
from stages.data.portion import portions
from stages.data.preprocessing import BAD_ROWS, Preprocessing, Report
from stages.data.seen_rows import check_held_out

CACHE_FOLDER = "tokenized"
PIECES_FOLDER = "pieces"


@dataclass(frozen=True)
class PreparedData:
    """What training reads. Other processes open the same with `PackedDataset(folder)`."""

    training: PackedDataset
    evaluation: PackedDataset | None
    """The held-out rows, when the config names a split or a fraction."""

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document of all."""
        return max(dataset.longest_document for dataset in (self.training, self.evaluation) if dataset)


def prepare(
    folder: Path,
    config: DataConfig,
    tokenizer_folder: Path,
    *,
    rows: RowKind,
    cache: Path,
    report: Report,
    bad_rows_file: Path,
) -> PreparedData:
    """Read, check, template, tokenize and pack the rows that `config` names, or find that done in `cache`.

    `folder` is the dataset artifact's `data/`, `tokenizer_folder` a model artifact's `model/`. `rows`
    is what the training method learns from. Rows that `on_bad_rows: drop` leaves out are listed in `bad_rows_file`
    (JSONL; not written when there are none). Safe when several processes prepare the same: one works, the others wait.

    Raises DataError for data that cannot be learned from, ModelError for a folder without a usable tokenizer and
    ResourceError for a full disk.
    """
    datasets = [
        prepare_portion(
            Preprocessing(
                portion,
                folder,
                find_files(folder, portion.split),
                config,
                tokenizer_folder,
                rows,
                report,
                cache / PIECES_FOLDER,
            ),
            cache / CACHE_FOLDER,
        )
        for portion in portions(config)
    ]
    if is_main_process():
        write_list(bad_rows_file, [dataset.folder / BAD_ROWS for dataset in datasets])
    if len(datasets) > 1 and (warning := check_held_out(*(dataset.folder for dataset in datasets))):
        report.warn(warning)
    return PreparedData(datasets[0], datasets[1] if len(datasets) > 1 else None)


def prepare_portion(task: Preprocessing, cache: Path) -> PackedDataset:
    """One portion of what `prepare` prepares; `cache` is the folder of tokenized data."""
    names = {path: name_of(path, task.folder) for path in task.files}
    states = {path: FileState.of(path) for path in names}
    key = content_key(
        {
            **key_parts(task.portion, task.config, task.tokenizer_folder, task.rows),
            "files": {name: file_digest(path) for path, name in names.items()},
        }
    )

    damaged: set[Path] = set()

    def is_usable(folder: Path) -> bool:
        if is_complete(folder) and is_intact(folder):
            return True
        if is_sealed(folder):
            damaged.add(folder)
        return False

    def make(target: Path) -> None:
        task.run(target)
        for path, state in states.items():
            state.check(path, names[path])
        write_seal(target)

    with full_disk_named("writing tokenized data", cache):
        dataset = PackedDataset(cached_folder(cache, key, is_usable, make))
    for folder in damaged:
        task.report.warn(f"{task.portion.name} data: {folder} held other bytes than were written, and was made again")
    for warning in dataset.about.warnings:
        task.report.warn(f"{task.portion.name} data: {warning}")
    return dataset
