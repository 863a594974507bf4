"""Documents with drawn media, by which an architecture that sees is probed and its weights are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.core.errors import ModelError
from stages.data.batch import Batch
from stages.engines.fsdp.packed import packed
from stages.engines.media import with_features
from stages.models import loading
from stages.models.media import MediaKind, MediaSize, in_words
from stages.models.parts import TOWERS, parts_of, towers_of
from stages.models.processed.registry import PROCESSED
from stages.models.processor import MediaProcessor

TEXT = 5
"""Number of tokens of text before a document's media, and behind them."""
SMALL_VOCABULARY = 64
NUM_TEXT_IDS = 40
"""Number of ids that a slice's documents have for text; the ids from there on are those of pictures."""
KEPT_LAYERS = 2
"""Number of layers of a slice's tower: the first two show how pictures beside each other are kept apart."""


@dataclass(frozen=True)
class DrawnDocuments:
    """Two documents, each with a drawn medium of each kind, and another first one, which differs in its media alone."""

    processor: MediaProcessor
    kinds: Sequence[MediaKind] = ("image",)

    @cached_property
    def ids(self) -> list[Tensor]:
        """Token ids of the two documents, int64 [tokens]; one of text stands before each medium."""
        taken = self.processor.media_token_ids
        before, *text = [one for one in range(7, 8 + 4 * TEXT + len(taken)) if one not in taken]
        return [
            torch.tensor(
                [
                    *text[:TEXT],
                    *(token for size in sizes for token in (before, *self.processor.token_ids(size))),
                    *text[number : number + TEXT],
                ]
            )
            for number, sizes in enumerate(self._sizes, TEXT)
        ]

    @property
    def _sizes(self) -> list[list[MediaSize]]:
        """Sizes of each of the two documents' media."""
        return [[PROCESSED[kind].drawn_sizes[number] for kind in self.kinds] for number in range(2)]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    @cached_property
    def features(self) -> list[Mapping[str, Tensor]]:
        """Features of the media of the first document, the second, and another first one."""
        first, second = self._sizes
        draw = self.processor.drawn
        return [
            self.processor.features([draw(size, seed) for size in sizes])
            for seed, sizes in enumerate((first, second, first))
        ]

    @cached_property
    def smallest(self) -> Mapping[MediaKind, Mapping[str, Tensor]]:
        """Features of a small medium of each kind, for processes whose documents have none of it."""
        draw, take = self.processor.drawn, self.processor.features
        return {kind: self.processor.merged([take([draw(PROCESSED[kind].smallest)])]) for kind in self.kinds}

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
        return {"input_ids": batch.inputs.input_ids, **media.arguments, **types}

    def _batch(self, ids: Sequence[Tensor], features: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> Batch:
        in_dtype = [
            {name: value.to(dtype) if value.is_floating_point() else value for name, value in one.items()}
            for one in features
        ]
        return with_features(packed(ids), in_dtype, self.processor)


def drawn_documents(
    folder: Path, config: Any, kinds: Sequence[MediaKind], *, trust_remote_code: bool
) -> DrawnDocuments:
    """Return documents with drawn media for the model of a folder; raise ModelError for one that cannot read them."""
    processor = MediaProcessor.of(folder, trust_remote_code=trust_remote_code)
    if processor is None or loading.class_with_head(config, "pictures") is None:
        lacks = "no processor" if processor is None else "no class in Transformers' AutoModelForMultimodalLM"
        raise ModelError(
            f"the rows have {in_words(kinds)}, and the model in {folder} cannot read them: it has {lacks}; take a "
            f"model that does, with its processor files, or rows without {in_words(kinds)}"
        )
    return DrawnDocuments(processor, kinds)


@contextmanager
def without_pictures(causal_lm: Any, drawn: DrawnDocuments | None, batch: Batch) -> Iterator[None]:
    """Run towers on small media in this context, of kinds that the batch lacks, to add nothing: 0 times what they give.

    All processes then gather and reduce the towers' weights, in the same order: after the embedding of the tokens.
    """
    media = batch.inputs.media
    lacked = [] if drawn is None or media is None else _lacked(drawn, media.features)
    if not lacked or media is None:
        yield
        return
    calls = [_call_of_tower(causal_lm, kind, given, media.token_types.device) for kind, given in lacked]
    embedding = causal_lm.get_input_embeddings()

    def add_nothing(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
        handle.remove()  # the tower may embed its own tokens by the same module
        return embedded + 0.0 * sum(leaf.sum() for call in calls for leaf in _leaves(call()))

    handle = embedding.register_forward_hook(add_nothing)
    try:
        yield
    finally:
        handle.remove()


def _lacked(drawn: DrawnDocuments, features: Mapping[str, Tensor]) -> list[tuple[MediaKind, Mapping[str, Tensor]]]:
    """Return the kinds of media that a batch's features lack, each with the features of a small one."""
    return [(kind, smallest) for kind, smallest in drawn.smallest.items() if features.keys().isdisjoint(smallest)]


def _call_of_tower(
    causal_lm: Any, kind: MediaKind, features: Mapping[str, Tensor], device: torch.device
) -> Callable[[], Any]:
    """Return the call of a model's tower with these features."""
    tower = getattr(causal_lm, f"get_{kind}_features", None)
    if tower is None:  # Qwen2-Audio's class has none: its tower and projector are run by its forward pass alone
        (module,) = (one for part, one in towers_of(causal_lm).items() if TOWERS[part] == kind)
        asked = signature(module.forward).parameters
        given = {name: value.to(device) for name, value in features.items() if name in asked}
        return lambda: [module(**given), [*parts_of(causal_lm)["projector"].values()]]
    asked = signature(tower).parameters
    # Llama 4's has an option without default, which its forward pass leaves open.
    named = [one.name for one in asked.values() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    given = {name: value.to(device) for name, value in features.items() if name in asked}
    return partial(tower, **{**dict.fromkeys(named), **given})


def _leaves(value: Any) -> list[Tensor]:
    """Return all tensors of floating point numbers within what a tower gave."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [leaf for part in value.values() for leaf in _leaves(part)] if isinstance(value, Mapping) else []


def with_small_ids(batch: Batch, drawn: DrawnDocuments, config: Any) -> Batch:
    """Return the batch with token ids of a slice's small vocabulary, whose config has been changed to it."""
    ids = batch.inputs.input_ids
    small = 1 + ids % NUM_TEXT_IDS
    for kind in drawn.kinds:
        small = torch.where(ids == media_id(drawn.processor.config, kind), media_id(config, kind), small)
    return replace(batch, inputs=replace(batch.inputs, input_ids=small))


def media_id(config: Any, kind: MediaKind) -> int:
    """Return the id of the token whose embeddings a model replaces by those of media of a kind."""
    found = getattr(config, f"{kind}_token_id", None)
    return int(getattr(config, f"{kind}_token_index") if found is None else found)


def follow_width(config: Any, width: int) -> None:
    """Make the parts of a model that sees follow its text part, which has been made small. width: that it had."""
    vision = getattr(config, "vision_config", None)
    if vision is None and getattr(config, "audio_config", None) is None:
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
    """Keep only the first layers of a model's towers."""
    for module in chain.from_iterable(tower.modules() for tower in towers_of(causal_lm).values()):
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len({type(one) for one in child}) == 1:
                del child[KEPT_LAYERS:]
