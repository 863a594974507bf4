"""Word splitting and n-gram hashes for comparing texts; the 64-bit hashes are the same in every process."""

import functools
import hashlib
import re
import unicodedata

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
# Thai and Lao, Burmese, Khmer, kana, and Chinese characters.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Regex range of characters of scripts that put no spaces between words; each character counts as a word."""
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
WORD_OR_SIGN = re.compile(rf"{WORD.pattern}|[-+*/=<>^%×÷±√]")
"""Pattern of a word or a mathematical sign; signs count so that 12 - 34 and 12 + 34 are not duplicates."""
CACHED_WORDS = 1 << 18
FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier of n-gram hashes: odd, so that it is invertible modulo 2^64; from the golden ratio (Knuth)."""


def words_of(text: str, pattern: re.Pattern[str] = WORD) -> list[str]:
    """Return the words of a text in lower case and Unicode's form NFKC, without punctuation."""
    return pattern.findall(unicodedata.normalize("NFKC", text).lower())


def hashes_of(words: list[str]) -> Hashes:
    """Return a 64-bit hash of each word, uint64 [words]."""
    return np.fromiter(map(_hash, words), np.uint64, len(words))


def runs_of(hashes: Hashes, num_words: int) -> Hashes:
    """Return a hash of each n-gram of `num_words` words, uint64 [words - num_words + 1], or none."""
    num_runs = len(hashes) - num_words + 1
    if num_runs < 1:
        return hashes[:0]
    found = np.zeros(num_runs, np.uint64)
    for first in range(num_words):  # a polynomial in FACTOR, modulo 2^64
        found = found * FACTOR + hashes[first : first + num_runs]
    return (found ^ (found >> np.uint64(29))) * FACTOR


@functools.lru_cache(CACHED_WORDS)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
