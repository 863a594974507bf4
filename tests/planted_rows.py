"""Random text rows with known near-duplicates, and with known overlaps with a benchmark, for tests of curation."""

import itertools
import random
from dataclasses import dataclass

WORDS_PER_ROW = 130
VOCABULARY = 8000
FREQUENCIES = list(itertools.accumulate(1 / (rank + 2.7) for rank in range(VOCABULARY)))


@dataclass(frozen=True)
class Planted:
    """Random texts with planted near-duplicates, and for each near-duplicate the index of its original."""

    texts: list[str]
    copies: dict[int, int]


def text(draw: random.Random, num_words: int = WORDS_PER_ROW) -> str:
    """Return a random text with natural word frequencies (Zipf and Mandelbrot), capitals and full stops."""
    words = [f"w{rank}" for rank in draw.choices(range(VOCABULARY), cum_weights=FREQUENCIES, k=num_words)]
    for end in range(11, num_words, 12):
        words[end] += "."
        words[end - 11] = words[end - 11].capitalize()
    return " ".join(words)


def near_duplicate(draw: random.Random, original: str, way: int) -> str:
    """Return a near-duplicate of a text, changed in one of five ways that are common on the web."""
    words = original.split(" ")
    start = draw.randrange(20)
    match way % 5:
        case 0:  # every 20th word is another
            words[start::20] = [f"x{draw.randrange(10**6)}" for _ in words[start::20]]
        case 1:  # written in capitals, without full stops
            words = [word.upper().rstrip(".") for word in words]
        case 2:  # cut off, with something else at its end
            words = [*words[: int(len(words) * 0.8)], *text(draw, 10).split(" ")]
        case 3:  # a sentence is gone
            words = words[: start * 2] + words[start * 2 + 12 :]
        case 4:  # a header before it
            words = ["Posted", "by", f"user{draw.randrange(10**6)}", "on", "Monday:", *words]
    return " ".join(words)


def planted_duplicates(num_rows: int, seed: int = 0) -> Planted:
    """Return random texts: a tenth are near-duplicates, another tenth share half of their words with another."""
    draw = random.Random(seed)
    texts, copies = [text(draw) for _ in range(num_rows * 8 // 10)], {}
    originals = draw.sample(range(len(texts)), num_rows // 10)
    for way, original in enumerate(originals):
        copies[len(texts)] = original
        texts.append(near_duplicate(draw, texts[original], way))
    for half in draw.sample(sorted(set(range(num_rows * 8 // 10)) - set(originals)), num_rows - len(texts)):
        texts.append(f"{' '.join(texts[half].split(' ')[: WORDS_PER_ROW // 2])} {text(draw, WORDS_PER_ROW // 2)}")
    return Planted(texts, copies)


def with_overlap(draw: random.Random, row: str, sample: str, num_words: int) -> str:
    """Return a row with `num_words` consecutive words of a benchmark sample inserted."""
    words, of_sample = row.split(" "), sample.split(" ")
    start, at = draw.randrange(len(of_sample) - num_words + 1), draw.randrange(len(words))
    return " ".join([*words[:at], *of_sample[start : start + num_words], *words[at:]])
