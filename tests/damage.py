"""Damage files as a failing disk does."""

from pathlib import Path


def flip_bit(path: Path, at: int) -> None:
    """Flip the lowest bit of the byte at an offset."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
