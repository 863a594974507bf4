"""What decides the tokens of a dataset, for keys of caches."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from pydantic import JsonValue

from stages.data.cache import file_digest
from stages.data.config import DataConfig, RowKind
from stages.data.portion import Portion

PREPARATION_VERSION = 10
"""Raised when the same input would give other tokens, masks or rows than before."""

TOKENIZER_FILES = (
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
TEMPLATE_FILES = ("chat_template*",)
OPTIONS = {
    "format",
    "columns",
    "template_date",
    "train_on",
    "turns",
    "sequence_length",
    "special_tokens_in_content",
    "packing",
    "over_long",
    "on_bad_rows",
    "max_bad_row_fraction",
}


def key_parts(portion: Portion, config: DataConfig, tokenizer_folder: Path, rows: RowKind) -> dict[str, JsonValue]:
    """All that decides the tokens, the rows and the list of bad rows, but for the data files."""
    template = config.chat_template
    tokenizer_files = TOKENIZER_FILES if template else TOKENIZER_FILES + TEMPLATE_FILES
    return {
        "preparation": PREPARATION_VERSION,
        "libraries": {name: version(name) for name in ("tokenizers", "transformers", "numpy")},
        "portion": [portion.name, portion.fraction],
        "options": config.model_dump(mode="json", include=OPTIONS),
        "preference": {"examples": False, "pairs": True}.get(rows, rows),  # as caches that exist have it
        "tokenizer": {
            path.name: file_digest(path)
            for pattern in tokenizer_files
            for path in sorted(tokenizer_folder.glob(pattern))
            if path.is_file()
        },
        "chat_template": file_digest(template) if template and template.is_file() else None,
    }
