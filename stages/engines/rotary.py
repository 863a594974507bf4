"""Rotary positions whose frequencies depend on a text's length, in rows that pack several texts.

`longrope` (Phi-3) and dynamic NTK use other frequencies for texts beyond the length that the model was first trained
on. Transformers looks at the longest text of a batch (with dynamic NTK: so far), so that a short document packed beside
a long one would be rotated as if it were long; here each document gets the angles that it has alone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stages.models.facts import rotates_by_length

LENGTH_FIELDS = ("max_position_embeddings", "original_max_position_embeddings")
"""Names of config fields, also in `rope_parameters`, that hold a text length in tokens."""

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of rotary angles, each [rows, sequence, width]."""

_whole: ContextVar[tuple[Tensor, slice] | None] = ContextVar("whole", default=None)


def rotate_by_document(decoder: nn.Module) -> None:
    """Make length-dependent rotary embeddings rotate each document, which begins where a position is 0, as if alone."""
    for module in _length_dependent(decoder):
        # An attribute of the instance: other models of the same class keep their forward.
        module.forward = partial(_by_document, module.forward)


def rotates_by_document_length(decoder: nn.Module) -> bool:
    """Return whether the decoder's rotary angles depend on a text's length, or on other texts in the batch."""
    return bool(_length_dependent(decoder))


@contextmanager
def rotating_part(position_ids: Tensor, part: slice) -> Iterator[None]:
    """Let rows in this context be a part of longer ones, [rows, sequence], by whose documents angles are computed."""
    token = _whole.set((position_ids, part))
    try:
        yield
    finally:
        _whole.reset(token)


@contextmanager
def long_from(decoder: nn.Module, num_tokens: int) -> Iterator[None]:
    """Treat texts of over `num_tokens` tokens as long in this context, to test rotary angles with short texts.

    The last text must be a short one, which leaves the frequencies as they were.
    """
    restore: list[Callable[[], None]] = []
    for module in _length_dependent(decoder):
        kept = {name: getattr(module, name) for name in ("original_max_seq_len", "max_seq_len_cached")}
        restore.append(partial(module.__dict__.update, kept))
        module.__dict__.update(dict.fromkeys(kept, num_tokens))
        parameters = module.config.rope_parameters
        kinds = (value for value in parameters.values() if isinstance(value, dict))  # where layers are of several kinds
        for fields in (vars(module.config), parameters, *kinds):
            lengths = {name: fields[name] for name in LENGTH_FIELDS if fields.get(name)}
            restore.append(partial(fields.update, lengths))
            fields.update(dict.fromkeys(lengths, num_tokens))
    try:
        yield
    finally:
        # Latest first: modules may share a config, of which the later module has kept values already changed.
        for undo in reversed(restore):
            undo()


def _length_dependent(decoder: nn.Module) -> list[Any]:
    return [module for module in decoder.modules() if any(map(rotates_by_length, _rope_types(module)))]


def _rope_types(module: nn.Module) -> list[str]:
    """Return the rope types of a rotary embedding, one for each kind of layer; empty for other modules."""
    found = getattr(module, "rope_type", None)
    return [found] if isinstance(found, str) else list(found.values()) if isinstance(found, Mapping) else []


def _by_document(
    forward: Callable[..., Angles], like: Tensor, position_ids: Tensor, *kind: Any, **kinds: Any
) -> Angles:
    """Return rotary angles for `position_ids` [rows, sequence], by each document's own length. kind: of the layers."""
    whole = _whole.get()
    positions = (whole[0] if whole else position_ids).flatten()
    starts = (positions == 0).nonzero().squeeze(1)
    # starts [0, 3] of 5 positions -> lengths [3, 2]
    lengths = torch.diff(starts, append=starts.new_tensor([len(positions)]))
    lengths_by_token = lengths.repeat_interleave(lengths)  # [3, 2] -> [3, 3, 3, 2, 2]
    cosines = sines = positions.new_empty(0)
    for length in lengths.unique().tolist():
        forward(like, positions.new_zeros(1, 1), *kind, **kinds)  # resets the frequencies that a longer text has set
        # [1, length, width]: angles of one document, for all of this length
        found = forward(like, torch.arange(length, device=positions.device)[None], *kind, **kinds)
        if not cosines.numel():
            cosines, sines = (angles.new_empty(len(positions), angles.shape[-1]) for angles in found)
        tokens = (lengths_by_token == length).nonzero().squeeze(1)  # of all documents of this length
        cosines[tokens], sines[tokens] = (angles[0, positions[tokens]] for angles in found)
    if whole:
        cosines, sines = cosines[whole[1]], sines[whole[1]]
    # [rows × sequence, width] → [rows, sequence, width]
    return cosines.view(*position_ids.shape, -1), sines.view(*position_ids.shape, -1)
