"""Files of a model folder that say how its processor takes media, read without Transformers."""

from pathlib import Path
from typing import Any

from stages.core.files import read_json_object
from stages.models.facts import PROCESSOR_FILES
from stages.models.media import MediaKind

PARTS: dict[MediaKind, str] = {
    "image": "image_processor",
    "video": "video_processor",
    "audio": "feature_extractor",
}
"""Attribute of a processor that takes the media of each kind."""


def reads_media(folder: Path) -> bool:
    """Return whether a model folder has a processor of media beside its tokenizer."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def settings_of(kind: MediaKind, folder: Path) -> dict[str, Any] | None:
    """Return the settings of what takes a kind of media in a model folder, from its files; None if nothing does."""
    whole, of_pictures, of_videos = (folder / name for name in PROCESSOR_FILES)
    found = read_json_object(whole).get(PARTS[kind]) if whole.is_file() else None
    own = of_videos if kind == "video" else of_pictures
    if found or not own.is_file():
        return found
    settings = read_json_object(own)
    # One file is of a processor of pictures, or of sounds.
    return settings if kind == "video" or ("sampling_rate" in settings) == (kind == "audio") else None
