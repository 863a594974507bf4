"""Whether the files of a tokenizer can go with a model, without loading it: milliseconds, no Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError
from stages.core.redaction import quoted
from stages.models.config_check import vocabulary_size
from stages.models.json_object import read_json_object

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
SPECIAL = ("bos_token", "eos_token", "pad_token")
NUM_NAMED = 3


def check_tokenizer_files(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """What is unusual about them.

    Raises ModelError when there are none, one cannot be read, or one has tokens that the model does not.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the tokenizer's files into it"
        )
    files = ("tokenizer.json", "tokenizer_config.json")
    tokenizer, about = (read_json_object(folder / name) if (folder / name).is_file() else {} for name in files)
    size = vocabulary_size(config)
    if size is None:
        return
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or () if _is_token(entry)}
    ordinary = {token: number for token, number in _vocabulary(tokenizer).items() if token not in added}
    special = {str(_text(about.get(name))) for name in SPECIAL}
    needed = {**ordinary, **{token: number for token, number in added.items() if token in special}}
    if beyond := _beyond(needed, size):
        raise ModelError(
            f"the tokenizer in {folder} has {len(beyond)} tokens beyond the model's vocabulary of {size} "
            f"({_named(beyond)}); it is another model's, or the embedding has to be enlarged"
        )
    if beyond := _beyond(added, size):
        yield (
            f"the tokenizer has {len(beyond)} added tokens beyond the model's vocabulary of {size} ({_named(beyond)}): "
            "no text may hold them"
        )


def other_end(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Warn of a tokenizer whose end of a text is not one that generation stops at, by the files of both."""
    files = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    tokenizer, about, generation = (
        read_json_object(folder / name) if (folder / name).is_file() else {} for name in files
    )
    token = _text(about.get("eos_token"))
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or () if _is_token(entry)}
    number = {**_vocabulary(tokenizer), **added}.get(token) if isinstance(token, str) else None
    where = "generation_config.json" if generation.get("eos_token_id") is not None else "config.json"
    ends = (generation if where == "generation_config.json" else config).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if number is None or ends == [None] or number in ends:
        return
    names = {id_: text for text, id_ in {**_vocabulary(tokenizer), **added}.items() if id_ in ends}
    stops = ", ".join(f"{quoted(names[end], 40)} ({end})" if end in names else str(end) for end in ends)
    yield (
        f"the tokenizer ends texts with {quoted(token, 40)} ({number}; `eos_token` in tokenizer_config.json), and "
        f"generation stops at {stops} (`eos_token_id` in {where}): a model that learns plain texts learns an end at "
        "which no server stops; correct the file that is wrong"
    )


def tokens_of(folder: Path) -> set[str] | None:
    """Return the tokens in a folder's `tokenizer.json`; None where it has no such file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = read_json_object(file)
    added = (entry["content"] for entry in tokenizer.get("added_tokens") or () if _is_token(entry))
    return {*_vocabulary(tokenizer), *added}


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token → number; of a Unigram model, which lists its tokens in their order, too."""
    model = tokenizer.get("model")
    found = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(found, list):
        return {str(entry[0]): number for number, entry in enumerate(found) if isinstance(entry, list) and entry}
    return {token: number for token, number in (found or {}).items() if isinstance(number, int)}


def _is_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int)


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _beyond(tokens: Mapping[str, int], size: int) -> dict[str, int]:
    return {token: number for token, number in tokens.items() if number >= size}


def _named(tokens: Mapping[str, int]) -> str:
    return ", ".join(f"{token!r} is {number}" for token, number in list(tokens.items())[:NUM_NAMED])
