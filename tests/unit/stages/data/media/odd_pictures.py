"""Odd pictures that people have: each is loaded as vLLM does, or refused for what is wrong with it.

Run as a program it decodes all of them, and prints its largest memory in MiB.
"""

import io
import struct
import sys
import zlib
from functools import cache

import numpy as np
from PIL import Image

from stages.data.media.images import PictureError, decode_picture, inspect_picture


def png_header(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that claims any size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def large_png(side: int) -> bytes:
    """Return a whole black PNG of `side` × `side` pixels, `side` a multiple of 16, as one compressed strip 16 times."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    strip = packer.compress(bytes(side // 16 * (side + 1))) + packer.flush(zlib.Z_FULL_FLUSH)
    adler = struct.pack(">HH", side * (side + 1) % 65521, 1)  # of zeros only
    body = b"\x78\x9c" + strip * 16 + zlib.compressobj(wbits=-zlib.MAX_WBITS).flush() + adler
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def overlapping_tiff(num_strips: int, side: int = 300) -> bytes:
    """Return a TIFF of `side` × `side` grey pixels that names one strip, of all rows but one, again and again."""
    strip = bytes(side * (side - 1))
    begin = 8 + len(strip) + 2 + 8 * 12 + 4
    values = {256: side, 257: side, 258: 8, 259: 1, 262: 1, 278: side - 1}
    tags = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items()]
    places = {273: begin, 279: begin + 4 * num_strips}
    tags += [struct.pack("<HHI", tag, 4, num_strips) + struct.pack("<I", place) for tag, place in places.items()]
    head = struct.pack("<2sHI", b"II", 42, 8 + len(strip))
    directory = struct.pack("<H", len(tags)) + b"".join(sorted(tags)) + bytes(4)
    return head + strip + directory + struct.pack("<I", 8) * num_strips + struct.pack("<I", len(strip)) * num_strips


def many_scans(number: int) -> bytes:
    """Return a progressive JPEG that goes over its pixels so many times more."""
    whole = saved(Image.new("L", (64, 64)), "JPEG", progressive=True)
    return whole[:-2] + whole[whole.rfind(b"\xff\xda") : -2] * number + whole[-2:]


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return a picture as the bytes of a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@cache
def odd_pictures() -> dict[str, bytes]:
    """Return the bytes of each odd picture, by its name."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 255, (60, 90, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    clear = noise.convert("RGBA")
    clear.putalpha(0)
    deep = Image.fromarray(rng.integers(0, 65535, (60, 90)).astype(np.uint16))
    frames = [Image.new("RGB", (90, 60), color) for color in ("red", "green", "blue")]
    whole = saved(noise, "JPEG")
    return {
        "jpeg": whole,
        "turned by EXIF": saved(noise, "JPEG", exif=exif),
        "CMYK": saved(noise.convert("CMYK"), "JPEG"),
        "transparent": saved(clear, "PNG"),
        "grey and alpha": saved(noise.convert("LA"), "PNG"),
        "palette and transparency": saved(noise.convert("P"), "PNG", transparency=0),
        "16 bits": saved(deep, "PNG"),
        "1 bit": saved(noise.convert("1"), "PNG"),
        "animated": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "truncated jpeg": whole[: len(whole) // 2],
        "truncated png": saved(noise, "PNG")[:-2000],
        "text": b"<html>404 not found</html>",
        "empty": b"",
        "claims 30000 × 30000": png_header(30000, 30000),
        "claims 60000 × 60000": png_header(60000, 60000),
        "400 megapixels": large_png(20000),
        "strip": saved(Image.new("RGB", (2000, 4)), "PNG"),
        "one pixel": saved(Image.new("RGB", (1, 1)), "PNG"),
        "webp": saved(noise, "WEBP"),
        "tiff of floats": saved(Image.fromarray(rng.random((60, 90)).astype(np.float32)), "TIFF"),
        "many scans": many_scans(200),
        "motion photo": whole + b"\xff\xda" * 200,
        "scans in a thumbnail": saved(noise, "JPEG", comment=b"\xff\xda" * 200),
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    }


def main() -> None:
    """Decode all odd pictures, and one of the largest size that is allowed; print the largest memory in MiB."""
    for data in (*odd_pictures().values(), large_png(5792)):
        try:
            inspect_picture(data)
            decode_picture(data)
        except PictureError:
            continue
    # Not getrusage's, which counts the process before it became this program.
    with open("/proc/self/status") as status:  # noqa: PTH123
        (peak,) = (line.split()[1] for line in status if line.startswith("VmHWM"))
    sys.stdout.write(f"{int(peak) // 1024}")


if __name__ == "__main__":
    main()
