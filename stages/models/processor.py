"""Processor of a model that sees: what stands in a text for each medium, and the tensors that the model takes of it.

`replacements` needs the size of a medium alone, which its header says: Transformers' processor is asked about pictures
without pixels, once for each size. `features` is called for one document's media, never for those of a row: some
processors cut a picture into tiles only where it is alone. `merged` joins the features of several documents.

Importing this module is light; torch and Transformers come with the first processor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import DataError, LifecycleError, ModelError
from stages.models import loading
from stages.models.media import (
    KINDS,
    NOUNS,
    TOWER_OF,
    TOWERS,
    MediaError,
    MediaKind,
    MediaSize,
    Medium,
    ModelPart,
    in_words,
    kind_of,
)
from stages.models.pixels import AS_BYTES, PIXELS, statistics_of
from stages.models.processed.kind import KEPT_SIZES, ProcessedKind
from stages.models.processed.registry import PROCESSED
from stages.models.processor_files import reads_media

if TYPE_CHECKING:
    from torch import Tensor

OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels", "text_replacement_offsets")
"""Outputs of a processor that are the text's, not the pictures'."""
ABSENT = -1
"""Padding of `image_position_ids`, which is how Gemma 4 marks patches that are not there."""


def needed_processor(folder: Path) -> MediaProcessor:
    """Return the processor of a model folder. Raises ModelError if there is none, or it cannot be used."""
    processor = MediaProcessor.of(folder)
    if processor is None:
        raise ModelError(f"the data have media, but {folder} has no processor; take a model that reads them")
    return processor


@dataclass(frozen=True)
class Replacement:
    """Text that takes the place of a medium's placeholder, from character `start` up to `end` of the rendered chat."""

    start: int
    end: int
    text: str


