"""Process that decodes videos from outside by PyAV, within limits of time and memory; `videos` asks it.

All packets are counted first, which costs a tenth of decoding them, so that the number of frames is the file's own and
not its header's; then a few key frames are decoded. Whatever the file says, decoding goes packet by packet, and counts
pixels and seconds of a core. One packet may hold any number of frames, which FFmpeg decodes in one step: it ends with
this process, where that takes too long.
"""

from __future__ import annotations

import mmap
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.program_loop import RefusedError, answer_questions
from stages.data.media.images import MAX_ASPECT
from stages.models.media import MediaError, VideoSize

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_SECONDS = 3600
MAX_FRAMES = 1 << 18
MAX_PIXELS = 1 << 23
"""Largest number of pixels of a frame: 3840 × 2160."""
MAX_DECODED_PIXELS = 1 << 34
"""Largest number of pixels of a video's frames together, of which most are decoded to find those that a model takes.

A minute's work for one core: 280 seconds at 1920 × 1080 and 30 frames a second, 40 minutes at 640 × 360.
"""
MAX_DECODING_S = 240
"""Largest number of seconds of one core that decoding takes, between two packets."""
PACKET_S = 10
"""Seconds of one core beyond these, after which the process ends in the midst of a packet."""
MEMORY_BYTES = 2 << 30
"""Memory for the frames that are kept and those that FFmpeg holds."""
MAX_KEY_FRAMES = 16
"""Number of key frames whose sizes are compared when a video is inspected."""
FORMATS = "mov,matroska,webm,avi,mpegts,mpeg"
"""FFmpeg's names of the files that are opened; others may name further files, or addresses (HLS, concat)."""
OPTIONS = {
    "format_whitelist": FORMATS,
    "protocol_whitelist": "none",
    "max_pixels": str(MAX_PIXELS),  # also while opening, which decodes frames of some files to know them
}
"""FFmpeg's options of what is opened."""
SERVED_CODECS = ("h264", "hevc", "mpeg4", "mpeg2video", "mjpeg", "vp8", "vp9", "ffv1")
"""FFmpeg's names of the codecs of which PyAV and OpenCV give the same frames; OpenCV has no decoder of AV1."""
SERVED_BITS = 8
QUARTER = 90
"""Degrees of the turns of which a video's frames may need one to four to be upright."""


def inspect_video(path: str) -> VideoSize:
    """Return the size of a video after counting its packets and decoding its key frames.

    Raises MediaError for one that is refused.
    """
    claimed, num_frames, rate = _counted(path)
    if num_frames == 0:
        raise MediaError("has no frames; fetch or save it again")
    if claimed > num_frames:
        raise MediaError(f"is cut off: it has {num_frames:,} of {claimed:,} frames; fetch or save it again")
    if not isfinite(rate) or rate <= 0:
        raise MediaError("does not say how many frames it has a second; save it with a constant rate")
    with _opened(path) as (container, stream):
        stream.codec_context.skip_frame = "NONKEY"
        key_frames = islice(_decoded(container, stream), MAX_KEY_FRAMES)
        shapes = {_upright(frame).shape[:2] for frame in key_frames}
    if not shapes:
        raise MediaError("has no key frame that can be decoded; fetch or save it again")
    if len(shapes) > 1:
        raise MediaError("has frames of several sizes; expected one: save it again")
    ((height, width),) = shapes
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise MediaError(f"has {width} × {height} pixels; expected sides of at most {MAX_ASPECT} to 1: cut it")
    size = VideoSize(width, height, num_frames, rate)
    if size.seconds > MAX_SECONDS:
        raise MediaError(f"has {size.seconds:,.0f} seconds; expected at most {MAX_SECONDS:,}: cut it")
    if (pixels := num_frames * width * height) > MAX_DECODED_PIXELS:
        raise MediaError(
            f"has {num_frames:,} frames of {width} × {height} pixels, in all {pixels:,}; expected at most "
            f"{MAX_DECODED_PIXELS:,}, which are decoded each time: scale it down, cut it, or save fewer frames a second"
        )
    return size


def decode_video(path: str, size: VideoSize, numbers: Sequence[int], frames: NDArray[np.uint8]) -> None:
    """Decode the frames of a video with these numbers, from 0, in order; some may be there more than once.

    size: as of `inspect_video`. frames: uint8 [frames, height, width, 3], into which they are written. Raises
    MediaError for damaged videos.
    """
    places: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number, []).append(place)
    with _opened(path) as (container, stream):
        for number, frame in enumerate(_decoded(container, stream)):
            if number in places:
                pixels = _upright(frame)
                if pixels.shape != frames.shape[1:]:
                    break
                frames[places.pop(number)] = pixels
                if not places:
                    break
    if places:
        raise MediaError("is damaged: some of its frames cannot be decoded; fetch or save it again")


def check_served(path: str) -> VideoSize:
    """Return the size of a video of which servers decode the frames that training takes of it, else raise MediaError.

    OpenCV, by which vLLM decodes, gives the same frames as PyAV of these codecs at 8 bits, numbered by the header.
    """
    size = inspect_video(path)
    with _opened(path) as (container, stream):
        codec, bits = stream.codec_context.codec.canonical_name, max(c.bits for c in stream.format.components)
        counted = stream.frames or int((container.duration or 0) / 1_000_000 * size.frame_rate + 0.5)
    if codec not in SERVED_CODECS or bits > SERVED_BITS:
        raise MediaError(
            f"is encoded as {codec} with {bits} bits a color, which servers decode otherwise than training, or not at "
            "all; save it as H.264 with 8 bits (`ffmpeg -i FILE -pix_fmt yuv420p OUT.mp4`)"
        )
    if counted != size.num_frames:
        raise MediaError(
            f"has {size.num_frames} frames, and {counted} by its header, which servers believe; save it with a "
            "constant rate (`ffmpeg -i FILE -fps_mode cfr OUT.mp4`)"
        )
    return size


