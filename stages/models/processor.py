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
    Sound,
    SoundSize,
    Video,
    VideoSize,
    in_words,
    kind_of,
)
from stages.models.pixels import AS_BYTES, PIXELS, statistics_of
from stages.models.processor_files import PARTS, reads_media
from stages.models.tower import SPECTROGRAM, num_frames, num_patches, patch_side

if TYPE_CHECKING:
    from torch import Tensor

OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels", "text_replacement_offsets")
"""Outputs of a processor that are the text's, not the pictures'."""
ABSENT = -1
"""Padding of `image_position_ids`, which is how Gemma 4 marks patches that are not there."""
KEPT_SIZES = 4096
"""Number of combinations of sizes whose replacements are remembered."""
DRAWN = ((64, 40), (48, 90))
"""Sizes of the drawn pictures, (width, height) in pixels, that a processor is tried with."""
DRAWN_SIZES: dict[MediaKind, tuple[MediaSize, MediaSize]] = {
    "image": DRAWN,
    "video": (VideoSize(64, 40, 9, 3.0), VideoSize(48, 90, 12, 2.0)),
    "audio": (SoundSize(16000, 16000), SoundSize(6000, 8000)),
}
"""Sizes of the drawn media of each kind."""
ENDS_A_SECOND = 40
"""Part of a second, as 1 / 40, at the end of a sound by which it is found whether a processor takes all of it."""
SAMPLING = ("fps", "num_frames", "max_frames", "cap_pixels_per_frame")
"""Fields of a processor of videos that say which frames a model takes, and of what size."""
GRID = "video_grid_thw"
"""Name of the feature that holds a video's frames, of which Qwen and GLM join two, and their height and width."""


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
        self._replaced = lru_cache(KEPT_SIZES)(self._ask)
        self.patches = lru_cache(KEPT_SIZES)(self._count_patches)
        self._frames = lru_cache(KEPT_SIZES)(self._sampled)
        self._without_pixels: dict[MediaKind, bool] = {}
        self._taken_whole = 0
        if not self.placeholders:
            raise ModelError(f"the processor in {folder} takes no media; remove its files, or take another")
        if "image" in self.placeholders.values():
            self._try("image")

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
        kinds = [kind for kind, part in PARTS.items() if getattr(self._processor, part, None) is not None]
        if "audio" in kinds and getattr(self.config, "audio_config", "") is None:  # Gemma 4's larger ones do not hear
            kinds.remove("audio")
        found = {getattr(self._processor, f"{kind}_token", None): kind for kind in kinds}
        return {text: kind for text, kind in found.items() if text}

    def frames(self, size: VideoSize) -> Sequence[int]:
        """Return the numbers of a video's frames that the model takes, by the rate in the processor's files.

        Raises MediaError for too short videos, and ModelError for a processor without a rate.
        """
        return self._frames(size)

    @property
    def sample_rate(self) -> int:
        """Rate of the sounds that the model takes, in samples a second; raises ModelError if it takes none."""
        part = getattr(self._processor, PARTS["audio"], None)
        if part is None:
            raise ModelError(f"the processor in {self.folder} takes no sounds; take a model that hears")
        return int(part.sampling_rate)

    @property
    def says_frames(self) -> bool:
        """Return whether the processor's files say which frames of a video the model takes."""
        part = self._processor.video_processor
        return part.fps is not None or part.num_frames is not None

    def num_patches(self, size: MediaSize) -> int:
        """Return the number of patches that a tower makes of a medium of this size."""
        return sum(self.patches(size))

    def patches_by_tower(
        self, sizes: Sequence[MediaSize], features: Sequence[Mapping[str, Tensor]] = ()
    ) -> dict[ModelPart, list[int]]:
        """Return the number of patches of media of these sizes, as of `patches`, by tower; of text, empty lists.

        features: of all documents of these media, if there are any: spectrograms are not made again to be counted.
        """
        heard = [one[SPECTROGRAM] for one in features if SPECTROGRAM in one]
        patches: dict[ModelPart, list[int]] = {part: [] for part in TOWERS}
        for size in (one for one in sizes if not (heard and isinstance(one, SoundSize))):
            patches[TOWER_OF[kind_of(size)]] += self.patches(size)
        for sounds in heard:
            patches[TOWER_OF["audio"]] += [self._num_frames(sounds[:1])] * len(sounds)
        return patches

    def _num_frames(self, spectrograms: Tensor) -> int:
        return num_frames(spectrograms.shape, self._processor.feature_extractor.feature_size)

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
        as `frames` does.
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
        contents = [(one.size, _content(one)) for one in media]
        stay_bytes = as_bytes and all(PIXELS.get(kind_of(size)) in self.pixel_statistics for size, _ in contents)
        return self._features(contents, **({"text": None, **AS_BYTES} if stay_bytes else {}))

    @cached_property
    def pixel_statistics(self) -> dict[str, Tensor]:
        """Mean and deviation of each value of a patch, by the name of the feature; see `pixels`."""
        statistics = {}
        for kind, name in PIXELS.items():
            # Whatever processors make of these options: pixels are then as they make them.
            with suppress(Exception):
                drawn = [(size, _content(self.drawn(size))) for size in DRAWN_SIZES[kind]]
                # Without a text, too, whose tokens take a tenth of the time of its pictures.
                raw, whole = self._features(drawn, text=None, **AS_BYTES), self._features(drawn)
                statistics[name] = statistics_of(name, raw, whole, getattr(self._processor, PARTS[kind]))
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
        images, of_other = (getattr(one._processor, PARTS["image"], None) for one in (self, other))
        if images and of_other and scales_to_pixels(images) and scales_to_pixels(of_other):
            of_other.size = images.size
        if "video" in kinds:
            for name in SAMPLING:
                setattr(other._processor.video_processor, name, getattr(self._processor.video_processor, name, None))
        for size in (size for kind in kinds for size in DRAWN_SIZES[kind]):
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
        from PIL.Image import fromarray

        def noise(*shape: int) -> Any:
            return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)

        if isinstance(size, VideoSize):
            numbers = self.frames(size)
            return Video(size, noise(len(numbers), size.height, size.width, 3), numbers, b"")
        if isinstance(size, SoundSize):
            rate = self.sample_rate
            return Sound(size, noise(size.num_samples_at(rate)).astype(np.float32) / 128 - 1, rate)
        return fromarray(noise(size[1], size[0], 3))

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

    @property
    def placeholder(self) -> str:
        """Text that a chat template writes where a picture is, and that the processor replaces."""
        return self._placeholder["image"]

    @cached_property
    def _arguments(self) -> frozenset[str]:
        """Names of the arguments that the model takes, some of which its forward pass only passes on."""
        names = ("forward", *(f"get_{kind}_features" for kind in KINDS))
        methods = (getattr(self._model, name) for name in names if hasattr(self._model, name))
        return frozenset(name for method in methods for name in _parameters(method)) - {*OF_TEXT}

    @cached_property
    def _with_sample(self) -> frozenset[str]:
        """Names of the features with a dimension of samples before that of pictures (Idefics 3)."""
        if "image" not in self.placeholders.values():
            return frozenset()
        found = self._blank_call(DRAWN, without_pixels=False)
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

    def _call(self, media: Sequence[tuple[MediaSize, Any]], **options: Any) -> Mapping[str, Any]:
        """Return the processor's outputs for a text of placeholders alone. media: size and content of each."""
        text = " ".join(self._placeholder[kind_of(size)] for size, _ in media)
        pictures = [one for size, one in media if isinstance(size, tuple)]
        videos = [(size, one) for size, one in media if isinstance(size, VideoSize)]
        given: dict[str, Any] = {"images": [pictures]} if pictures else {}
        if videos:
            given |= {"videos": [one for _, one in videos], "do_sample_frames": False}
            given["video_metadata"] = [size.metadata | {"frames_indices": [*self.frames(size)]} for size, _ in videos]
        if sounds := [one for size, one in media if isinstance(size, SoundSize)]:
            given |= {"audio": sounds, "audio_kwargs": {"sampling_rate": self.sample_rate}}
        given = {"text": [text], "return_tensors": "pt", "add_special_tokens": False, **given, **options}
        found: Mapping[str, Any] = self._processor(**given)
        return found

    def _ask(self, sizes: tuple[MediaSize, ...]) -> tuple[str, ...]:
        """Return what the processor puts in place of each placeholder of a document with media of these sizes."""
        for size in sizes:
            if isinstance(size, SoundSize):
                self._check_taken_whole(size)
        return self._written(sizes)

    def _check_taken_whole(self, size: SoundSize) -> None:
        """Raise MediaError for a sound of which the processor would leave out the end.

        Where a second more has more tokens, nothing is cut; else features tell whether the last samples matter.
        """
        from dataclasses import replace

        if size.num_samples_at(self.sample_rate) <= self._taken_whole:
            return
        longer = replace(size, num_samples=size.num_samples + size.sample_rate)
        texts = [self._written((one,))[0] for one in (size, longer)]
        if len(texts[0]) == len(texts[1]):
            drawn = self.drawn(size)
            assert isinstance(drawn, Sound)
            ending = drawn.samples.copy()
            ending[-self.sample_rate // ENDS_A_SECOND :] *= -0.5
            usual, other = (self.features([one]) for one in (drawn, replace(drawn, samples=ending)))
            if all(value.equal(other[name]) for name, value in usual.items()):
                raise MediaError(
                    f"has {size.seconds:,.1f} seconds, of which the model's processor takes the first alone; cut it"
                )
        self._taken_whole = size.num_samples_at(self.sample_rate)

    def _written(self, sizes: tuple[MediaSize, ...]) -> tuple[str, ...]:
        found = self._blank_call(sizes, return_text_replacement_offsets=True)
        return tuple(one["replacement"] for one in found["text_replacement_offsets"][0])

    def _count_patches(self, size: MediaSize) -> tuple[int, ...]:
        """Return the number of patches of a picture or sound, or of each of a video's frames as the tower takes them.

        Patches of two frames do not attend to each other. Those of a sound are frames of its spectrogram.
        """
        outputs = self._blank_call((size,))
        if SPECTROGRAM in outputs:
            return (self._num_frames(outputs[SPECTROGRAM]),)
        values = next(outputs[name] for name in PIXELS.values() if name in outputs)
        number = num_patches(values.shape, patch_side(self.config))
        if not isinstance(size, VideoSize):
            return (number,)
        frames = int(outputs[GRID][0, 0]) if GRID in outputs else len(self.frames(size))
        return (number // frames,) * frames

    def _sampled(self, size: VideoSize) -> tuple[int, ...]:
        part = self._processor.video_processor
        if not self.says_frames:
            raise ModelError(
                f"the processor in {self.folder} does not say how many frames of a video its model takes; set, for "
                "example, `media: {fps: 2, max_frames: 32}` in the training stage"
            )
        from transformers.video_utils import VideoMetadata

        options = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}
        try:
            found = part.sample_frames(metadata=VideoMetadata(**size.metadata), **options)
        except (ValueError, ZeroDivisionError) as error:
            raise MediaError(f"has too few frames ({size.num_frames}) for the model's processor: {error}") from error
        numbers = tuple(int(number) for number in found)
        if not numbers:
            raise MediaError(f"has too few frames ({size.num_frames}) for the model's processor, which takes none")
        return numbers

    def _blank_call(
        self, sizes: Sequence[MediaSize], *, without_pixels: bool | None = None, **options: Any
    ) -> Mapping[str, Any]:
        """Return what the processor makes of media of these sizes, without pixels where it can, or as it is said."""
        import torch

        if without_pixels is None:
            kinds = {*map(kind_of, sizes)}
            for kind in kinds:
                self._try(kind)
            without_pixels = all(self._without_pixels[kind] for kind in kinds)
        device = "meta" if without_pixels else "cpu"

        def content(size: MediaSize) -> Any:
            if isinstance(size, VideoSize):
                shape = (len(self.frames(size)), 3, size.height, size.width)
                return torch.zeros(shape, dtype=torch.uint8, device=device)
            if isinstance(size, SoundSize):
                return torch.zeros(size.num_samples_at(self.sample_rate)).numpy()
            return (
                torch.zeros(3, size[1], size[0], dtype=torch.uint8, device=device) if without_pixels else _blank(size)
            )

        given = [(size, content(size)) for size in sizes]
        return self._call(given, **options, **({"device": device} if without_pixels else {}))

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
        noun, sizes = NOUNS[kind], DRAWN_SIZES[kind]
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
        if kind != "image" and PIXELS["image"] in outputs:
            raise ModelError(
                f"the processor in {self.folder} gives {noun}s and pictures one name, so that a document with both "
                f"could not be trained on; take another model for rows with {noun}s"
            )
        if kind != "image" and not self.token_types(outputs["input_ids"]).equal(outputs["mm_token_type_ids"]):
            raise ModelError(
                f"the processor in {self.folder} marks the tokens of {noun}s otherwise than by their ids, which is not "
                f"trained yet; take another model for rows with {noun}s"
            )
        if kind == "audio":  # of which extractors count what NumPy holds
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


def scales_to_pixels(image_processor: Any) -> bool:
    """Return whether an image processor of Transformers scales pictures to a number of pixels between two bounds."""
    known = {*getattr(image_processor.valid_kwargs, "__annotations__", {})}
    return {"min_pixels", "max_pixels"} <= known


def _blank(size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.new("RGB", size)


def _content(medium: Medium) -> Any:
    """Return what a processor takes of a medium: pixels or samples."""
    if isinstance(medium, Video):
        return medium.frames
    return medium.samples if isinstance(medium, Sound) else medium


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
