"""Media as `data:` addresses: pictures as PNG files of what a model sees, others as the files that they come from."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from stages.data.media.images import as_png_address, decode_picture, from_data_address
from stages.data.media.sounds import decode_sound, inspect_sound
from stages.data.media.videos import MAX_BYTES, decode_video, inspect_video
from stages.models.media import Sound, Video

if TYPE_CHECKING:
    from stages.models.media import Medium, Sampling

OF_VIDEOS, OF_SOUNDS = "data:video/", "data:audio/"


def as_address(medium: Medium) -> str:
    """Return a decoded medium as a `data:` address from which the same is decoded again."""
    if isinstance(medium, Video):
        return f"{OF_VIDEOS}mp4;base64,{base64.b64encode(medium.encoded).decode()}"
    if isinstance(medium, Sound):
        return f"{OF_SOUNDS}wav;base64,{base64.b64encode(medium.encoded).decode()}"
    return as_png_address(medium)


def of_address(address: str, sampling: Sampling) -> Medium:
    """Return the decoded medium of an address by `as_address`; raises MediaError."""
    if address.startswith(OF_VIDEOS):
        data = from_data_address(address, MAX_BYTES)
        size = inspect_video(data)
        return decode_video(data, size, sampling.frames(size))
    if address.startswith(OF_SOUNDS):
        data = from_data_address(address, MAX_BYTES)
        return decode_sound(data, inspect_sound(data, by_header=True), sampling.sample_rate)
    return decode_picture(from_data_address(address))
