"""Media by kind: how each is inspected, decoded and written as a `data:` address.

Addresses hold pictures as PNG and sounds as WAV files of what a model takes, videos as their files.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.data.media import images, sounds, videos
from stages.models.media import KINDS, Sound, SoundSize, Video, VideoSize

if TYPE_CHECKING:
    from stages.models.media import MediaKind, MediaSize, Medium, Sampling


@dataclass(frozen=True)
class Form:
    """Functions for the encoded media of one kind. max_bytes: largest number of bytes of a file.

    inspect: returns the size after decoding, or by the header alone, where that is safe, if its second argument is
    true. decode: takes the size, and what a model takes of the medium. address: writes a file as a `data:` address. All
    raise MediaError.
    """

    max_bytes: int
    inspect: Callable[[bytes, bool], MediaSize]
    decode: Callable[[bytes, MediaSize, Sampling | None], Medium]
    address: Callable[[bytes], str]


def as_address(medium: Medium) -> str:
    """Return a decoded medium as a `data:` address from which the same is decoded again."""
    if isinstance(medium, Video):
        return FORMS["video"].address(medium.encoded)
    if isinstance(medium, Sound):
        return FORMS["audio"].address(sounds.encoded_sound(medium))
    return images.as_png_address(medium)


def kind_of_address(address: str) -> MediaKind:
    """Return the kind of the medium of an address by `as_address`."""
    return next((kind for kind in KINDS if address.startswith(f"data:{kind}/")), "image")


def size_of_address(address: str) -> MediaSize:
    """Return the size of the medium of an address by `as_address`, of a picture from its header; raises MediaError."""
    form = FORMS[kind_of_address(address)]
    return form.inspect(images.from_data_address(address, form.max_bytes), True)


def of_address(address: str, sampling: Sampling) -> Medium:
    """Return the decoded medium of an address by `as_address`; raises MediaError."""
    form = FORMS[kind_of_address(address)]
    data = images.from_data_address(address, form.max_bytes)
    return form.decode(data, form.inspect(data, True), sampling)


def _inspect_picture(data: bytes, by_header: bool) -> MediaSize:
    size = images.inspect_picture(data, by_header=by_header)
    return size.width, size.height


def _decode_video(data: bytes, size: MediaSize, sampling: Sampling | None) -> Video:
    assert sampling and isinstance(size, VideoSize), "opened without the processor that takes frames"
    return videos.decode_video(data, size, sampling.taken(size))


def _decode_sound(data: bytes, size: MediaSize, sampling: Sampling | None) -> Sound:
    assert sampling and isinstance(size, SoundSize), "opened without the processor that has a rate"
    return sounds.decode_sound(data, size, sampling.taken(size))


def _as_named(head: str) -> Callable[[bytes], str]:
    """Return what writes a file as an address that names one format, whatever the file's.

    Those who decode it see for themselves: of some names, vLLM would read a video as a list of pictures.
    """
    return lambda data: f"data:{head};base64,{base64.b64encode(data).decode()}"


FORMS: dict[MediaKind, Form] = {
    "image": Form(
        images.MAX_BYTES, _inspect_picture, lambda data, *_: images.decode_picture(data), images.as_data_address
    ),
    "video": Form(videos.MAX_BYTES, lambda data, _: videos.inspect_video(data), _decode_video, _as_named("video/mp4")),
    "audio": Form(
        sounds.MAX_BYTES,
        lambda data, by_header: sounds.inspect_sound(data, by_header=by_header),
        _decode_sound,
        _as_named("audio/wav"),
    ),
}
