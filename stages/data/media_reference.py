"""References to a row's media: a place in the dataset's folder, a digest and a size, instead of pixels.

A record of one on disk has 39 bytes and its path: sha256, width and height (uint16), kind (uint8), length of the path
(uint16), path. After that of a video come the number of its frames (uint32) and their rate (float64), after that of a
sound the number of its samples and theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stages.models.media import KINDS, LASTING, SIZES, MediaKind, MediaSize, SoundSize, VideoSize, kind_of

RECORD = struct.Struct("<32sHHBH")
IN_TIME = struct.Struct("<Id")
MAX_PATH_BYTES = 0xFFFF


@dataclass(frozen=True)
class MediaReference:
    """Reference to one picture, video or sound of a row.

    path: within the dataset's folder; `FILE#ROW.NUMBER` for one that lies inside a data file. sha256: hex digest of the
    encoded bytes. width, height: in pixels, as it is shown; 0 for sound. length: number of a video's frames, or of a
    sound's samples; rate: of them a second; both 0 for pictures.
    """

    kind: MediaKind
    path: str
    sha256: str
    width: int
    height: int
    length: int = 0
    rate: float = 0

    @classmethod
    def of(cls, path: str, sha256: str, size: MediaSize) -> MediaReference:
        """Return the reference to a medium of this size."""
        kind = kind_of(size)
        if isinstance(size, VideoSize):
            return cls(kind, path, sha256, size.width, size.height, size.num_frames, size.frame_rate)
        if isinstance(size, SoundSize):
            return cls(kind, path, sha256, 0, 0, size.num_samples, size.sample_rate)
        return cls(kind, path, sha256, *size)

    @property
    def size(self) -> MediaSize:
        return SIZES[self.kind](self.width, self.height, self.length, self.rate)


def as_records(media: Sequence[MediaReference]) -> bytes:
    """Return the records of media one after the other."""
    records = bytearray()
    for medium in media:
        path, kind = medium.path.encode(), KINDS.index(medium.kind)
        records += RECORD.pack(bytes.fromhex(medium.sha256), medium.width, medium.height, kind, len(path)) + path
        if medium.kind in LASTING:
            records += IN_TIME.pack(medium.length, medium.rate)
    return bytes(records)


def of_records(records: bytes) -> tuple[MediaReference, ...]:
    """Return the media that records of `as_records` stand for."""
    return tuple(_each(records))


def _each(records: bytes) -> Iterator[MediaReference]:
    begin = 0
    while begin < len(records):
        digest, width, height, number, num_bytes = RECORD.unpack_from(records, begin)
        begin += RECORD.size
        path = records[begin : begin + num_bytes].decode()
        begin += num_bytes
        kind, length, rate = KINDS[number], 0, 0.0
        if kind in LASTING:
            length, rate = IN_TIME.unpack_from(records, begin)
            begin += IN_TIME.size
        yield MediaReference(kind, path, digest.hex(), width, height, length, rate)
