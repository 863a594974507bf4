"""Kinds of media that models read beside text, and what their processors need to know of each: a size, and contents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

MediaKind = Literal["image", "video", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
ModelPart = Literal["vision_tower", "projector", "language_model", "audio_tower"]
"""Part of a model that sees or hears; the merger of towers like Qwen's and GLM's is the projector."""
TOWERS: dict[ModelPart, MediaKind] = {"vision_tower": "image", "audio_tower": "audio"}
"""Kind of media by which Transformers names each tower; videos pass through that of pictures."""
TOWER_OF: dict[MediaKind, ModelPart] = {"image": "vision_tower", "video": "vision_tower", "audio": "audio_tower"}
NOUNS: dict[MediaKind, str] = {"image": "picture", "video": "video", "audio": "sound"}
"""Names of the kinds in messages."""
SUFFIXES: dict[MediaKind, tuple[str, ...]] = {
    "image": (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif"),
    "video": (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".mpg", ".mpeg"),
    "audio": (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"),
}
"""Endings of the names of files with media of each kind, in small letters; those of formats that are decoded."""
DIFFERENT = {kind: f"num_different_{noun}s" for kind, noun in NOUNS.items()}
"""Metrics of the artifact of a training: number of different media of each kind that the model learned from."""
SHOWN_TO_ANY: frozenset[MediaKind] = frozenset({"image"})
"""Kinds that judges and servers take of which no more is known than that their models see."""
MAX_PIXELS = 1 << 25
"""Largest number of pixels of a picture from outside: two copies of one, as turning it takes, fill 256 MiB."""
MEDIA_TAG, MEDIA_FILE = "media_sha256", "media.sha256"
"""Tag of that artifact with one digest over the contents of these media, and its file that lists them."""


def in_words(kinds: Collection[MediaKind]) -> str:
    """Return the names of kinds of media in messages: "pictures and videos"."""
    *firsts, last = (f"{NOUNS[kind]}s" for kind in KINDS if kind in kinds)
    return f"{', '.join(firsts)} and {last}" if firsts else last


def counted(kinds: Sequence[MediaKind]) -> str:
    """Return the numbers of media of each kind in messages: "1 picture and 2 videos"."""
    numbers = {kind: kinds.count(kind) for kind in KINDS if kind in kinds}
    return " and ".join(f"{number} {NOUNS[kind]}{'s' * (number > 1)}" for kind, number in numbers.items())


class MediaError(ValueError):
    """Raised for a medium that cannot be used; the message goes on from its name: "`a.mp4` …"."""


@dataclass(frozen=True)
class VideoSize:
    """Size of a video: width and height in pixels as it is shown, and its frames, at a rate in frames a second."""

    width: int
    height: int
    num_frames: int
    frame_rate: float

    @property
    def seconds(self) -> float:
        return self.num_frames / self.frame_rate

    @property
    def metadata(self) -> dict[str, float]:
        """Fields of Transformers' `VideoMetadata`."""
        sides = {"width": self.width, "height": self.height}
        return {**sides, "total_num_frames": self.num_frames, "fps": self.frame_rate, "duration": self.seconds}


@dataclass(frozen=True)
class SoundSize:
    """Size of a sound: its samples (of one channel), at a rate in samples a second."""

    num_samples: int
    sample_rate: int

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sample_rate

    def num_samples_at(self, rate: int) -> int:
        """Return the number of samples of this sound at another rate, in samples a second."""
        return -(-self.num_samples * rate // self.sample_rate)  # rounded up, as librosa does


@dataclass(frozen=True)
class TakenFrames:
    """Frames of a video that a model's server takes: `fps` a second of the video, within bounds."""

    fps: float
    min_frames: int
    max_frames: int

    def count(self, size: VideoSize) -> int:
        """Return the number of a video's frames that are taken."""
        return min(max(int(size.seconds * self.fps), self.min_frames), self.max_frames, size.num_frames)


@dataclass(frozen=True)
class HeardSound:
    """Sounds that a model's server takes: at this rate, in samples a second, and at most so long."""

    sample_rate: int
    max_seconds: float


MediaSize = tuple[int, int] | VideoSize | SoundSize
"""Size of a medium; of a picture its width and height in pixels, as it is shown."""


@dataclass(frozen=True)
class Video:
    """Frames of a video that a model takes: uint8 [frames, height, width, 3], by their numbers in the video.

    encoded: the whole video, as it lies in its file.
    """

    size: VideoSize
    frames: NDArray[np.uint8]
    numbers: Sequence[int]
    encoded: bytes


@dataclass(frozen=True)
class Sound:
    """Sound as a model takes it: float32 [samples] of one channel, at the rate of its processor. size: of its file."""

    size: SoundSize
    samples: NDArray[np.float32]
    sample_rate: int


Medium: TypeAlias = "Image | Video | Sound"


class Sampling(Protocol):
    """Parts of media that a model takes; implemented by `MediaProcessor`."""

    def taken(self, size: MediaSize) -> Any:
        """Return the numbers of a video's frames that the model takes, or the rate of a sound, in samples a second.

        Raises MediaError if there are too few frames, ModelError if the model takes no such media.
        """


SIZES: dict[MediaKind, Callable[[int, int, int, float], MediaSize]] = {
    "image": lambda width, height, _length, _rate: (width, height),
    "video": VideoSize,
    "audio": lambda _width, _height, length, rate: SoundSize(length, int(rate)),
}
"""Functions that make a size of each kind from width, height, number of frames or samples, and rate, as references have
them."""
LASTING = frozenset(KINDS) - {"image"}
"""Kinds whose media have a length in time."""


def kind_of(size: MediaSize) -> MediaKind:
    """Return the kind of the media with sizes of this form."""
    if isinstance(size, VideoSize):
        return "video"
    return "audio" if isinstance(size, SoundSize) else "image"
