"""Processor of a model that sees: what stands in a text for each picture, and the tensors that the model takes of it.

`replacements` needs the size of a picture alone, which its header says: Transformers' processor is asked about pictures
without pixels, once for each size. `features` is called for one document's pictures, never for those of a row: some
processors cut a picture into tiles only where it is alone. `merged` joins the features of several documents.

Importing this module is light; torch and Transformers come with the first processor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import DataError, LifecycleError, ModelError
from stages.models import loading
from stages.models.facts import PROCESSOR_FILES
from stages.models.tower import num_patches, patch_side

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels", "text_replacement_offsets")
"""Outputs of a processor that are the text's, not the pictures'."""
ABSENT = -1
"""Padding of `image_position_ids`, which is how Gemma 4 marks patches that are not there."""
KEPT_SIZES = 4096
"""Number of combinations of sizes whose replacements are remembered."""
DRAWN = ((64, 40), (48, 90))
"""Sizes of the drawn pictures, (width, height) in pixels, that a processor is tried with."""


def needed_processor(folder: Path) -> MediaProcessor:
    """Return the processor of a model folder. Raises ModelError if there is none, or it cannot be used."""
    processor = MediaProcessor.of(folder)
    if processor is None:
        raise ModelError(f"the data have media, but {folder} has no processor; take a model that reads them")
    return processor


@dataclass(frozen=True)
class Replacement:
    """Text that takes the place of a picture's placeholder, from character `start` up to `end` of the rendered chat."""

    start: int
    end: int
    text: str