class MediaProcessor:
    """Processor of media in a model folder, tried with drawn ones: pictures at once, others when it meets them."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Read the folder's processor.

        Raises ModelError if it cannot be read, or does not say what it puts into texts.
        """
        self.folder = folder
        self._processor = loading.load_processor(folder, trust_remote_code=trust_remote_code)
        self._trust_remote_code = trust_remote_code
        self.kinds = {kind: one(folder, self._processor) for kind, one in PROCESSED.items()}
        self._replaced = lru_cache(KEPT_SIZES)(self._ask)
        self.patches = lru_cache(KEPT_SIZES)(self._count_patches)
        self._without_pixels: dict[MediaKind, bool] = {}
        if not self.placeholders:
            raise ModelError(f"the processor in {folder} takes no media; remove its files, or take another")
        for kind in self.placeholders.values():
            if self.kinds[kind].tried_at_once:
                self._try(kind)

    def __deepcopy__(self, _: Any) -> MediaProcessor:
        """Return itself: copies of a model share it, and nothing changes it."""
        return self

    @classmethod
    def of(cls, folder: Path, *, trust_remote_code: bool = False) -> MediaProcessor | None:
        """Return the processor of a model folder, or None if the folder has none: the model reads text alone."""
        if not reads_media(folder):
            return None
        return cls(folder, trust_remote_code=trust_remote_code)

    @cached_property
    def media_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for media, which are never learned and never cut."""
        # Llama 4's of pictures differs from the one that its processor marks.
        names = (f"{kind}_token_{ending}" for kind in KINDS for ending in ("id", "index"))
        found = {getattr(self.config, name, None) for name in names}
        return frozenset().union(*self._marked.values()) | {one for one in found if isinstance(one, int)}

    @cached_property
    def placeholders(self) -> dict[str, MediaKind]:
        """Texts that a chat template writes where media are, and that the processor replaces, with the kind of each."""
        kinds = [kind for kind, one in self.kinds.items() if one.part is not None]
        # Gemma 4's larger ones do not hear.
        taken = [kind for kind in kinds if getattr(self.config, f"{kind}_config", "") is not None]
        found = {getattr(self._processor, f"{kind}_token", None): kind for kind in taken}
        return {text: kind for text, kind in found.items() if text}

    def _of(self, size: MediaSize) -> ProcessedKind[Any]:
        return self.kinds[kind_of(size)]

    def taken(self, size: MediaSize) -> Any:
        """Return what the model takes of a medium, as a decoder has to know it: numbers of frames, or a rate.

        Raises MediaError for too short media, and ModelError for a processor without a rate.
        """
        return self._of(size).taken(size)

    def num_patches(self, size: MediaSize) -> int:
        """Return the number of patches that a tower makes of a medium of this size."""
        return sum(self.patches(size))

    def patches_by_tower(
        self, sizes: Sequence[MediaSize], features: Sequence[Mapping[str, Tensor]] = ()
    ) -> dict[ModelPart, list[int]]:
        """Return the number of patches of media of these sizes, as of `patches`, by tower; of text, empty lists.

        features: of all documents of these media, if there are any: spectrograms are not made again to be counted.
        """
        counted = {kind: one.counted(features) for kind, one in self.kinds.items()}
        patches: dict[ModelPart, list[int]] = {part: [] for part in TOWERS}
        for size in (one for one in sizes if not counted[kind_of(one)]):
            patches[TOWER_OF[kind_of(size)]] += self.patches(size)
        for kind, numbers in counted.items():
            patches[TOWER_OF[kind]] += numbers
        return patches

    def num_tokens(self, size: MediaSize) -> int:
        """Return the number of tokens that stand in a text for a medium of this size, alone in its document."""
        return len(self.token_ids(size))

    def token_ids(self, size: MediaSize) -> list[int]:
        """Return the tokens that stand in a text for a medium of this size, alone in its document."""
        (text,) = self._replaced((size,))
        return self._tokens(text)

    def places(self, text: str) -> list[tuple[int, int, MediaKind]]:
        """Return first character, end and kind of each placeholder in a rendered chat."""
        pattern = "|".join(map(re.escape, self.placeholders))
        return [(*place.span(), self.placeholders[place[0]]) for place in re.finditer(pattern, text)]

    def replacements(self, text: str, sizes: Sequence[MediaSize]) -> tuple[Replacement, ...]:
        """Return what takes the place of each placeholder in a rendered chat, in order.

        sizes: of its media. Raises DataError if there are more, fewer or other placeholders than media, and MediaError
        as `taken` does.
        """
        places, kinds = self.places(text), [*map(kind_of, sizes)]
        if [kind for _, _, kind in places] != kinds:
            raise DataError(
                f"the chat template wrote {len(places)} placeholders ({', '.join(self.placeholders)}) for {len(sizes)} "
                f"media ({', '.join(kinds)}); expected one for each: take the model's own chat template, and no "
                "placeholders in texts"
            )
        texts = self._replaced(tuple(sizes)) if sizes else ()
        return tuple(Replacement(begin, end, one) for (begin, end, _), one in zip(places, texts, strict=True))

    def collapsed(self, token_ids: Sequence[int], sizes: Sequence[MediaSize]) -> list[int] | None:
        """Return a document's tokens with one placeholder in place of what the processor wrote for each medium.

        sizes: of its media, as of `replacements`. None if these tokens are not the processor's for such a document.
        """
        text: str = self._processor.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        short, end = "", 0
        for size, written in zip(sizes, self._replaced(tuple(sizes)) if sizes else (), strict=True):
            begin = text.find(written, end)
            if begin < 0:
                return None
            short += text[end:begin] + self._placeholder[kind_of(size)]
            end = begin + len(written)
        short += text[end:]
        # Not every sequence of tokens is what its text becomes: the whole must come out again.
        is_whole = len(self.places(short)) == len(sizes) and self._tokens(text) == list(token_ids)
        return self._tokens(short) if is_whole else None

    def features(self, media: Sequence[Medium], *, as_bytes: bool = False) -> dict[str, Tensor]:
        """Return the model's inputs of one document's media, in order; nothing for none. Pictures are in RGB.

        as_bytes: pixels stay bytes where `pixel_statistics` has what they are normalised by.
        """
        if not media:
            return {}
        contents = [*map(self._sized_content, media)]
        stay_bytes = as_bytes and all(PIXELS.get(kind_of(size)) in self.pixel_statistics for size, _ in contents)
        return self._features(contents, **({"text": None, **AS_BYTES} if stay_bytes else {}))

    @cached_property
    def pixel_statistics(self) -> dict[str, Tensor]:
        """Mean and deviation of each value of a patch, by the name of the feature; see `pixels`."""
        statistics = {}
        for kind, name in PIXELS.items():
            # Whatever processors make of these options: pixels are then as they make them.
            with suppress(Exception):
                drawn = [self._sized_content(self.drawn(size)) for size in self.kinds[kind].drawn_sizes]
                # Without a text, too, whose tokens take a tenth of the time of its pictures.
                raw, whole = self._features(drawn, text=None, **AS_BYTES), self._features(drawn)
                statistics[name] = statistics_of(name, raw, whole, self.kinds[kind].part)
        return {name: one for name, one in statistics.items() if one is not None}

    def _features(self, media: Sequence[tuple[MediaSize, Any]], **options: Any) -> dict[str, Tensor]:
        given = self._call(media, **options)
        found = {name: value for name, value in given.items() if name in self._arguments}
        return {name: self._without_sample(name, value) for name, value in found.items()}

    def inputs(self, token_ids: Sequence[int], media: Sequence[Medium]) -> dict[str, Tensor]:
        """Return the arguments with which Transformers' model reads one document: tokens [1, tokens] and media."""
        import torch

        ids = torch.tensor([token_ids])
        types = self.token_types(ids)
        names = {"mm_token_type_ids", "token_type_ids"} & _parameters(self._model.forward).keys()
        features = self.merged([self.features(media)])
        row = {"input_ids": ids, "attention_mask": torch.ones_like(types)}
        return row | features | dict.fromkeys(sorted(names), types)

    def merged(self, documents: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the model's inputs of several documents' media: each padded to the largest, one after the other."""
        import torch

        joined = {}
        for name in dict.fromkeys(name for one in documents for name in one):
            tensors = [one[name] for one in documents if name in one]
            sizes = [max(lengths) for lengths in zip(*(one.shape[1:] for one in tensors), strict=True)]
            joined[name] = torch.cat([_padded(one, sizes, ABSENT if "position" in name else 0) for one in tensors])
        return {name: value[None] if name in self._with_sample else value for name, value in joined.items()}

    def token_types(self, token_ids: Tensor) -> Tensor:
        """Return 1 for each token that stands for a picture, 2 of a video, 3 of a sound, else 0: int64, as the ids."""
        import torch

        types = torch.zeros_like(token_ids)
        for number, kind in enumerate(KINDS, 1):
            types[torch.isin(token_ids, torch.tensor(sorted(self._marked[kind])))] = number
        return types

    def spatial_positions(self, token_ids: Tensor, features: Mapping[str, Tensor]) -> Tensor | None:
        """Return a document's positions in time, height and width, int64 [3, tokens]; None if the model has one kind.

        token_ids: int64 [tokens] of one document, whose media have these features.
        """
        import torch

        owner = next((one for one in (self._model, self._model.base_model) if hasattr(one, "get_rope_index")), None)
        if owner is None:
            return None
        if not features:
            return torch.arange(len(token_ids)).expand(3, -1)
        asked = _parameters(owner.get_rope_index)
        given = {**features, "mm_token_type_ids": self.token_types(token_ids)[None]}
        positions, _ = owner.get_rope_index(token_ids[None], **{name: given[name] for name in asked if name in given})
        spatial: Tensor = positions[:, 0].long()
        return spatial

    def check_sees_alike(self, folder: Path, kinds: Collection[MediaKind]) -> None:
        """Check by drawn media that the model in another folder takes these kinds as this one; raises ModelError.

        Of what size pictures become, and which frames are taken, this processor decides for both models.
        """
        other = MediaProcessor.of(folder, trust_remote_code=self._trust_remote_code)
        if other is None:
            raise ModelError(
                f"the rows have {in_words(kinds)}, and the model in {folder} cannot read them: it has no processor; "
                "take one that does"
            )
        for kind in kinds:
            other.kinds[kind].follow(self.kinds[kind])
        for size in (size for kind in kinds for size in self.kinds[kind].drawn_sizes):
            if (other.token_ids(size), other._drawn(size)) != (self.token_ids(size), self._drawn(size)):
                raise ModelError(
                    f"the model in {folder} takes a {NOUNS[kind_of(size)]} of the size {size} in another way than the "
                    f"one in {self.folder}; take a model of the same family, with the same processor files"
                )

    def _drawn(self, size: MediaSize) -> dict[str, tuple[tuple[int, ...], bytes]]:
        """Return what the model takes of a drawn medium, to compare: the shape and the bytes of each tensor."""
        found = self.features([self.drawn(size)]).items()
        return {name: (tuple(value.shape), value.contiguous().numpy().tobytes()) for name, value in found}

    def drawn(self, size: MediaSize, seed: int = 0) -> Medium:
        """Return a medium of this size that holds noise."""
        import numpy as np

        return self._of(size).drawn(size, lambda *shape: np.random.default_rng(seed).integers(0, 256, shape, np.uint8))

    def _sized_content(self, medium: Medium) -> tuple[MediaSize, Any]:
        return medium.size, self._of(medium.size).content(medium)

    @cached_property
    def _marked(self) -> dict[MediaKind, frozenset[int]]:
        """Ids of the tokens that stand for media of each kind."""
        return {
            kind: frozenset(one for one in getattr(self._processor, f"{kind}_token_ids", ()) if one is not None)
            for kind in KINDS
        }

    @cached_property
    def _placeholder(self) -> dict[MediaKind, str]:
        return {kind: text for text, kind in self.placeholders.items()}

    @cached_property
    def _arguments(self) -> frozenset[str]:
        """Names of the arguments that the model takes, some of which its forward pass only passes on."""
        names = ("forward", *(f"get_{kind}_features" for kind in KINDS))
        methods = (getattr(self._model, name) for name in names if hasattr(self._model, name))
        return frozenset(name for method in methods for name in _parameters(method)) - {*OF_TEXT}

    @cached_property
    def _with_sample(self) -> frozenset[str]:
        """Names of the features with a dimension of samples before that of pictures (Idefics 3)."""
        tried = [self.kinds[kind] for kind in self.placeholders.values() if self.kinds[kind].has_samples]
        calls = [self._blank_call(one.drawn_sizes, without_pixels=False) for one in tried]
        return frozenset(
            name
            for found in calls
            for name in self._arguments & found.keys()
            if found[name].ndim > 1 and len(found[name]) == 1
        )

    @cached_property
    def config(self) -> Any:
        """Transformers' config of the model that the processor is of."""
        return loading.load_config(self.folder, trust_remote_code=self._trust_remote_code)

    @cached_property
    def _model(self) -> Any:
        """Model without weights, whose code says which arguments it takes and where tokens of pictures stand."""
        return loading.build_model(self.config, head="pictures", trust_remote_code=self._trust_remote_code)

    def _call(self, media: Sequence[tuple[MediaSize, Any]], **options: Any) -> Mapping[str, Any]:
        """Return the processor's outputs for a text of placeholders alone. media: size and content of each."""
        text = " ".join(self._placeholder[kind_of(size)] for size, _ in media)
        given: dict[str, Any] = {}
        for kind, taken in self.kinds.items():
            if of_kind := [(size, one) for size, one in media if kind_of(size) == kind]:
                given |= taken.arguments(of_kind)
        given = {"text": [text], "return_tensors": "pt", "add_special_tokens": False, **given, **options}
        found: Mapping[str, Any] = self._processor(**given)
        return found

    def _ask(self, sizes: tuple[MediaSize, ...]) -> tuple[str, ...]:
        """Return what the processor puts in place of each placeholder of a document with media of these sizes."""
        for size in sizes:
            self._of(size).check_whole(size, self)
        return self.written(sizes)

    def written(self, sizes: tuple[MediaSize, ...]) -> tuple[str, ...]:
        """Return what the processor puts in place of each placeholder, also for media that it cuts."""
        found = self._blank_call(sizes, return_text_replacement_offsets=True)
        return tuple(one["replacement"] for one in found["text_replacement_offsets"][0])

    def _count_patches(self, size: MediaSize) -> tuple[int, ...]:
        """Return the number of patches of a medium in each part that a tower takes by itself."""
        return self._of(size).patches(size, self._blank_call((size,)), self.config)

    def _blank_call(
        self, sizes: Sequence[MediaSize], *, without_pixels: bool | None = None, **options: Any
    ) -> Mapping[str, Any]:
        """Return what the processor makes of media of these sizes, without pixels where it can, or as it is said."""
        if without_pixels is None:
            kinds = {*map(kind_of, sizes)}
            for kind in kinds:
                self._try(kind)
            without_pixels = all(self._without_pixels[kind] for kind in kinds)
        given = [(size, self._of(size).blank(size, "meta" if without_pixels else "cpu")) for size in sizes]
        return self._call(given, **options, **({"device": "meta"} if without_pixels else {}))

    def _try(self, kind: MediaKind) -> None:
        """Check, once, that what the processor says of its replacements gives its tokens; raises ModelError."""
        if kind in self._without_pixels:
            return
        try:
            self._try_replacements(kind)
        except (LifecycleError, MediaError):
            raise
        except Exception as error:  # whatever a processor that was never tried makes of drawn media
            raise ModelError(
                f"the processor in {self.folder} cannot be used: {type(error).__name__}: {error}; take a model whose "
                "processor Transformers can run"
            ) from error

    def _try_replacements(self, kind: MediaKind) -> None:
        noun, taken = NOUNS[kind], self.kinds[kind]
        sizes = taken.drawn_sizes
        options = {"return_text_replacement_offsets": True, "return_mm_token_type_ids": True}
        outputs = self._blank_call(sizes, without_pixels=False, **options)
        ids = outputs["input_ids"][0].tolist()
        offsets = outputs.get("text_replacement_offsets")
        if not offsets:
            raise ModelError(
                f"the processor in {self.folder} does not say what it puts in a text for a {noun} "
                "(`return_text_replacement_offsets`), so that masks of the loss could not be checked; take another "
                f"model for rows with {noun}s"
            )
        texts = tuple(one["replacement"] for one in offsets[0])
        if ids != self._tokens(" ".join(texts)) or not self.media_token_ids & {*ids}:
            raise ModelError(
                f"the processor in {self.folder} makes other tokens of a text with {noun}s than its tokenizer makes "
                f"of the text that it says it wrote, so it cannot be trained on rows with {noun}s; take another model"
            )
        if other := next((NOUNS[one] for one, name in PIXELS.items() if one != kind and name in outputs), None):
            raise ModelError(
                f"the processor in {self.folder} gives {noun}s and {other}s one name, so that a document with both "
                f"could not be trained on; take another model for rows with {noun}s"
            )
        if taken.known_by_ids and not self.token_types(outputs["input_ids"]).equal(outputs["mm_token_type_ids"]):
            raise ModelError(
                f"the processor in {self.folder} marks the tokens of {noun}s otherwise than by their ids, which is not "
                f"trained yet; take another model for rows with {noun}s"
            )
        if not taken.sizes_suffice:
            self._without_pixels[kind] = False
            return
        try:
            blank = self._blank_call(sizes, without_pixels=True, return_text_replacement_offsets=True)
            self._without_pixels[kind] = (
                tuple(one["replacement"] for one in blank["text_replacement_offsets"][0]) == texts
            )
        except Exception:  # PIL's processors, and those that count what they see, need pixels
            self._without_pixels[kind] = False

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _without_sample(self, name: str, value: Tensor) -> Tensor:
        value = value[0] if name in self._with_sample else value
        return value.float() if value.is_floating_point() else value  # Llama 4's processor gives bf16


def _padded(tensor: Tensor, sizes: Sequence[int], value: int) -> Tensor:
    """Return a tensor whose dimensions after the first have these sizes, filled with `value` at their ends."""
    from torch.nn.functional import pad

    missing = [size - length for size, length in zip(sizes, tensor.shape[1:], strict=True)]
    if not any(missing):
        return tensor  # which `pad` would copy
    # torch takes the last dimension first, each with what is added before and after.
    return pad(tensor, [number for one in reversed(missing) for number in (0, one)], value=value)


def _parameters(method: Any) -> Mapping[str, Any]:
    from inspect import signature

    return signature(method).parameters
