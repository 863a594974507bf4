"""Decoder of pictures from outside, bounded before it decodes: what cannot be used is refused, what is odd is evened.

Pictures come out as vLLM shows them to the model it serves: turned as EXIF says, on white where they are transparent.
PIL is imported by the functions, so that texts do without it.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from stages.models.media import MAX_PIXELS, MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 << 20
MAX_DECODING_S = 20
"""Largest number of seconds of one core that decoding takes; the largest pictures take one or two."""
MAX_ASPECT = 100
"""Largest ratio of a picture's sides; processors of some families refuse 200 and more."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Formats that are opened, all by decoders inside PIL; others may start programs (EPS) or hold scenes (SVG)."""
MAX_SCANS = 100
"""Largest number of scans of a JPEG, as of libtiff; 40 bytes can be one, and take 0.2 seconds."""
JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd8-\xfe])")
"""Pattern of a JPEG's markers but those inside of a scan's data: FF 00, and FF D0 to FF D7 for restarts."""
BEGIN_OF_FILE, END_OF_FILE, SCAN = b"\xd8", b"\xd9", b"\xda"
"""JPEG's markers SOI, EOI and SOS, without their FF."""
SEVERAL_VIEWS = "MPO"
"""PIL's name of a JPEG file with further views behind the picture, as phones write."""
ORIENTATION = 0x0112
SIDEWAYS = range(5, 9)
"""EXIF orientations that swap width and height."""
DEEP = ("I", "F")
"""Beginnings of PIL's modes of more than 8 bits: integers and floats."""
BAND_ROWS = 256
THUMBNAIL_PIXELS = 128


class PictureError(MediaError):
    """Raised for a picture that cannot be used; the message goes on from its name: "`a.png` …"."""


class _TimedReader(io.BytesIO):
    """File in memory that ends the decoding of its picture after `MAX_DECODING_S` by raising PictureError.

    PIL reads a part at a time, and decodes it before the next: a TIFF that names one strip a million times would
    otherwise take days.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._begin_s = time.thread_time()

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() - self._begin_s > MAX_DECODING_S:
            raise PictureError(f"takes more than {MAX_DECODING_S} seconds to decode; save it in another way")
        return super().read(size)


@dataclass(frozen=True)
class Size:
    """Width and height of a picture in pixels, as it is shown."""

    width: int
    height: int


def inspect_picture(data: bytes, *, by_header: bool = False) -> Size:
    """Return the size of an encoded picture after decoding it roughly, or by its header alone, some 5 ms sooner.

    Raises PictureError for one that is refused; by the header, damaged ones are not found.
    """
    image = _opened(data)
    width, height = image.size
    if not by_header:
        # JPEG decodes an eighth of each side: as much is read, and much less is computed.
        image.draft(None, (max(1, width // 8), max(1, height // 8)))
        _decode(image)
    elif image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        # PIL has turned the size of a TIFF; asking a PNG for what may stand at its end decodes it.
        return Size(width, height)
    return Size(height, width) if _orientation(image) in SIDEWAYS else Size(width, height)


def decode_picture(data: bytes) -> Image:
    """Return an encoded picture as RGB: turned as EXIF says, on white if transparent, 16 bits scaled to 8.

    Raises PictureError for one that is refused.
    """
    from contextlib import suppress

    from PIL import ImageOps

    image = _opened(data)
    _decode(image)
    with suppress(Exception):  # of broken EXIF data, which change nothing in the picture; as vLLM
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith(DEEP):
        return _scaled(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return _on_white(image.convert("RGBA"))
    return image.convert("RGB")


def thumbnail(image: Image) -> str:
    """Return a small copy of a decoded picture as a `data:` address, for pages that show it."""
    small = image.copy()
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=75)
    return _address("JPEG", out.getvalue())


def as_data_address(data: bytes) -> str:
    """Return an encoded picture as a `data:` address that a server shows its model as `decode_picture` would.

    A picture of more than 8 bits, which vLLM would clip, becomes a PNG of 8; others keep their bytes. Raises
    PictureError for one that is refused by its header.
    """
    image = _opened(data)
    if not image.mode.startswith(DEEP):
        return _address(image.format or "", data)
    return as_png_address(decode_picture(data))


def as_png_address(image: Image) -> str:
    """Return a decoded picture as a `data:` address of a PNG file, which loses nothing."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return _address("PNG", out.getvalue())


