"""Media of packed documents: a batch's inputs of them, and the arguments that a model's decoder takes.

Features are made by document, as their processor would alone; positions, too. A picture's tokens see each other both
ways in some architectures (`Blocks`); which ones, `fsdp/probe.py` finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from stages.data.batch import Batch, MediaInputs, ModelInputs
from stages.models.processor import MediaProcessor

if TYPE_CHECKING:
    from stages.models.media import Medium

Blocks = Literal["in all layers", "in windows"] | None
"""Layers in which the tokens of a picture see each other both ways; None: in none, attention is causal."""


def with_media(batch: Batch, pictures: Sequence[Sequence[Medium]], processor: MediaProcessor) -> Batch:
    """Return the batch with its documents' media as inputs of the model.

    pictures: media of each of the batch's documents, in order, pictures in RGB.
    """
    assert len(pictures) == batch.documents.count, f"{len(pictures)} lists for {batch.documents.count} documents"
    features = [processor.features(media, as_bytes=True) for media in pictures]
    seen = with_features(batch, features, processor)
    assert seen.inputs.media
    patches = processor.patches_by_tower([one.size for media in pictures for one in media], features)
    return replace(seen, inputs=replace(seen.inputs, media=replace(seen.inputs.media, patches=patches)))


def with_features(batch: Batch, features: Sequence[Mapping[str, Tensor]], processor: MediaProcessor) -> Batch:
    """Return the batch with the features of its documents' media, one mapping for each document."""
    inputs, documents = batch.inputs, batch.documents
    shape = inputs.input_ids.shape
    types = processor.token_types(inputs.input_ids)
    segments = inputs.input_ids.flatten().split(list(documents.lengths))
    starts = torch.tensor([0, *documents.lengths[:-1]]).cumsum(0)
    numbers = documents.ids.flatten()[starts].tolist()  # of padding: from `count` on
    spatial = [
        processor.spatial_positions(ids, features[number] if number < documents.count else {})
        for ids, number in zip(segments, numbers, strict=True)
    ]
    positions = torch.cat([one for one in spatial if one is not None], 1).view(3, *shape) if any_of(spatial) else None
    merged, runs = processor.merged(features), _runs(types.flatten(), documents.lengths)
    statistics = {name: one for name, one in processor.pixel_statistics.items() if _is_bytes(merged.get(name))}
    media = MediaInputs(merged, types, positions, runs, pixel_statistics=statistics)
    return replace(batch, inputs=replace(inputs, media=media))


def _is_bytes(feature: Tensor | None) -> bool:
    return feature is not None and feature.dtype == torch.uint8


def any_of(spatial: Sequence[Tensor | None]) -> bool:
    """Return whether there are positions in pictures; a model has them for all documents, or for none."""
    return any(one is not None for one in spatial)


def block_numbers(media: MediaInputs, num_tokens: int) -> Tensor:
    """Return the number of the run of picture tokens that each token is in, else -1: int64 [tokens] on the host."""
    numbers = torch.full((num_tokens,), -1)
    for number, (first, end) in enumerate(media.runs):
        numbers[first:end] = number
    return numbers


def position_arguments(decoder: Any, inputs: ModelInputs, arrange: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the decoder's arguments of positions and of kinds of tokens.

    arrange: makes of a value of each token, [rows, sequence], what the decoder gets, [decoder's rows, length].
    """
    positions, media = arrange(inputs.position_ids), inputs.media
    if media is None:
        return {"position_ids": positions}
    if media.spatial_positions is not None:
        # [4, rows, length]: positions in the text, which attention looks at, then in time, height and width
        positions = torch.stack([positions, *map(arrange, media.spatial_positions)])
    accepted = signature(decoder.forward).parameters
    names = [name for name in ("mm_token_type_ids", "token_type_ids") if name in accepted]
    return {"position_ids": positions} | {name: arrange(media.token_types) for name in names}


def _runs(types: Tensor, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of tokens that stand for pictures or videos, each within a document. types: int64 [tokens]."""
    changes = pad(types, (1, 0))[:-1] != types
    changes[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    firsts = changes.nonzero().flatten().tolist()
    ends = [*firsts[1:], len(types)]
    return [(first, end) for first, end in zip(firsts, ends, strict=True) if types[first] in (1, 2)]
