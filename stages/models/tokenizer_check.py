"""Limits on how much a tokenizer may lengthen texts, since it comes with a model and is untrusted.

Forty steps of a normalizer that double a letter fill any memory. A step's worst case follows from its kind; where all
steps together could do too much, short slices of a text go through them one by one, and are measured.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from stages.core.errors import ModelError

MAX_GROWTH = 16
SPARE_BYTES = 1 << 16
"""Bytes that a text may grow by, beyond `MAX_GROWTH` times its UTF-8 length (NFKC: a character 11 times as long)."""
MAX_CHAIN_GROWTH = 64
"""Largest growth by pre-tokenizers, or decoders: the product of worst cases, as these steps take a text whole."""
SLICE_CHARACTERS = 1 << 10
MAX_SLICE_BYTES = 1 << 20

FACTORS = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "BertNormalizer": 3.0,
    "ByteLevel": 2.0,
    "Metaspace": 4.0,
}
"""Largest factor by which each kind of tokenizer step can lengthen a text, in bytes; 1 for other kinds."""
CHAINS = ("normalizers", "pretokenizers", "decoders")

Step = Mapping[str, Any]


class LengthGrowth:
    """Bound on how much a tokenizer's normalizer, step by step, can lengthen texts."""

    def __init__(self, normalizer: Step | None) -> None:
        """Read the steps of a normalizer, as in a `tokenizer.json`, and how much each can lengthen a text."""
        self._steps = [(step, _factor(step)) for step in _steps(normalizer)]
        self.factor = math.prod(factor for _, factor in self._steps)
        """Largest factor by which the whole normalizer could lengthen a text, if each step were at its worst."""

    @classmethod
    def of(cls, backend: Tokenizer) -> LengthGrowth:
        """Return the bound on how much a loaded tokenizer's normalizer can lengthen texts."""
        return cls(_state(backend.normalizer))

    def problem(self, text: str) -> str | None:
        """Return why the tokenizer would make a text too long, after the words "the tokenizer"; else None."""
        # UTF-8 has at most 4 bytes a character, so that short texts need not be encoded.
        if self.factor <= MAX_GROWTH or len(text) * 4 * self.factor <= SPARE_BYTES:
            return None
        num_bytes = len(text.encode())
        left: float = SPARE_BYTES + MAX_GROWTH * num_bytes
        if num_bytes * self.factor <= left:
            return None
        if any(step["type"] == "Prepend" for step, _ in self._steps):
            # It stands before each part of a text that ends with a special token, of at least one letter.
            left -= len(text) // 2 * self._normalized_bytes("a")
        for begin in range(0, len(text), SLICE_CHARACTERS):
            left -= self._normalized_bytes(text[begin : begin + SLICE_CHARACTERS])
            if left < 0:
                return (
                    f"makes more than {MAX_GROWTH} times as many bytes of a text as its {num_bytes:,} (its normalizer "
                    f"has {len(self._steps)} steps), which could fill the memory; use another tokenizer"
                )
        return None

    def _normalized_bytes(self, text: str) -> float:
        """Return the bytes of a text after the tokenizer's normalizer; infinity if a step could make it too long."""
        for built, (step, factor) in zip(self._built, self._steps, strict=True):
            num_bytes = len(text.encode())
            if step["type"] == "Prepend":
                most = num_bytes + factor
            elif old := step.get("pattern", {}).get("String"):  # its factor is that of a text of nothing else
                most = num_bytes + text.count(old) * len(step["content"].encode())
            else:
                most = num_bytes * factor
            if most > MAX_SLICE_BYTES:
                return math.inf
            text = built.normalize_str(text)
        return len(text.encode())

    @cached_property
    def _built(self) -> list[Any]:
        """Normalizers of the tokenizers library, one for each step."""
        empty = json.loads(Tokenizer(models.BPE()).to_str())
        return [Tokenizer.from_str(json.dumps({**empty, "normalizer": step})).normalizer for step, _ in self._steps]


def check_tokenizer_file(folder: Path, *texts: str, max_factor: float = math.inf) -> None:
    """Raise ModelError if loading a model's `tokenizer.json`, or encoding one of `texts`, could fill the memory.

    Loading normalizes the tokens that are added. max_factor: how many times as long a normalizer may make any text,
    each step at its worst. Other faults are found by the library that loads it.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        growth = LengthGrowth(content.get("normalizer"))
        added = [token["content"] for token in content.get("added_tokens") or () if token.get("normalized")]
        for part in ("pre_tokenizer", "decoder"):
            if (factor := math.prod(map(_factor, _steps(content.get(part))))) > MAX_CHAIN_GROWTH:
                raise ModelError(
                    f"the `{part}` of the tokenizer in {folder} could make a text {factor:,.0f} times as long; "
                    f"expected at most {MAX_CHAIN_GROWTH}; use another tokenizer"
                )
        if growth.factor > max_factor:
            raise ModelError(
                f"the normalizer of the tokenizer in {folder} could make a text {growth.factor:,.0f} times as long; "
                f"expected at most {max_factor:,.0f}; use another tokenizer"
            )
        problems = [problem for text in (*added, *texts) if (problem := growth.problem(text))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    if problems:
        raise ModelError(f"the tokenizer in {folder} {problems[0]}")


def _state(part: Any) -> Step | None:
    return None if part is None else json.loads(part.__getstate__())


def _steps(part: Step | None) -> Iterator[Step]:
    """Yield the single steps of a normalizer, pre-tokenizer or decoder, in order."""
    if part is None:
        return
    chain = next((part[name] for name in CHAINS if name in part), None)
    if chain is None:
        yield part
    for step in chain or ():
        yield from _steps(step)


def _factor(step: Step) -> float:
    """Return the largest factor by which one tokenizer step can lengthen a text, in bytes."""
    kind = step["type"]
    if kind == "Prepend":
        return 1.0 + len(step["prepend"].encode())
    if kind == "Replace":
        new, old = len(step["content"].encode()), len(step["pattern"].get("String", "").encode())
        return max(1.0, new / old) if old else 1.0 + new  # a pattern may match nothing, before every character
    if kind == "Precompiled":
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        begin = 4 + int.from_bytes(charsmap[:4], "little")  # behind a trie: what characters are replaced by
        return float(max(1, *map(len, charsmap[begin:].split(b"\0"))))
    return FACTORS.get(kind, 1.0)
