"""Probe of a model's tokenizer on one sentence, before anything slow starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError
from stages.models.model_folder import vocabulary_size
from stages.models.tokenizer_growth import check_tokenizer_file

SENTENCE = "The sum of 27 and 15 is 42, she said. "
REPETITIONS = 50
MAX_NORMALIZER_GROWTH = 2.0**20
"""Largest growth of a text by the normalizer. Some published ones reach a thousand; beyond this bound, a text that only
servers and benchmarks see could fill the memory.
"""
LEAST_SHARE = 0.5
"""Least share of the tokens of so many sentences, relative to those of one sentence times their number."""


def check_tokenizer(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about the tokenizer in a model folder whose `config.json` is given.

    Raises ModelError for one that cannot be loaded, drops or truncates text, or knows none of it.
    """
    from transformers import AutoTokenizer

    check_tokenizer_file(folder, SENTENCE * REPETITIONS, max_factor=MAX_NORMALIZER_GROWTH)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        once = tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
        often = tokenizer(SENTENCE * REPETITIONS, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # tokenizers raises nothing more special
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    problem = _problem(tokenizer, once, often, vocabulary_size(config))
    if problem:
        raise ModelError(f"the tokenizer in {folder} {problem}; take that of the model, or fetch it again")
    read = tokenizer.decode(once)
    if _letters(read) != _letters(SENTENCE):
        yield f"the tokenizer loses parts of texts: {SENTENCE!r} reads {read!r} in its tokens"
    if tokenizer.eos_token_id is None:
        yield "the tokenizer has no end-of-text token (`eos_token`): only a chat template can say where an answer ends"


def _problem(tokenizer: Any, once: list[int], often: list[int], size: int | None) -> str | None:
    if not once:
        return f"makes no tokens of {SENTENCE!r}"
    if all(token == tokenizer.unk_token_id for token in once):
        return f"knows nothing of {SENTENCE!r}: all its tokens are {tokenizer.unk_token!r}"
    if len(often) < LEAST_SHARE * REPETITIONS * len(once):
        return f"cuts texts: {REPETITIONS} times {len(once)} tokens are {len(often)}"
    if size is not None and max(once) >= size:
        return f"makes token {max(once)} of {SENTENCE!r}, beyond the model's vocabulary of {size}"
    if size is not None and (tokenizer.eos_token_id or 0) >= size:
        return (
            f"ends texts with token {tokenizer.eos_token_id} ({tokenizer.eos_token!r}), beyond the model's vocabulary "
            f"of {size}"
        )
    return None


def _letters(text: str) -> str:
    """Return letters and digits without case, since some tokenizers know one case only."""
    return "".join(filter(str.isalnum, text)).casefold()
