"""References to a row's media: a place in the dataset's folder, a digest and a size, instead of pixels.

A record of one on disk has 39 bytes and its path: sha256, width and height (uint16), kind (uint8), length of the path
(uint16), path.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["image", "video", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
RECORD = struct.Struct("<32sHHBH")
MAX_PATH_BYTES = 0xFFFF


@dataclass(frozen=True)
class MediaReference:
    """Reference to one picture, video or sound of a row.

    path: within the dataset's folder; `FILE#ROW.NUMBER` for one that lies inside a data file. sha256: hex digest of the
    encoded bytes. width, height: in pixels, as it is shown; 0 for sound.
    """

    kind: MediaKind
    path: str
    sha256: str
    width: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height


def as_records(media: Sequence[MediaReference]) -> bytes:
    """Return the records of media one after the other."""
    records = bytearray()
    for one in media:
        path = one.path.encode()
        records += RECORD.pack(bytes.fromhex(one.sha256), one.width, one.height, KINDS.index(one.kind), len(path))
        records += path
    return bytes(records)


def of_records(records: bytes) -> tuple[MediaReference, ...]:
    """Return the media that records of `as_records` stand for."""
    return tuple(_each(records))


def _each(records: bytes) -> Iterator[MediaReference]:
    begin = 0
    while begin < len(records):
        digest, width, height, kind, num_bytes = RECORD.unpack_from(records, begin)
        begin += RECORD.size
        path = records[begin : begin + num_bytes].decode()
        begin += num_bytes
        yield MediaReference(KINDS[kind], path, digest.hex(), width, height)
