"""Which rows are drawn: by a number that each has for what it says and a seed, whatever other rows there are."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from stages.kinds.curate.config import Sample


def ranks(digests: NDArray[np.uint64], seed: int, purpose: str) -> NDArray[np.uint64]:
    """[rows]: uniform numbers; the purpose keeps two drawings of one seed from being of the same rows."""
    salt = f"{purpose} {seed}".encode()
    found = (hashlib.blake2b(digest.tobytes() + salt, digest_size=8).digest() for digest in digests)
    return np.frombuffer(b"".join(found), np.uint64)


def below(numbers: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Those in the first `fraction` of all numbers."""
    return numbers < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


def drawn(digests: NDArray[np.uint64], kept: NDArray[np.bool_], config: Sample, seed: int) -> NDArray[np.bool_]:
    """[rows]: of those that are kept, the ones that the sample consists of."""
    numbers = ranks(digests, seed, "sample")
    if config.fraction is not None:
        return kept & below(numbers, config.fraction)
    candidates = np.flatnonzero(kept)
    chosen = candidates[np.argsort(numbers[candidates], kind="stable")[: config.rows]]
    found = np.zeros(len(kept), np.bool_)
    found[chosen] = True
    return found
