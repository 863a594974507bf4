"""A dataset's files → packed, tokenized documents, once: cached by content, every row checked before training."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from stages.core.contract import is_main_process
from stages.core.errors import RecipeError, full_disk_named
from stages.data.bad_rows import write_list
from stages.data.cache import cached_folder, content_key, file_digest
from stages.data.config import DataConfig
from stages.data.dataset import PackedDataset, is_complete
from stages.data.files import find_files
from stages.data.pipeline import BAD_ROWS, Pipeline, Report
from stages.data.portion import portions

PREPARATION_VERSION = 2
"""Raised when the same input would give other tokens, masks or rows than before."""

CACHE_FOLDER = "tokenized"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
TEMPLATE_FILES = ("chat_template*",)
OPTIONS = {
    "format",
    "train_on",
    "sequence_length",
    "packing",
    "over_long",
    "on_bad_rows",
    "max_bad_row_fraction",
}


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

    Raises DataError for data that cannot be learned from, ModelError for a folder without a usable tokenizer,
    RecipeError for options that contradict each other and ResourceError for a full disk.
    """
    if preference and config.train_on == "all":
        raise RecipeError("`train_on: all` does not go with `method: dpo`, which compares answers; remove it")
    datasets = [
        _prepare(
            Pipeline(
                portion,
                folder,
                find_files(folder, portion.split),
                config,
                tokenizer_folder,
                preference,
                report,
            ),
            cache / CACHE_FOLDER,
        )
        for portion in portions(config)
    ]
    if is_main_process():
        write_list(bad_rows_file, [dataset.folder / BAD_ROWS for dataset in datasets])
    return PreparedData(datasets[0], datasets[1] if len(datasets) > 1 else None)


def _prepare(pipeline: Pipeline, cache: Path) -> PackedDataset:
    with full_disk_named("writing tokenized data", cache):
        dataset = PackedDataset(cached_folder(cache, _key(pipeline), is_complete, pipeline.run))
    for warning in dataset.about.warnings:
        pipeline.report.warn(f"{pipeline.portion.name} data: {warning}")
    return dataset


def _key(pipeline: Pipeline) -> str:
    """Of all that decides the tokens, the rows and the list of bad rows."""
    template = pipeline.config.chat_template
    tokenizer_files = TOKENIZER_FILES if template else TOKENIZER_FILES + TEMPLATE_FILES
    return content_key(
        {
            "preparation": PREPARATION_VERSION,
            "libraries": {name: version(name) for name in ("tokenizers", "transformers", "numpy")},
            "files": {str(path.relative_to(pipeline.folder)): file_digest(path) for path in pipeline.files},
            "portion": [pipeline.portion.name, pipeline.portion.fraction],
            "options": pipeline.config.model_dump(mode="json", include=OPTIONS),
            "preference": pipeline.preference,
            "tokenizer": {
                path.name: file_digest(path)
                for pattern in tokenizer_files
                for path in sorted(pipeline.tokenizer_folder.glob(pattern))
                if path.is_file()
            },
            "chat_template": file_digest(template) if template and template.is_file() else None,
        }
    )
