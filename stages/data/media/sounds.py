"""Decoder of sounds from outside by soundfile, bounded before it decodes: formats, seconds, channels and rate.

A model takes one channel, the mean of all, at the rate of its processor (soxr), as librosa loads it. Both packages are
optional, and imported by the functions.
"""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stages.core.errors import ResourceError
from stages.core.shipped import install_command
from stages.models.media import HeardSound, MediaError, Sound, SoundSize

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BYTES = 64 << 20
MIN_SECONDS, MAX_SECONDS = 0.1, 1800
MAX_RATE = 48_000
MAX_CHANNELS = 8
MAX_DECODING_S = 60
"""Largest number of seconds of one core that decoding takes; half an hour of MP3 takes a few."""
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
"""libsndfile's names of the files that are read."""
FLOATS = 3
"""Number by which a WAV file says that its samples are floating-point numbers."""
BLOCK = 1 << 16
"""Number of samples of each channel that are decoded at a time."""
UNKNOWN_SIZE = "4294967295"
"""Size that WAV files name which were written as a stream."""
PAGE, LAST_PAGE = b"OggS", 4
"""First bytes of a page of OGG, and the bit of the last page in the byte of its type."""
TYPE_AT, LENGTHS_AT = 5, 27
"""Bytes of a page before that of its type, and before the lengths of its parts, whose number is the byte before."""


def inspect_sound(data: bytes, *, by_header: bool = False) -> SoundSize:
    """Return the size of an encoded sound after decoding it, or by its header alone; raise MediaError if refused."""
    with _opened(data) as file:
        size = SoundSize(file.frames, file.samplerate)
        if not by_header:
            _decoded(file)
    return size


def decode_sound(data: bytes, size: SoundSize, rate: int) -> Sound:
    """Return a sound at a model's rate, in samples a second. size: as of `inspect_sound`. Raises MediaError."""
    import numpy as np
    import soxr

    with _opened(data) as file:
        samples = _decoded(file)
    if rate != size.sample_rate:
        samples = soxr.resample(samples, size.sample_rate, rate)
        missing = size.num_samples_at(rate) - len(samples)
        samples = np.pad(samples, (0, missing)) if missing > 0 else samples[: len(samples) + missing]
    return Sound(size, samples, rate)


def encoded_sound(sound: Sound) -> bytes:
    """Return a sound as a WAV file of 32-bit floating-point numbers, of which decoding gives the same samples."""
    samples = sound.samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", FLOATS, 1, sound.sample_rate, 4 * sound.sample_rate, 4, 32)
    chunks = b"".join(name + struct.pack("<I", len(one)) + one for name, one in ((b"fmt ", form), (b"data", samples)))
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def sound_as_heard(data: bytes, heard: HeardSound) -> bytes:
    """Return an encoded sound as a WAV file of what a model hears of it. Raises MediaError for one that is refused."""
    size = inspect_sound(data, by_header=True)
    if size.seconds > heard.max_seconds:
        raise MediaError(
            f"has {size.seconds:,.1f} seconds; the served model takes at most {heard.max_seconds:,g}: cut it"
        )
    return encoded_sound(decode_sound(data, size, heard.sample_rate))


def _decoded(file: Any) -> NDArray[np.float32]:
    """Return the samples of an open sound, float32 [samples]: the mean of its channels."""
    import numpy as np

    blocks, begin_s = [np.empty(0, np.float32)], time.thread_time()
    # `file.blocks` would fill the end of a file that is cut off with whatever is in memory.
    while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
        blocks.append(block.mean(axis=1))
        if time.thread_time() - begin_s > MAX_DECODING_S:
            raise MediaError(f"takes more than {MAX_DECODING_S} seconds to decode; cut it, or save it in another way")
    samples = np.concatenate(blocks)
    if len(samples) != file.frames:
        raise MediaError(f"is cut off: it has {len(samples):,} of {file.frames:,} samples; fetch or save it again")
    if not np.isfinite(samples).all():
        raise MediaError("has samples that are no numbers; save it again")
    return samples


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open a sound by its header; raise MediaError for what is no sound, too large, or fails while it is decoded.

    Raises ResourceError where nothing decodes sounds.
    """
    try:
        import soundfile
        import soxr  # noqa: F401  # asked for here, before a training needs it
    except (ImportError, OSError) as error:  # OSError: the package is there, and not its library, libsndfile
        raise ResourceError(
            f"the data have sounds, which soundfile and soxr decode, and these do not work ({error}): run "
            f"`{install_command('media')}`, which installs them"
        ) from error
    if len(data) > MAX_BYTES:
        raise MediaError(f"has {len(data):,} bytes; expected at most {MAX_BYTES:,}: save it smaller")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check(file, data)
            yield file
    except soundfile.LibsndfileError as error:
        raise MediaError(
            f"is no sound that can be decoded ({error.error_string}); expected WAV, FLAC, OGG or MP3, or fetch it again"
        ) from error


def _check(file: Any, data: bytes) -> None:
    """Raise MediaError for an open sound out of bounds, or whose end is missing."""
    if file.format not in FORMATS:
        raise MediaError(f"is a sound of the format {file.format}; expected WAV, FLAC, OGG or MP3: convert it")
    if file.channels > MAX_CHANNELS:
        raise MediaError(f"has {file.channels} channels; expected at most {MAX_CHANNELS}: mix it")
    if not 0 < file.samplerate <= MAX_RATE:
        raise MediaError(f"has {file.samplerate:,} samples a second; expected at most {MAX_RATE:,}: convert it")
    is_longer = "(should be" in file.extra_info and UNKNOWN_SIZE not in file.extra_info
    if is_longer or (file.format == "OGG" and not _has_last_page(data)):
        raise MediaError("is cut off: its header says that it is longer; fetch or save it again")
    seconds = file.frames / file.samplerate
    if seconds > MAX_SECONDS:
        raise MediaError(f"has {seconds:,.0f} seconds; expected at most {MAX_SECONDS:,}: cut it")
    if seconds < MIN_SECONDS:
        raise MediaError(f"has {seconds:.2g} seconds; expected at least {MIN_SECONDS}: leave its row out")


def _has_last_page(data: bytes) -> bool:
    """Return whether the last page of an OGG file says that it is the last, and is there as a whole."""
    page = data[data.rfind(PAGE) :]
    if len(page) < LENGTHS_AT or not page[TYPE_AT] & LAST_PAGE:
        return False
    end = LENGTHS_AT + page[LENGTHS_AT - 1]
    return len(page) >= end + sum(page[LENGTHS_AT:end])
