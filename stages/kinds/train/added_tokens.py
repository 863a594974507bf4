"""New tokens for a model before it is trained: a folder with a larger tokenizer, and with a row for each new token.

Training starts from this folder instead of the model's own, so that engines, data and export see one model, whose
tokenizer and weights agree. A new row is the mean of the rows of the old tokens: logits of a new token then begin near
the average, and take no probability from the right answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.cache import cached_folder
from stages.core.errors import ModelError, RecipeError
from stages.core.files import write_atomically
from stages.models.facts import CONFIG_FILE, ModelFacts, is_size
from stages.models.loading import build_model, head_of, load_config, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from stages.engines.export import Shapes

MOST_PADDING = 128
"""Largest multiple to which the number of rows is rounded up; kernels gain nothing by more."""
NUM_NAMED = 3


def with_added_tokens(
    start: ModelFacts, tokens: Sequence[str], room: Path, *, trust_remote_code: bool, weights: bool = True
) -> ModelFacts:
    """Return the start model with new tokens, in a folder of `room` that the first of several processes makes.

    weights: False for its tokenizer and config alone, to look at data. Raises RecipeError for a token that the
    tokenizer has, ModelError for a model whose weights cannot be extended.
    """
    if not tokens:
        return start

    def make(folder: Path) -> None:
        from stages.engines.export import copy_all_but_weights  # and torch, which takes seconds

        copy_all_but_weights(start.folder, folder)
        old, new_ids = _extend_tokenizer(start.folder, tokens, folder)
        rows = _num_rows(start, max(new_ids) + 1)
        config = _with_vocab_size(start, rows)
        if weights:
            _write_weights(start, folder, rows, (old, new_ids), trust_remote_code=trust_remote_code)
        write_atomically(folder / CONFIG_FILE, json.dumps(config, indent=2))

    name = "model-with-added-tokens" if weights else "tokenizer-with-added-tokens"
    return ModelFacts(cached_folder(room, name, Path.is_dir, make))


def _extend_tokenizer(source: Path, tokens: Sequence[str], target: Path) -> tuple[int, list[int]]:
    """Write the tokenizer with new tokens into `target`; return the number of old tokens, and the new ids."""
    from tokenizers import AddedToken

    tokenizer = load_tokenizer(source)
    num_old = len(tokenizer)
    if known := [token for token in tokens if token in tokenizer.get_vocab()]:
        raise RecipeError(
            f"data.add_tokens: the tokenizer has {', '.join(map(repr, known[:NUM_NAMED]))} already; remove it there"
        )
    # Not special: text that holds them is encoded with them, and decoded with them.
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    tokenizer.save_pretrained(target)
    return num_old, list(tokenizer.convert_tokens_to_ids(list(tokens)))


def _num_rows(start: ModelFacts, least: int) -> int:
    """Return the number of rows of the embedding: as before if that is enough, else a multiple as it was before."""
    rows = start.vocabulary_size
    if rows is None:
        raise ModelError(f"data.add_tokens: {start.folder / CONFIG_FILE} has no `vocab_size`; add them by hand")
    multiple = min(rows & -rows, MOST_PADDING)  # the largest power of 2 that divides it
    return rows if least <= rows else -(-least // multiple) * multiple


def _with_vocab_size(start: ModelFacts, rows: int) -> dict[str, Any]:
    """Return a model's config with another `vocab_size`, wherever it or its text part has one.

    Also with another number of rows of an embedding for each layer, which Gemma 3n has. Raises ModelError if that has
    fewer than tokens, as published Gemma 3n has: new ones would have no row there.
    """
    sizes = {name for name, value in start.fields.items() if name.startswith("vocab_size") and is_size(value)}
    if odd := sorted(name for name in sizes if start.fields[name] != start.vocabulary_size):
        raise ModelError(
            f"data.add_tokens: {odd[0]} is {start.fields[odd[0]]} in {start.folder / CONFIG_FILE}, and vocab_size is "
            f"{start.vocabulary_size}: new tokens would have no row in that table; take another model, or tokens that "
            "the tokenizer has"
        )

    def resized(fields: Mapping[str, Any]) -> dict[str, Any]:
        text = fields.get("text_config")
        inner = {"text_config": resized(text)} if isinstance(text, Mapping) else {}
        return {**fields, **inner, **dict.fromkeys(sizes & fields.keys(), rows)}

    return resized(start.config)


def _write_weights(
    start: ModelFacts, folder: Path, rows: int, tokens: tuple[int, list[int]], *, trust_remote_code: bool
) -> None:
    """Write the start model's weights, with `rows` rows where there is one a token, one weight at a time."""
    from stages.engines.export import ShardWriter, weight_shapes
    from stages.models.carried_weights import read_carried

    stored = weight_shapes(start.folder)
    per_token = _weights_per_token(start, stored, rows, trust_remote_code=trust_remote_code)
    writer = ShardWriter(folder)
    for name, weight in read_carried(start.folder, stored.keys()):
        writer.add(name, _extended(weight, rows, *tokens) if name in per_token else weight)
    writer.finish()


def _weights_per_token(start: ModelFacts, stored: Shapes, rows: int, *, trust_remote_code: bool) -> set[str]:
    """Return the names in files of the weights with a row for each token, such as the embedding and the head.

    They are those whose shape changes in the model, built without weights, once it has another number of tokens.
    """
    from stages.engines.export import own_weight_shapes
    from stages.models.carried_weights import carried_names

    old_rows = start.vocabulary_size
    assert old_rows
    shapes = []
    for size in (old_rows, rows if rows != old_rows else old_rows + MOST_PADDING):
        config = load_config(start.folder, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        for name in [name for name in vars(text) if name.startswith("vocab_size")]:
            setattr(text, name, size)
        model = build_model(config, head=head_of(config), trust_remote_code=trust_remote_code)
        shapes.append(own_weight_shapes(model, start.folder))
    before, after = shapes
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if odd := [name for name in sorted(changed) if before.get(name, (0,))[0] != old_rows or name not in stored]:
        raise ModelError(
            f"data.add_tokens: {', '.join(odd[:NUM_NAMED])} of {type(model).__name__} depends on the number of tokens, "
            "but has no row for each; expected embeddings and a head alone; take another model, or tokens that the "
            "tokenizer has"
        )
    sizes = {before[name] for name in changed}
    # A head that is the embedding may be in the files, too, and MTP layers have copies of both.
    beside = (stored.keys() - before.keys()) & {*(model.all_tied_weights_keys or {}), *carried_names(model, stored)}
    return changed | {name for name in beside if stored[name] in sizes}


def _extended(weight: Tensor, rows: int, num_old: int, new_ids: Sequence[int]) -> Tensor:
    """Return a weight [old rows, …] with more rows; those of new tokens and padding are the mean of old tokens'."""
    mean = weight[:num_old].float().mean(0).to(weight.dtype)
    extended = weight.new_empty((rows, *weight.shape[1:]))
    extended[: len(weight)] = weight
    extended[len(weight) :] = mean
    extended[list(new_ids)] = mean  # of which some may take rows that were padding
    return extended