def from_data_address(address: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes in a `data:` address. Raises PictureError unless they are base64, and not too many."""
    head, comma, body = address.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PictureError("is a `data:` address without base64; expected `data:image/png;base64,…`")
    if len(body) > max_bytes * 4 // 3 + 4:
        raise PictureError(
            f"has {len(body):,} characters of base64; expected at most {max_bytes:,} bytes: save it smaller"
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"is not base64: {error}") from error


def _address(image_format: str, data: bytes) -> str:
    from PIL import Image

    kind = Image.MIME.get(image_format, "image/png")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _opened(data: bytes) -> Image:
    """Open a picture by its header alone; raise PictureError unless its size, shape and format are bounded."""
    from PIL import Image

    if len(data) > MAX_BYTES:
        raise PictureError(f"has {len(data):,} bytes; expected at most {MAX_BYTES:,}: save it smaller")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own bound is lower
            image = Image.open(_TimedReader(data), formats=FORMATS)
    except PictureError:
        raise
    except Image.DecompressionBombError as error:
        raise PictureError(f"claims more than {MAX_PIXELS:,} pixels; expected at most these") from error
    except Exception as error:  # whatever decoders raise for what is no picture
        raise PictureError(f"is no picture that can be opened; expected one of {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise PictureError(f"has {width} × {height} pixels; expected at most {MAX_PIXELS:,} in all: scale it down")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureError(f"has {width} × {height} pixels; expected sides of at most {MAX_ASPECT} to 1: cut it")
    if image.format in ("JPEG", SEVERAL_VIEWS) and (num_scans := _num_scans(data)) > MAX_SCANS:
        raise PictureError(f"has {num_scans:,} scans; expected at most {MAX_SCANS}: save it in another way")
    if getattr(image, "is_animated", False) and image.format != SEVERAL_VIEWS:
        raise PictureError("has several frames or pages; expected one: save the one that is meant")
    return image


def _num_scans(data: bytes) -> int:
    """Return the number of scans of a JPEG until its end, behind which anything may be, as a motion photo's video."""
    position = num_scans = 0
    while (marker := JPEG_MARKER.search(data, position)) and marker[1] != END_OF_FILE:
        num_scans += marker[1] == SCAN
        position = marker.end()
        if marker[1] != BEGIN_OF_FILE:
            # A segment's length counts its own two bytes; its content, such as a thumbnail, has markers of its own.
            position += max(2, int.from_bytes(data[position : position + 2]))
    return num_scans


def _decode(image: Image) -> None:
    try:
        image.load()
    except PictureError:
        raise
    except Exception as error:  # whatever decoders raise for damaged files
        raise PictureError(f"is damaged, and cannot be decoded: {error}; fetch or save it again") from error


def _orientation(image: Image) -> int:
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # broken EXIF data turn nothing
        return 1
    return found if isinstance(found, int) else 1


def _scaled(image: Image) -> Image:
    """Return a grey picture of 16 or 32 bits with 8: integers beyond 255 are parts of 65,535; floats, of their range.

    Band by band, since the numbers of a whole picture take eight times its memory.
    """
    import numpy as np
    from PIL import Image

    low, high = cast("tuple[float, float]", image.getextrema())  # of one band
    is_float = image.mode == "F"
    if is_float and low >= 0 and high <= 1:
        largest = 1.0
    else:
        largest = 65535.0 if high > 255 or image.mode.startswith("I;16") else 255.0
    scaled = Image.new("L", image.size)
    for top in range(0, image.height, BAND_ROWS):
        band = image.crop((0, top, image.width, min(top + BAND_ROWS, image.height)))
        values = np.nan_to_num(np.asarray(band, np.float32)) * (255 / largest)
        scaled.paste(Image.fromarray(values.clip(0, 255).round().astype(np.uint8)), (0, top))
    return scaled


def _on_white(image: Image) -> Image:
    from PIL import Image

    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white
