"""Media as `data:` addresses: pictures as PNG and sounds as WAV files of what a model takes, videos as their files."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from stages.data.media.images import as_data_address, as_png_address, decode_picture, from_data_address, inspect_picture
from stages.data.media.sounds import decode_sound, encoded_sound, inspect_sound
from stages.data.media.videos import MAX_BYTES, decode_video, inspect_video
from stages.models.media import Sound, Video

if TYPE_CHECKING:
    from stages.models.media import MediaKind, MediaSize, Medium, Sampling

OF_VIDEOS, OF_SOUNDS = "data:video/", "data:audio/"


def as_address(medium: Medium) -> str:
    """Return a decoded medium as a `data:` address from which the same is decoded again."""
    if isinstance(medium, Video):
        return video_address(medium.encoded)
    if isinstance(medium, Sound):
        return sound_address(encoded_sound(medium))
    return as_png_address(medium)


def video_address(data: bytes) -> str:
    """Return an encoded video as a `data:` address.

    It names one format, whatever the video's, which those who decode it see for themselves: of some names, vLLM would
    read the content as a list of pictures.
    """
    return f"{OF_VIDEOS}mp4;base64,{base64.b64encode(data).decode()}"


def sound_address(data: bytes) -> str:
    """Return an encoded sound as a `data:` address; it names one format, whatever the sound's."""
    return f"{OF_SOUNDS}wav;base64,{base64.b64encode(data).decode()}"


def file_address(kind: MediaKind, data: bytes) -> str:
    """Return an encoded medium, as it lies in its file, as a `data:` address. Raises PictureError for no picture."""
    if kind == "image":
        return as_data_address(data)
    return video_address(data) if kind == "video" else sound_address(data)


def kind_of_address(address: str) -> MediaKind:
    """Return the kind of the medium of an address by `as_address`."""
    if address.startswith(OF_SOUNDS):
        return "audio"
    return "video" if address.startswith(OF_VIDEOS) else "image"


def size_of_address(address: str) -> MediaSize:
    """Return the size of the medium of an address by `as_address`, of a picture from its header; raises MediaError."""
    if kind_of_address(address) == "video":
        return inspect_video(from_data_address(address, MAX_BYTES))
    if kind_of_address(address) == "audio":
        return inspect_sound(from_data_address(address, MAX_BYTES), by_header=True)
    size = inspect_picture(from_data_address(address), by_header=True)
    return size.width, size.height


def of_address(address: str, sampling: Sampling) -> Medium:
    """Return the decoded medium of an address by `as_address`; raises MediaError."""
    if kind_of_address(address) == "video":
        data = from_data_address(address, MAX_BYTES)
        size = inspect_video(data)
        return decode_video(data, size, sampling.frames(size))
    if address.startswith(OF_SOUNDS):
        data = from_data_address(address, MAX_BYTES)
        return decode_sound(data, inspect_sound(data, by_header=True), sampling.sample_rate)
    return decode_picture(from_data_address(address))
