"""Documents with drawn pictures, by which an architecture that sees is probed and its weights are checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stages.core.errors import ModelError
from stages.data.batch import Batch
from stages.engines.fsdp.packed import packed
from stages.engines.media import with_features
from stages.models import loading
from stages.models.processor import DRAWN, MediaProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

SMALLEST = (32, 32)
"""Size in pixels of the picture that a process's tower is given where its documents have none."""
TEXT = 5
"""Number of tokens of text before a document's picture, and behind it."""
SMALL_VOCABULARY = 64
NUM_TEXT_IDS = 40
"""Number of ids that a slice's documents have for text; the ids from there on are those of pictures."""
KEPT_LAYERS = 2
"""Number of layers of a slice's tower: the first two show how pictures beside each other are kept apart."""


@dataclass(frozen=True)
class DrawnDocuments:
    """Two documents, each with a drawn picture, and another first one, which differs in its picture alone."""

    processor: MediaProcessor

    @cached_property
    def ids(self) -> list[Tensor]:
        """Token ids of the two documents, int64 [tokens]."""
        taken = self.processor.media_token_ids
        text = [one for one in range(8, 8 + 4 * TEXT + len(taken)) if one not in taken]
        return [
            torch.tensor([*text[:TEXT], *self.processor.token_ids(size), *text[number : number + TEXT]])
            for number, size in enumerate(DRAWN, TEXT)
        ]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    @cached_property
    def features(self) -> list[Mapping[str, Tensor]]:
        """Features of the pictures of the first document, the second, and another first one."""
        return [
            self.processor.features([_noise(size, seed)]) for seed, size in enumerate((DRAWN[0], DRAWN[1], DRAWN[0]))
        ]

    @cached_property
    def smallest(self) -> Mapping[str, Tensor]:
        """Features of a small picture, for processes whose documents have none."""
        return self.processor.merged([self.processor.features([_noise(SMALLEST, 0)])])

    def batches(self, dtype: torch.dtype) -> list[Batch]:
        """Return both documents packed in a row: as they are, and with another first one."""
        first, second, other = self.features
        return [self._batch(self.ids, [begin, second], dtype) for begin in (first, other)]

    def alone(self, dtype: torch.dtype) -> list[Batch]:
        """Return each of the two documents in a batch of its own."""
        return [
            self._batch([ids], [features], dtype) for ids, features in zip(self.ids, self.features[:2], strict=True)
        ]

    def arguments(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return a model's arguments of one document as Transformers' user gives them: without positions."""
        media = batch.inputs.media
        assert media
        accepted = signature(model.forward).parameters
        types = {name: media.token_types for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
        return {"input_ids": batch.inputs.input_ids, **media.features, **types}

    def _batch(self, ids: Sequence[Tensor], features: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> Batch:
        in_dtype = [
            {name: value.to(dtype) if value.is_floating_point() else value for name, value in one.items()}
            for one in features
        ]
        return with_features(packed(ids), in_dtype, self.processor)


def drawn_documents(folder: Path, config: Any, *, trust_remote_code: bool) -> DrawnDocuments:
    """Return documents with drawn pictures for the model of a folder; raise ModelError for one that cannot see."""
    processor = MediaProcessor.of(folder, trust_remote_code=trust_remote_code)
    if processor is None or loading.class_with_head(config, "pictures") is None:
        lacks = "no processor" if processor is None else "no class in Transformers' AutoModelForImageTextToText"
        raise ModelError(
            f"the rows have pictures, and the model in {folder} cannot see them: it has {lacks}; take a model of text "
            "and images with its processor files, or rows without pictures"
        )
    return DrawnDocuments(processor)


@contextmanager
def without_pictures(causal_lm: Any, drawn: DrawnDocuments | None, batch: Batch) -> Iterator[None]:
    """Run the tower on a small picture in this context if the batch has none, to add nothing: 0 times what it gives.

    All processes then gather and reduce the tower's weights, in the same order: after the embedding of the tokens.
    """
    media = batch.inputs.media
    if drawn is None or media is None or media.features:
        yield
        return
    embedding = causal_lm.get_input_embeddings()
    smallest = {name: value.to(media.token_types.device) for name, value in drawn.smallest.items()}
    # Llama 4's has an option without default, which its forward pass leaves open.
    asked = signature(causal_lm.get_image_features).parameters.values()
    names = [one.name for one in asked if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    arguments = {**dict.fromkeys(names), **smallest}

    def add_nothing(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
        handle.remove()  # the tower may embed its own tokens by the same module
        return embedded + 0.0 * sum(leaf.sum() for leaf in _leaves(causal_lm.get_image_features(**arguments)))

    handle = embedding.register_forward_hook(add_nothing)
    try:
        yield
    finally:
        handle.remove()


def _leaves(value: Any) -> list[Tensor]:
    """Return all tensors of floating point numbers within what a tower gave."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [leaf for part in value.values() for leaf in _leaves(part)] if isinstance(value, Mapping) else []


def with_small_ids(batch: Batch, drawn: DrawnDocuments, config: Any) -> Batch:
    """Return the batch with token ids of a slice's small vocabulary, whose config has been changed to it."""
    ids, picture = batch.inputs.input_ids, picture_id(drawn.processor.config)
    small = torch.where(ids == picture, picture_id(config), 1 + ids % NUM_TEXT_IDS)
    return replace(batch, inputs=replace(batch.inputs, input_ids=small))


def picture_id(config: Any) -> int:
    """Return the id of the token whose embeddings a model replaces by those of a picture."""
    found = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)


def follow_width(config: Any, width: int) -> None:
    """Make the parts of a model that sees follow its text part, which has been made small. width: that it had."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return
    # What a tower gives is as wide as the text part: by a field of this name, or in Qwen2-VL's merger.
    for name in ("out_hidden_size", "hidden_size"):
        if getattr(vision, name, None) == width:
            setattr(vision, name, config.get_text_config().hidden_size)
            break
    ids = sorted(name for name in vars(config) if name.endswith(("token_id", "token_index")))
    large = [
        name for name in ids if isinstance(getattr(config, name), int) and getattr(config, name) >= SMALL_VOCABULARY
    ]
    for number, name in enumerate(large, 1):
        setattr(config, name, SMALL_VOCABULARY - number)


def cut_tower(causal_lm: Any) -> None:
    """Keep only the first layers of a model's tower of pictures."""
    tower = causal_lm.get_encoder(modality="image")
    for module in tower.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len({type(one) for one in child}) == 1:
                del child[KEPT_LAYERS:]


def _noise(size: tuple[int, int], seed: int) -> Image:
    from PIL.Image import frombytes

    noise = torch.randint(256, (3 * size[0] * size[1],), generator=torch.Generator().manual_seed(seed))
    return frombytes("RGB", size, bytes(noise.tolist()))