def _counted(path: str) -> tuple[int, int, float]:
    """Return the numbers of frames that a video's header claims and that it has, and how many are shown a second."""
    with _opened(path) as (container, stream):
        claimed, num_frames = stream.frames, 0
        for packet in container.demux(stream):
            num_frames += packet.size > 0 and not packet.is_discard
            if num_frames > MAX_FRAMES:
                raise MediaError(f"has more than {MAX_FRAMES:,} frames; expected at most these: cut it")
        rate = float(stream.average_rate or stream.guessed_rate or 0)
    return claimed, num_frames, rate


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    """Yield a video's frames; raise MediaError where they have too many pixels together, or take too long."""
    begin_s, num_pixels = time.thread_time(), 0
    for packet in container.demux(stream):
        for frame in packet.decode():
            num_pixels += frame.width * frame.height
            if num_pixels > MAX_DECODED_PIXELS:
                raise MediaError(
                    f"has frames of more than {MAX_DECODED_PIXELS:,} pixels together, which its header does not say; "
                    "save it again"
                )
            yield frame
        if time.thread_time() - begin_s > MAX_DECODING_S:
            raise MediaError(
                f"takes more than {MAX_DECODING_S} seconds to decode; scale it down, cut it, or save it in another way"
            )


def _upright(frame: Any) -> NDArray[np.uint8]:
    """Return a decoded frame as RGB, uint8 [height, width, 3], turned as its file says."""
    import numpy as np

    if frame.width * frame.height > MAX_PIXELS:
        raise MediaError(f"has frames of {frame.width} × {frame.height} pixels; expected at most {MAX_PIXELS:,} pixels")
    turns = round(frame.rotation / QUARTER)
    pixels: NDArray[np.uint8] = np.rot90(frame.to_ndarray(format="rgb24"), turns)
    return pixels


@contextmanager
def _opened(path: str) -> Iterator[tuple[Any, Any]]:
    """Open a video by its header; raise MediaError for what is no video, too large, or fails while it is decoded.

    Raises MemoryError where FFmpeg gets no more memory.
    """
    import av

    av.logging.set_level(None)
    try:
        with open(path, "rb") as file, av.open(file, "r", options=OPTIONS) as opened:  # noqa: PTH123
            if not opened.streams.video:
                raise MediaError("has no stream of pictures; expected a video")
            stream = opened.streams.video[0]
            context = stream.codec_context
            if context is None:
                raise MediaError("is damaged, or of a codec that is not known; fetch it again, or save it as H.264")
            if context.width * context.height > MAX_PIXELS:
                raise MediaError(
                    f"has frames of {context.width} × {context.height} pixels; expected at most {MAX_PIXELS:,} pixels: "
                    "scale it down"
                )
            if opened.duration is not None and opened.duration > MAX_SECONDS * av.time_base:
                seconds = opened.duration / av.time_base
                raise MediaError(f"has {seconds:,.0f} seconds; expected at most {MAX_SECONDS:,}: cut it")
            context.options = {"max_pixels": str(MAX_PIXELS)}
            stream.thread_type = "NONE"
            context.thread_count = 1  # libdav1d, of AV1, else starts a thread for each core
            yield opened, stream
    except (av.FFmpegError, ValueError) as error:
        if isinstance(error, MediaError | MemoryError):  # PyAV's MemoryError is both
            raise
        raise MediaError(
            f"is no video that can be decoded ({getattr(error, 'strerror', None) or error}); expected MP4, WebM, "
            "Matroska, AVI or MPEG, or fetch it again"
        ) from error


def begin() -> Callable[[dict[str, Any]], list[float] | None]:
    """Import what decodes, and return the function that answers about videos.

    A question has `work`, one of `inspect`, `decode` and `serve`, and `video`, the path of the encoded one. To decode
    are its `size` and the `numbers` of frames, which are written to the file `frames`. Answered is the size.
    """
    import av  # noqa: F401
    import numpy as np

    pages = int(Path("/proc/self/statm").read_text().split(maxsplit=1)[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)

    def answer(question: dict[str, Any]) -> list[float] | None:
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + MAX_DECODING_S + PACKET_S)
        path = question["video"]
        try:
            if question["work"] == "decode":
                size, numbers = VideoSize(*question["size"]), question["numbers"]
                with open(question["frames"], "r+b") as file:  # noqa: PTH123
                    shared = mmap.mmap(file.fileno(), 0)
                decode_video(
                    path, size, numbers, np.frombuffer(shared, np.uint8).reshape(-1, size.height, size.width, 3)
                )
                return None
            size = check_served(path) if question["work"] == "serve" else inspect_video(path)
        except MediaError as error:
            raise RefusedError(str(error)) from error
        return [size.width, size.height, size.num_frames, size.frame_rate]

    return answer


def _limit(name: int, value: int) -> None:
    """Set a limit of this process, by which a question about a hostile video ends it."""
    _, hard = resource.getrlimit(name)
    resource.setrlimit(name, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    answer_questions(begin)
