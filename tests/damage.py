"""Damage to files as a failing disk does it, for tests of checksums."""

from pathlib import Path


def flip_bit(path: Path, at: int) -> None:
    """Flip the lowest bit of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