class MediaProcessor:
    """Processor of pictures in a model folder, tried with drawn pictures when it is made."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Read the folder's processor.

        Raises ModelError if it cannot be read, or does not say what it puts into texts.
        """
        self.folder = folder
        self._processor = loading.load_processor(folder, trust_remote_code=trust_remote_code)
        self._trust_remote_code = trust_remote_code
        self._replaced = lru_cache(KEPT_SIZES)(self._ask)
        self._patches = lru_cache(KEPT_SIZES)(self._count_patches)
        self._without_pixels = True
        try:
            self._try()
        except LifecycleError:
            raise
        except Exception as error:  # whatever a processor that was never tried makes of drawn pictures
            raise ModelError(
                f"the processor in {folder} cannot be used: {type(error).__name__}: {error}; take a model whose "
                "processor Transformers can run"
            ) from error

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
        """Ids of the tokens that stand for pictures, which are never learned and never cut."""
        names = ("image_token_id", "image_token_index")  # Llama 4's differs from the one that its processor marks
        found = {getattr(self.config, name, None) for name in names}
        return self._marked | {one for one in found if one is not None}

    def num_patches(self, size: tuple[int, int]) -> int:
        """Return the number of patches that a tower makes of a picture of this size, alone in its document."""
        return self._patches(size)

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens that stand in a text for a picture of this size, alone in its document."""
        return len(self.token_ids((width, height)))

    def token_ids(self, size: tuple[int, int]) -> list[int]:
        """Return the tokens that stand in a text for a picture of this size, (width, height), alone in its document."""
        (text,) = self._replaced((size,))
        return self._tokens(text)

    def replacements(self, text: str, sizes: Sequence[tuple[int, int]]) -> tuple[Replacement, ...]:
        """Return what takes the place of each placeholder in a rendered chat, in order.

        sizes: of its pictures in pixels, (width, height) as they are shown. Raises DataError if there are more or fewer
        placeholders than pictures.
        """
        places = list(re.finditer(re.escape(self.placeholder), text))
        if len(places) != len(sizes):
            raise DataError(
                f"the chat template wrote {len(places)} placeholders ({self.placeholder}) for {len(sizes)} pictures; "
                "expected one for each: take the model's own chat template, and no placeholders in texts"
            )
        texts = self._replaced(tuple(sizes)) if sizes else ()
        return tuple(Replacement(*place.span(), one) for place, one in zip(places, texts, strict=True))

    def collapsed(self, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int] | None:
        """Return a document's tokens with one placeholder in place of what the processor wrote for each picture.

        sizes: of its pictures, as of `replacements`. None if these tokens are not the processor's for such a document.
        """
        text: str = self._processor.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        short, end = "", 0
        for written in self._replaced(tuple(sizes)) if sizes else ():
            begin = text.find(written, end)
            if begin < 0:
                return None
            short += text[end:begin] + self.placeholder
            end = begin + len(written)
        short += text[end:]
        # Not every sequence of tokens is what its text becomes: the whole must come out again.
        is_whole = short.count(self.placeholder) == len(sizes) and self._tokens(text) == list(token_ids)
        return self._tokens(short) if is_whole else None

    def features(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """Return the model's inputs of one document's pictures, in order; nothing for none. Images are in RGB."""
        if not images:
            return {}
        found = {name: value for name, value in self._call(list(images)).items() if name in self._arguments}
        return {name: self._without_sample(name, value) for name, value in found.items()}

    def inputs(self, token_ids: Sequence[int], images: Sequence[Image]) -> dict[str, Tensor]:
        """Return the arguments with which Transformers' model reads one document: tokens [1, tokens] and pictures."""
        import torch

        ids = torch.tensor([token_ids])
        types = self.token_types(ids)
        names = {"mm_token_type_ids", "token_type_ids"} & _parameters(self._model.forward).keys()
        features = self.merged([self.features(images)])
        row = {"input_ids": ids, "attention_mask": torch.ones_like(types)}
        return row | features | dict.fromkeys(sorted(names), types)

    def merged(self, documents: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the model's inputs of several documents' pictures: each padded to the largest, one after the other."""
        import torch

        joined = {}
        for name in dict.fromkeys(name for one in documents for name in one):
            tensors = [one[name] for one in documents if name in one]
            sizes = [max(lengths) for lengths in zip(*(one.shape[1:] for one in tensors), strict=True)]
            joined[name] = torch.cat([_padded(one, sizes, ABSENT if "position" in name else 0) for one in tensors])
        return {name: value[None] if name in self._with_sample else value for name, value in joined.items()}

    def token_types(self, token_ids: Tensor) -> Tensor:
        """Return 1 for each token that stands for a picture, else 0: int64, of the ids' shape."""
        import torch

        return torch.isin(token_ids, torch.tensor(sorted(self._marked))).long()

    def spatial_positions(self, token_ids: Tensor, features: Mapping[str, Tensor]) -> Tensor | None:
        """Return a document's positions in time, height and width, int64 [3, tokens]; None if the model has one kind.

        token_ids: int64 [tokens] of one document, whose pictures have these features.
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

    def check_sees_alike(self, folder: Path) -> None:
        """Check by drawn pictures that the model in another folder takes pictures as this one; raises ModelError.

        Of what size pictures become this processor decides for both models: bounds of their pixels may differ.
        """
        other = MediaProcessor.of(folder, trust_remote_code=self._trust_remote_code)
        if other is None:
            raise ModelError(
                f"the rows have pictures, and the model in {folder} cannot see them: it has no processor; take one of "
                "text and images"
            )
        images, of_other = self._processor.image_processor, other._processor.image_processor
        if scales_to_pixels(images) and scales_to_pixels(of_other):
            of_other.size = images.size
        for size in DRAWN:
            if (other.token_ids(size), other._drawn(size)) != (self.token_ids(size), self._drawn(size)):
                raise ModelError(
                    f"the model in {folder} takes a picture of {size[0]} × {size[1]} pixels in another way than the "
                    f"one in {self.folder}; take a model of the same family, with the same processor files"
                )

    def _drawn(self, size: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], bytes]]:
        """Return what the model takes of a drawn picture, to compare: the shape and the bytes of each tensor."""
        from PIL import Image

        gradient = Image.linear_gradient("L").resize(size).convert("RGB")
        found = self.features([gradient]).items()
        return {name: (tuple(value.shape), value.contiguous().numpy().tobytes()) for name, value in found}

    @property
    def _marked(self) -> frozenset[int]:
        return frozenset(one for one in self._processor.image_token_ids if one is not None)

    @property
    def placeholder(self) -> str:
        """Text that a chat template writes where a picture is, and that the processor replaces."""
        placeholder: str = self._processor.image_token
        return placeholder

    @cached_property
    def _arguments(self) -> frozenset[str]:
        """Names of the arguments that the model takes, some of which its forward pass only passes on."""
        methods = (self._model.forward, self._model.get_image_features)
        return frozenset(name for method in methods for name in _parameters(method)) - {*OF_TEXT}

    @cached_property
    def _with_sample(self) -> frozenset[str]:
        """Names of the features with a dimension of samples before that of pictures (Idefics 3)."""
        found = self._call([_blank(size) for size in DRAWN])
        return frozenset(
            name for name in self._arguments & found.keys() if found[name].ndim > 1 and len(found[name]) == 1
        )

    @cached_property
    def config(self) -> Any:
        """Transformers' config of the model that the processor is of."""
        return loading.load_config(self.folder, trust_remote_code=self._trust_remote_code)

    @cached_property
    def _model(self) -> Any:
        """Model without weights, whose code says which arguments it takes and where tokens of pictures stand."""
        return loading.build_model(self.config, head="pictures", trust_remote_code=self._trust_remote_code)

    def _call(self, images: list[Any], **options: Any) -> Mapping[str, Any]:
        text = " ".join([self.placeholder] * len(images))
        found: Mapping[str, Any] = self._processor(
            text=[text], images=[images], return_tensors="pt", add_special_tokens=False, **options
        )
        return found

    def _ask(self, sizes: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
        """Return what the processor puts in place of each placeholder of a document with pictures of these sizes."""
        found = self._blank_call(sizes, return_text_replacement_offsets=True)
        return tuple(one["replacement"] for one in found["text_replacement_offsets"][0])

    def _count_patches(self, size: tuple[int, int]) -> int:
        return num_patches(self._blank_call((size,))["pixel_values"].shape, patch_side(self.config))

    def _blank_call(self, sizes: tuple[tuple[int, int], ...], **options: Any) -> Mapping[str, Any]:
        """Return what the processor makes of pictures of these sizes, without pixels where it can."""
        import torch

        if not self._without_pixels:
            return self._call([_blank(size) for size in sizes], **options)
        shapes = [torch.empty(3, height, width, dtype=torch.uint8, device="meta") for width, height in sizes]
        return self._call(shapes, device="meta", **options)

    def _try(self) -> None:
        """Check that what the processor says of its replacements gives the tokens that it gives; try it without pixels.

        Raises ModelError.
        """
        images = [_blank(size) for size in DRAWN]
        found = self._call(images, return_text_replacement_offsets=True)
        ids = found["input_ids"][0].tolist()
        offsets = found.get("text_replacement_offsets")
        if not offsets:
            raise ModelError(
                f"the processor in {self.folder} does not say what it puts in a text for a picture "
                "(`return_text_replacement_offsets`), so that masks of the loss could not be checked; take another "
                "model for rows with pictures"
            )
        texts = tuple(one["replacement"] for one in offsets[0])
        if ids != self._tokens(" ".join(texts)) or not self.media_token_ids & {*ids}:
            raise ModelError(
                f"the processor in {self.folder} makes other tokens of a text with pictures than its tokenizer makes "
                "of the text that it says it wrote, so it cannot be trained on rows with pictures; take another model"
            )
        try:
            self._without_pixels = self._ask(DRAWN) == texts
        except Exception:  # PIL's processors, and those that count what they see, need pixels
            self._without_pixels = False

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _without_sample(self, name: str, value: Tensor) -> Tensor:
        value = value[0] if name in self._with_sample else value
        return value.float() if value.is_floating_point() else value  # Llama 4's processor gives bf16


def reads_media(folder: Path) -> bool:
    """Return whether a model folder has a processor of media beside its tokenizer."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def scales_to_pixels(image_processor: Any) -> bool:
    """Return whether an image processor of Transformers scales pictures to a number of pixels between two bounds."""
    known = {*getattr(image_processor.valid_kwargs, "__annotations__", {})}
    return {"min_pixels", "max_pixels"} <= known


def _blank(size: tuple[int, int]) -> Image:
    from PIL import Image

    return Image.new("RGB", size)


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
