"""Sizes to which pictures are scaled in a training, and rate of a video's frames, written into the processor of the
model that it starts from.

Training starts from a folder with that processor and links to the model's weights, so that data, engines and the export
see one model: a server scales pictures as training did.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PositiveInt, model_validator

from stages.core.cache import cached_folder
from stages.core.errors import ModelError
from stages.core.fields import AddedLater, PositiveFp32, StrictModel
from stages.core.files import read_json_object, write_atomically
from stages.models.facts import PROCESSOR_FILES, ModelFacts
from stages.models.loading import load_processor
from stages.models.media import MAX_PIXELS, MediaKind
from stages.models.processed.images import scales_to_pixels
from stages.models.processed.registry import PROCESSED
from stages.models.processor import MediaProcessor
from stages.models.processor_files import reads_media

NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Names in a processor's `size` of the bounds of a picture's pixels, which say edges but are areas."""
WHOLE, OF_PICTURES, OF_VIDEOS = PROCESSOR_FILES
CAP = "cap_pixels_per_frame"
"""Option of Qwen's processors of videos, whose default changes in Transformers 5.22."""
INNER, INNER_VIDEOS = "image_processor", "video_processor"
"""Names of the parts for pictures and videos in `processor_config.json`; the other files are such a part alone."""


class PictureBounds(StrictModel):
    """Config block of the sizes to which pictures are scaled, and of the frames that are taken of videos.

    They are written into the exported processor; default: its own.
    """

    min_pixels: PositiveInt | None = Field(None, description="Least pixels of a picture; smaller ones grow.")
    max_pixels: PositiveInt | None = Field(None, description="Most pixels of a picture; larger ones shrink.")
    fps: Annotated[PositiveFp32 | None, AddedLater()] = Field(
        None, description="Frames of a video that the model takes for each of its seconds."
    )
    max_frames: Annotated[PositiveInt | None, AddedLater()] = Field(
        None, description="Most frames of a video that the model takes; longer ones have fewer a second."
    )

    @model_validator(mode="after")
    def _smallest_is_not_above_largest(self) -> Self:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"`min_pixels: {self.min_pixels}` is more than `max_pixels: {self.max_pixels}`")
        if (self.min_pixels or 0) > MAX_PIXELS:
            raise ValueError(
                f"`min_pixels: {self.min_pixels}` is more than {MAX_PIXELS:,}, which no picture that is read has; set "
                "a lower one: smaller pictures grow to it, and each of its pixels takes 12 bytes"
            )
        return self

    @property
    def named(self) -> dict[str, float]:
        """Bounds that the recipe sets."""
        return {name: value for name, value in self if value is not None}

    @property
    def sampling(self) -> dict[str, float]:
        """Rates of videos."""
        return {name: value for name, value in self.named.items() if name in ("fps", "max_frames")}

    @property
    def scaling(self) -> dict[str, int]:
        """Sizes of pictures."""
        return {name: int(value) for name, value in self.named.items() if name not in self.sampling}


def usual_sampling(folder: Path, kinds: Iterable[MediaKind]) -> PictureBounds:
    """Return a usual rate of the frames of videos, if there are any, for a model whose processor says none."""
    usual: dict[str, Any] = {}
    for kind in (kind for kind in kinds if PROCESSED[kind].usual_bounds):
        processor = MediaProcessor(folder)
        if kind in processor.placeholders.values() and processor.kinds[kind].lacks_rate:
            usual |= PROCESSED[kind].usual_bounds
    return PictureBounds(**usual)


