"""Videos from outside: measured, checked and decoded by a process of its own (`video_program`), which may end.

The encoded video and its frames pass in shared memory. A process decodes one video at a time, and waits for the next.
PyAV is optional, and imported by that process alone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from stages.core.errors import ResourceError
from stages.core.program import Program, ProgramEndedError, ProgramError
from stages.core.shipped import install_command
from stages.models.media import MediaError, TakenFrames, Video, VideoSize

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 256 << 20
MAX_TAKEN_PIXELS = 1 << 27
"""Largest number of pixels of the frames that a model takes together: 384 MiB of them are in memory."""
CHANNELS = 3
TIMEOUT_S = 3600
"""Seconds after which a question ends even where its process does not get a core; the process bounds its own."""
_idle: defaultdict[int, list[Program]] = defaultdict(list)
"""Clients of decoding processes that wait, by the process that started them: a forked one gets its own."""


def inspect_video(data: bytes) -> VideoSize:
    """Return the size of an encoded video after counting its packets and decoding its key frames.

    Raises MediaError for one that is refused.
    """
    with _in_memory(data) as path:
        return VideoSize(*_asked({"work": "inspect", "video": path}))


def decode_video(data: bytes, size: VideoSize, numbers: Sequence[int]) -> Video:
    """Return the frames of an encoded video with these numbers, from 0, in order; some may be there more than once.

    size: as of `inspect_video`. Raises MediaError for damaged videos, and for more pixels than are bounded.
    """
    import numpy as np

    _check_taken(len(numbers), size, "scale it down, or set a lower `media.max_frames` or `media.fps`")
    shape = (len(numbers), size.height, size.width, CHANNELS)
    with _in_memory(data) as path, _shared("frames", int(np.prod(shape))) as frames:
        memory = mmap.mmap(frames, 0)
        asked = {"size": [size.width, size.height, size.num_frames, size.frame_rate], "numbers": [*numbers]}
        _asked({"work": "decode", "video": path, "frames": _path_of(frames), **asked})
    return Video(size, np.frombuffer(memory, np.uint8).reshape(shape), tuple(numbers), data)


def check_served(data: bytes, taken: TakenFrames) -> None:
    """Raise MediaError for an encoded video that servers would not decode to the frames that training takes of it."""
    with _in_memory(data) as path:
        size = VideoSize(*_asked({"work": "serve", "video": path}))
    _check_taken(taken.count(size), size, "scale it down, or cut it")


def first_frame(video: Video) -> Image:
    """Return the first of a video's frames that a model takes, as a picture."""
    from PIL.Image import fromarray

    return fromarray(video.frames[0])


def _check_taken(num_frames: int, size: VideoSize, remedy: str) -> None:
    if (pixels := num_frames * size.width * size.height) > MAX_TAKEN_PIXELS:
        raise MediaError(
            f"has {num_frames} frames of {size.width} × {size.height} pixels that the model takes, in all {pixels:,} "
            f"pixels; expected at most {MAX_TAKEN_PIXELS:,}: {remedy}"
        )


def _asked(question: dict[str, Any]) -> Any:
    """Return the answer of a decoding process, which is started if all others are busy.

    Raises MediaError for a video that it refuses, or that ends it; ResourceError where it does not work.
    """
    idle = _idle[os.getpid()]
    try:
        program = idle.pop()
    except IndexError:
        program = Program("stages.data.media.video_program")
    try:
        # Before the question: what fails without a video is no fault of the video.
        program.start()
    except (ProgramError, ProgramEndedError, TimeoutError) as error:
        raise _broken(error) from error
    try:
        return program.ask_hostile(question, TIMEOUT_S)
    except ProgramError as error:
        if error.kind != "RefusedError":
            raise _broken(error) from error
        raise MediaError(str(error)) from error
    except TimeoutError as error:
        program.close()  # after a lack of memory it goes on, with what FFmpeg has not freed
        raise MediaError(
            "takes more time or memory to decode than a video may, or ends its decoder; scale it down, cut it, or save "
            "it in another way"
        ) from error
    finally:
        idle.append(program)


def _broken(error: Exception) -> ResourceError:
    return ResourceError(
        f"the process that decodes videos does not work: {error or 'it did not start in time'}; check PyAV on this "
        f"machine (`{install_command('media')}` installs it)"
    )


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield a path at which a decoding process reads an encoded video.

    Raises MediaError for one that is too large, and ResourceError where nothing decodes videos.
    """
    if find_spec("av") is None:
        raise ResourceError(
            f"the rows have videos, which PyAV decodes, and that is not installed: run `{install_command('media')}`"
        )
    if len(data) > MAX_BYTES:
        raise MediaError(f"has {len(data):,} bytes; expected at most {MAX_BYTES:,}: save it smaller")
    with _shared("video", len(data)) as descriptor:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        yield _path_of(descriptor)


@contextmanager
def _shared(name: str, num_bytes: int) -> Iterator[int]:
    """Yield the descriptor of shared memory of a fixed size, which another process can fill, and not cut."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield descriptor
    finally:
        os.close(descriptor)


def _path_of(descriptor: int) -> str:
    """Return the path by which a process of the same user opens shared memory of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
