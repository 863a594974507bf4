"""Search of a folder's texts by BM25 (Robertson and Zaragoza, 2009), for a model that looks things up.

A passage is a paragraph of a file. Its score for a query is the sum over the query's words of
idf · tf · (k1 + 1) / (tf + k1 · (1 - b + b · length / mean length)), with idf = ln(1 + (N - n + ½) / (n + ½)): tf times
in the passage, in n of N passages.
"""

import math
import re
from collections import Counter, defaultdict
from pathlib import Path

from stages.core.errors import DataError

K1, B = 1.2, 0.75
WORD = re.compile(r"\w+")
NUM_FOUND = 3
"""Number of passages in an answer."""
MOST_CHARACTERS = 1000
"""Largest number of characters of a passage; longer paragraphs are cut into several."""
MOST_BYTES = 64 << 20
"""Largest size of a folder; the index takes some twenty times as much memory."""
DEFINITION = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search texts for words; returns the passages that fit best.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


class Passages:
    """Index of the passages in a folder's files."""

    def __init__(self, folder: Path) -> None:
        """Read the UTF-8 texts of a folder. Raises DataError if it has none, or more than 64 MiB."""
        # Logs are no part of the folder's identity.
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log")
        num_bytes = sum(path.stat().st_size for path in files)
        if num_bytes > MOST_BYTES:
            raise DataError(f"{folder} has {num_bytes >> 20} MiB; expected at most {MOST_BYTES >> 20} MiB to search")
        self.texts = [
            f"{file.relative_to(folder)}: {text}" for file in files for text in _paragraphs(file.read_bytes())
        ]
        if not self.texts:
            raise DataError(f"{folder} has no text to search; expected files in UTF-8")
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lengths = [0] * len(self.texts)
        for number, text in enumerate(self.texts):
            counts = Counter(_words(text))
            self._lengths[number] = counts.total()
            for word, count in counts.items():
                self._postings[word].append((number, count))
        self._mean_length = sum(self._lengths) / len(self._lengths)

    def scores(self, query: str) -> dict[int, float]:
        """Return the score of each passage that shares words with the query, by its number."""
        scores: dict[int, float] = defaultdict(float)
        for word in sorted(set(_words(query))):  # floats are added in one order
            found = self._postings.get(word, [])
            idf = math.log(1 + (len(self.texts) - len(found) + 0.5) / (len(found) + 0.5))
            for number, count in found:
                norm = 1 - B + B * self._lengths[number] / self._mean_length
                scores[number] += idf * count * (K1 + 1) / (count + K1 * norm)
        return scores

    def search(self, query: str) -> str:
        """Return the passages that fit best, each after its file's name. Raises ValueError if none fits."""
        scores = self.scores(query)
        if not scores:
            raise ValueError("no passage has any of these words")
        best = sorted(scores, key=lambda number: (-scores[number], number))[:NUM_FOUND]
        return "\n\n".join(self.texts[number] for number in best)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _paragraphs(content: bytes) -> list[str]:
    """Return a text's paragraphs; none of a file that is no text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return []
    whole = [part.strip() for part in re.split(r"\n\s*\n", text)]
    return [
        part[begin : begin + MOST_CHARACTERS]
        for part in whole
        if WORD.search(part)
        for begin in range(0, len(part), MOST_CHARACTERS)
    ]
