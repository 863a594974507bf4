"""Damage to files, as a disk does it."""

from pathlib import Path


def flip_bit(path: Path, at: int) -> None:
    """Turn over one bit of the byte at a position."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
