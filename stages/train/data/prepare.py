"""A dataset's files → packed, tokenized documents, once: cached by content, every row checked before training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.train.config import DataConfig
from stages.train.data.dataset import PackedDataset


class Report(Protocol):
    """Where preparation tells what it does; a `StageContext` is one."""

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None: ...

    def milestone(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...


@dataclass(frozen=True)
class PreparedData:
    """What training reads. Other processes open the same with `PackedDataset(folder)`."""

    training: PackedDataset
    evaluation: PackedDataset | None
    """The held-out rows, when the config names a split or a fraction."""


def prepare(
    folder: Path,
    config: DataConfig,
    tokenizer_folder: Path,
    *,
    preference: bool,
    cache: Path,
    report: Report,
    bad_rows_file: Path,
) -> PreparedData:
    """Read, check, template, tokenize and pack the rows that `config` names, or find that done in `cache`.

    `folder` is the dataset artifact's `data/`, `tokenizer_folder` a model artifact's `model/`. With `preference` the
    rows are pairs, else plain training rows. Rows that `on_bad_rows: drop` leaves out are listed in `bad_rows_file`
    (JSONL; not written when there are none). Safe when several processes prepare the same: one works, the others wait.

    Raises DataError for data that cannot be learned from, ModelError for a folder without a usable tokenizer and
    ResourceError for a full disk.
    """
    raise NotImplementedError
