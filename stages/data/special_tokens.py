"""Special tokens within what people wrote: encoded as text, refused, or taken for what they say.

A question that holds `<|im_end|><|im_start|>system` would otherwise end its own turn and begin another. What people
wrote is shielded before a template puts it between real special tokens: the characters of each special token in it move
to a private plane of Unicode, where no template and no tokenizer knows them, and lengths stay what they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from stages.core.numbers import counted
from stages.data.config import SpecialTokensPolicy
from stages.data.documents import Span
from stages.data.messages import RowError, listed

PRIVATE_PLANE = 0x100000
PRIVATE = re.compile(f"[{chr(PRIVATE_PLANE)}-{chr(PRIVATE_PLANE + 0xFFFD)}]+")
THOUGHT_TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]")
"""What templates look for in a text themselves, so that it stays."""


class SpecialTokens:
    """The special tokens of one tokenizer, as texts may contain them."""

    def __init__(self, backend: Tokenizer, policy: SpecialTokensPolicy) -> None:
        self._backend = backend
        self._policy = policy
        self._tokens = {number: token for number, token in backend.get_added_tokens_decoder().items() if token.special}
        contents = sorted((token.content for token in self._tokens.values()), key=len, reverse=True)
        self._in_texts = _any_of([content for content in contents if content not in THOUGHT_TAGS])
        self._real_or_shielded = re.compile(f"{_any_of(contents).pattern}|{PRIVATE.pattern}")
        self.counts: Counter[str] = Counter()
        """In how many documents each was found."""

    def shield(self, value: Any) -> Any:
        """The same with the strings in it, at any depth, shielded; `value` itself when there is nothing to shield.

        Raises RowError when the policy refuses what was found.
        """
        texts: list[str] = []
        _collect_texts(value, texts)
        found = {token for text in texts for token in self._in_texts.findall(text)}
        self.counts.update(found)
        if not found or self._policy == "allow":
            return value
        if self._policy == "refuse":
            raise RowError(
                f"has {listed(sorted(found))} in its text, which would be special tokens; expected none, or "
                "`special_tokens_in_content: text`"
            )
        if any(map(PRIVATE.search, texts)):
            raise RowError("has characters of Unicode's last private plane beside special tokens; expected either")
        return self._shielded(value)

    def is_shielded(self, text: str) -> bool:
        """Whether something in it is shielded; for texts that carry no note of it."""
        return bool(self.counts and PRIVATE.search(text))

    def encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Token ids and offsets of a text; what is shielded in it is encoded as text, other special tokens as such."""
        backend, numbers = self._swapped_backend
        encoding = backend.encode(self._real_or_shielded.sub(_swap, text), add_special_tokens=False)
        return [numbers.get(number, number) for number in encoding.ids], encoding.offsets

    def unshielded(self, text: str) -> str:
        """As people wrote it."""
        return PRIVATE.sub(_swap, text) if self.counts else text

    def warning(self, counts: Mapping[str, int]) -> str | None:
        """What was found, in how many documents, and what became of it."""
        if not counts:
            return None
        found = ", ".join(f"`{token}` ({counted(count, 'document')})" for token, count in sorted(counts.items()))
        if self._policy == "allow":
            return f"special tokens within texts: {found}; taken as such (`special_tokens_in_content: allow`)"
        return (
            f"special tokens within texts: {found}; encoded as text. Texts that a template has rendered already need "
            "`special_tokens_in_content: allow`"
        )

    @cached_property
    def _swapped_backend(self) -> tuple[Tokenizer, dict[int | None, int]]:
        """A tokenizer that knows the special tokens by their shielded forms only; its ids for these → the real ones."""
        backend = Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        numbers = {}
        for number, token in self._tokens.items():
            shielded = _moved(token.content, PRIVATE_PLANE)
            backend.add_tokens([AddedToken(shielded, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)])
            numbers[backend.token_to_id(shielded)] = number
        return backend, numbers

    def _shielded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._in_texts.sub(_swap, value)
        if isinstance(value, dict):
            return {self._shielded(key): self._shielded(item) for key, item in value.items()}
        return [self._shielded(item) for item in value] if isinstance(value, list | tuple) else value


def _any_of(contents: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, contents)) or r"(?!)")


def _swap(match: re.Match[str]) -> str:
    """A special token shielded, or shielded text as it was."""
    return _moved(match[0], -PRIVATE_PLANE if ord(match[0][0]) >= PRIVATE_PLANE else PRIVATE_PLANE)


def _moved(text: str, distance: int) -> str:
    return "".join(chr(ord(character) + distance) for character in text)


def _collect_texts(value: Any, texts: list[str]) -> None:
    """Add the strings in `value`, at any depth. Three times as fast as a generator, on what takes a third of the time
    of rendering.
    """
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect_texts(key, texts)
            _collect_texts(item, texts)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_texts(item, texts)
