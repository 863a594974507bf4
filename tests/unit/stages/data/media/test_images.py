"""Odd pictures are loaded as vLLM loads them or refused for what is wrong, within bounded memory."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from stages.data.media import images
from stages.data.media.images import PictureError, decode_picture, inspect_picture
from tests.unit.stages.data.media.odd_pictures import odd_pictures, overlapping_tiff, saved

ODD = odd_pictures()
REFUSED = {
    "animated": "has several frames or pages",
    "truncated jpeg": "is damaged, and cannot be decoded: image file is truncated",
    "truncated png": "is damaged, and cannot be decoded: image file is truncated",
    "text": "is no picture that can be opened",
    "empty": "is no picture that can be opened",
    "claims 30000 × 30000": "claims more than 33,554,432 pixels",
    "claims 60000 × 60000": "claims more than 33,554,432 pixels",
    "400 megapixels": "claims more than 33,554,432 pixels",
    "strip": "has 2000 × 4 pixels; expected sides of at most 100 to 1",
    "many scans": "has 206 scans; expected at most 100",
    "svg": "is no picture that can be opened",
}
SCALED = {"16 bits": 65535, "tiff of floats": 1}
"""Largest value of pictures of more than 8 bits, which vLLM clips to white or black."""


def as_vllm(data: bytes) -> Image.Image:
    """Decode a picture with the steps of vLLM's `ImageMediaIO.load_bytes`."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    image.load()
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.split()[3])
        return white
    return image.convert("RGB")


@pytest.mark.parametrize("name", [name for name in ODD if name not in {*REFUSED, *SCALED}])
def test_odd_pictures_are_loaded_as_vllm_does(name):
    image, size = decode_picture(ODD[name]), inspect_picture(ODD[name])
    assert image.mode == "RGB"
    assert image.size == (size.width, size.height)
    assert inspect_picture(ODD[name], by_header=True) == size
    assert np.array_equal(np.asarray(image), np.asarray(as_vllm(ODD[name])))


@pytest.mark.parametrize(("name", "largest"), SCALED.items(), ids=SCALED)
def test_more_bits_are_scaled(name, largest):
    values = np.asarray(Image.open(io.BytesIO(ODD[name])), np.float64) * 255 / largest
    found = np.asarray(decode_picture(ODD[name]), np.float64)
    assert np.abs(found - values[:, :, None]).max() <= 0.51
    assert inspect_picture(ODD[name]).width == 90


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 7, 8, 9])
def test_pictures_are_measured_as_they_are_turned(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.new("RGB", (9, 6)), kind, exif=exif)
    sizes = [inspect_picture(data, by_header=by_header) for by_header in (False, True)]
    width, height = decode_picture(data).size
    assert [(one.width, one.height) for one in sizes] == [(width, height)] * 2
    assert (width > height) == (orientation not in range(5, 9))


def test_what_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(images, "MAX_DECODING_S", 0.05)
    for function in (inspect_picture, decode_picture):
        with pytest.raises(PictureError, match=r"takes more than 0\.05 seconds to decode"):
            function(overlapping_tiff(100_000))


@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_used_is_refused_before_it_is_decoded(name, message):
    for function in (inspect_picture, decode_picture):
        with pytest.raises(PictureError) as error:
            function(ODD[name])
        assert message in str(error.value)


def test_memory_stays_small():
    """All of them, and the largest picture that is allowed, take at most 300 MiB."""
    ran = subprocess.run([sys.executable, "-m", "tests.unit.stages.data.media.odd_pictures"], capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    assert int(ran.stdout) <= 300
