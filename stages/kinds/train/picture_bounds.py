"""Sizes to which pictures are scaled in a training, written into the processor of the model that it starts from.

Training starts from a folder with that processor and links to the model's weights, so that data, engines and the export
see one model: a server scales pictures as training did.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from stages.core.cache import cached_folder
from stages.core.errors import ModelError
from stages.core.files import read_json_object, write_atomically
from stages.kinds.train.blocks import PictureBounds
from stages.models.facts import PROCESSOR_FILES, ModelFacts
from stages.models.loading import load_processor
from stages.models.processor import reads_media, scales_to_pixels

NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Names in a processor's `size` of the bounds of a picture's pixels, which say edges but are areas."""
INNER = "image_processor"
"""Name of the picture's part in `processor_config.json`; `preprocessor_config.json` is that part alone."""


def with_picture_bounds(start: ModelFacts, bounds: PictureBounds, room: Path, *, trust_remote_code: bool) -> ModelFacts:
    """Return the start model with a processor of these bounds, in a folder of `room`; itself if there are none.

    Raises ModelError for a model without processor, or with one that scales pictures otherwise.
    """
    if not bounds.named:
        return start
    size = _size(start.folder, bounds, trust_remote_code=trust_remote_code)

    def make(folder: Path) -> None:
        for path in filter(Path.is_file, start.folder.iterdir()):
            if path.name in PROCESSOR_FILES:
                _write_bounded(path, folder / path.name, size)
            elif path.suffix == ".safetensors":
                (folder / path.name).symlink_to(path.resolve())
            else:
                shutil.copyfile(path, folder / path.name)

    found = ModelFacts(cached_folder(room, "model-with-picture-bounds", Path.is_dir, make))
    read = dict(load_processor(found.folder, trust_remote_code=trust_remote_code).image_processor.size)
    if {name: read[name] for name in size} != size:
        raise ModelError(f"`media`: the processor written for {start.folder} has the size {read}, expected {size}")
    return found


def _size(folder: Path, bounds: PictureBounds, *, trust_remote_code: bool) -> dict[str, int]:
    if not reads_media(folder):
        raise ModelError(f"`media` bounds pictures, and {folder} has no processor of pictures; remove `media`")
    images = load_processor(folder, trust_remote_code=trust_remote_code).image_processor
    if not scales_to_pixels(images):
        raise ModelError(
            f"`media`: {type(images).__name__} of {folder} does not scale pictures to a number of pixels; remove "
            "`media`, and set its own sizes in the model's processor files"
        )
    size = {name: int(images.size[name]) for name in NAMES.values()}
    size |= {NAMES[name]: value for name, value in bounds.named.items()}
    if size["shortest_edge"] > size["longest_edge"]:
        raise ModelError(
            f"`media` makes pictures of at least {size['shortest_edge']:,} and at most {size['longest_edge']:,} "
            "pixels, with the model's own bound where it names none; set both"
        )
    return size


def _write_bounded(source: Path, target: Path, size: dict[str, int]) -> None:
    """Write a processor's file with another size of pictures, also under the names that older files have."""
    content = read_json_object(source)
    part: dict[str, Any] = content if source.name != PROCESSOR_FILES[0] else content.get(INNER, {})
    if part:
        part["size"] = {**(part.get("size") or {}), **size}
        part |= {name: size[edge] for name, edge in NAMES.items() if name in part}
    write_atomically(target, json.dumps(content, indent=2))