def with_picture_bounds(start: ModelFacts, bounds: PictureBounds, room: Path, *, trust_remote_code: bool) -> ModelFacts:
    """Return the start model with a processor of these bounds, in a folder of `room`; itself if there are none.

    Raises ModelError for a model without processor, or with one that scales pictures or samples videos otherwise.
    """
    if not bounds.named:
        return start
    if not reads_media(start.folder):
        raise ModelError(f"`media` is for rows with media, and {start.folder} has no processor; remove `media`")
    processor = load_processor(start.folder, trust_remote_code=trust_remote_code)
    size = _size(start.folder, processor, bounds) if bounds.scaling else {}
    sampling = _sampling(start.folder, processor, bounds) if bounds.sampling else {}

    def make(folder: Path) -> None:
        for path in filter(Path.is_file, start.folder.iterdir()):
            if path.name in PROCESSOR_FILES:
                write_atomically(folder / path.name, json.dumps(_bounded(path, size, sampling), indent=2))
            elif path.suffix == ".safetensors":
                (folder / path.name).symlink_to(path.resolve())
            else:
                shutil.copyfile(path, folder / path.name)
        pictures, videos = folder / OF_PICTURES, folder / OF_VIDEOS
        if sampling and pictures.is_file() and not videos.is_file():
            # Of older files, which say in one what holds for both.
            write_atomically(videos, json.dumps({**read_json_object(pictures), **sampling}, indent=2))

    # Beside it stands the artifact's name, as the base by which an adapter is known.
    named = room / "with-picture-bounds" / start.folder.parent.name
    bounded = ModelFacts(cached_folder(named, start.folder.name, Path.is_dir, make))
    written = load_processor(bounded.folder, trust_remote_code=trust_remote_code)
    read: dict[str, Any] = {name: dict(written.image_processor.size)[name] for name in size}
    read |= {name: getattr(written.video_processor, name) for name in sampling}
    if read != {**size, **sampling}:
        raise ModelError(f"`media`: the processor written for {start.folder} has {read}, expected {size | sampling}")
    return bounded


def _size(folder: Path, processor: Any, bounds: PictureBounds) -> dict[str, int]:
    images = processor.image_processor
    if not scales_to_pixels(images):
        raise ModelError(
            f"`media`: {type(images).__name__} of {folder} does not scale pictures to a number of pixels; remove "
            "`media`, and set its own sizes in the model's processor files"
        )
    size = {name: int(images.size[name]) for name in NAMES.values()}
    size |= {NAMES[name]: value for name, value in bounds.scaling.items()}
    if size["shortest_edge"] > size["longest_edge"]:
        raise ModelError(
            f"`media` makes pictures of at least {size['shortest_edge']:,} and at most {size['longest_edge']:,} "
            "pixels, with the model's own bound where it names none; set both"
        )
    return size


def _sampling(folder: Path, processor: Any, bounds: PictureBounds) -> dict[str, Any]:
    """Return the fields of a processor of videos that make it take frames at this rate, and no more than these."""
    videos = getattr(processor, INNER_VIDEOS, None)
    known = {*getattr(getattr(videos, "valid_kwargs", None), "__annotations__", {})}
    if not {*bounds.sampling} <= known:
        title, unknown = type(videos).__name__ if videos else "the processor", sorted({*bounds.sampling} - known)
        raise ModelError(
            f"`media`: {title} of {folder} takes videos by no {' or '.join(unknown)}; remove it, or take a model that "
            "reads videos so"
        )
    sampling = {**bounds.sampling, "do_sample_frames": True, **({"num_frames": None} if bounds.fps else {})}
    if CAP in known and getattr(videos, CAP) is None:
        sampling[CAP] = False  # as Transformers up to 5.21 takes it, which other versions must not read otherwise
    return sampling


def _bounded(source: Path, size: Mapping[str, int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a processor's file with another size of pictures, also under older files' names, and rate of frames."""
    content = read_json_object(source)
    pictures: dict[str, Any] = content.get(INNER, {}) if source.name == WHOLE else content
    videos: dict[str, Any] = content.get(INNER_VIDEOS, {}) if source.name == WHOLE else content
    if pictures and size and source.name != OF_VIDEOS:
        pictures["size"] = {**(pictures.get("size") or {}), **size}
        pictures |= {name: size[edge] for name, edge in NAMES.items() if name in pictures}
    if videos and source.name != OF_PICTURES:
        videos |= sampling
    return content
