"""What is used of the tokenizer of a model folder, which other processes get without importing Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from stages.core.errors import ModelError
from stages.data.growth import Growth, check_tokenizer_file

EXAMPLES = "a0."
"""Any text shows what is put around it; the first of these that the normalizer does not make huge."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """The attributes of a tokenizer of Transformers, under the same names.

    beginning: the special tokens before a text.
    """

    backend_tokenizer: Tokenizer
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    added_tokens_decoder: dict[int, AddedToken]
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    beginning: tuple[int, ...]


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Of a model artifact's `model/`. Raises ModelError when there is no usable tokenizer."""
    from transformers import AutoTokenizer

    check_tokenizer_file(folder)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing more special, and Transformers anything
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) does not say which characters a token stands "
            "for; convert it to a tokenizer.json"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    growth = Growth.of(tokenizer.backend_tokenizer)
    letter = next((letter for letter in EXAMPLES if growth.problem(letter) is None), None)
    if letter is None:
        raise ModelError(f"the tokenizer in {folder} {growth.problem(EXAMPLES[0])}")
    example = tokenizer(letter, return_special_tokens_mask=True)
    special = zip(example["input_ids"], example["special_tokens_mask"], strict=True)
    return LoadedTokenizer(
        tokenizer.backend_tokenizer,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.added_tokens_decoder,
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tuple(token for token, _ in takewhile(itemgetter(1), special)),
    )
