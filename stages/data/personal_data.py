"""Detection and masking of personal data by regular expressions and check digits: `[EMAIL]`, `[PHONE]`, ….

The libraries for this (presidio, scrubadub) bring language models or are no longer kept; names and addresses, which
only those find, are not looked for here.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

SPACED = r"[^\W\u3040-\u30ff\u3400-\u9fff]"
"""Pattern of a word character in languages that put spaces between words. In Chinese and Japanese, an address may
follow a word directly. For the same reason, the other patterns look at ASCII characters only."""
EMAIL = re.compile(
    rf"(?<!{SPACED})(?<![.%+-])(?:{SPACED}|[.%+-]){{1,64}}+@(?:[\w-]++\.){{1,10}}"
    rf"(?:[A-Za-z]{{2,24}}(?![A-Za-z0-9_])|[^\W\d_\u3040-\u30ff\u3400-\u9fff]{{2,24}}(?!{SPACED}))"
)
IP_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)|(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])",
    re.ASCII,
)
# Country, check digits, groups of four, maybe written with spaces; the last group may be shorter.
IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", re.ASCII)
# 13 to 19 digits (ISO/IEC 7812), of which the first names the kind of card.
CREDIT_CARD = re.compile(r"(?<![\d.+-])[2-6]\d{3}(?:[ -]?\d){9,15}(?!\d)")
PHONE = re.compile(
    r"(?<![\w.+-])(?:\+\d{1,3}(?:[ .-]?\(?\d{1,5}\)?){2,6}|(?:1[ .-])?(?:\(\d{3}\) ?\d{3}[ .-]\d{4}"
    r"|\d{3}([.-])\d{3}\1\d{4}))(?!\w|[.-]\d)",
    re.ASCII,
)
SHORTEST_IBAN = 15


def redacted(content: Any, kinds: Collection[str], counts: Counter[str]) -> Any:
    """Return a row's content with personal data in its texts masked (`[EMAIL]`, …), and count the masks by kind."""
    if isinstance(content, str):
        for kind in KINDS:
            if kind in kinds:
                content = _without(content, kind, counts)
        return content
    if isinstance(content, list):
        return [redacted(item, kinds, counts) for item in content]
    if isinstance(content, dict):
        return {key: redacted(item, kinds, counts) for key, item in content.items()}
    return content


def _without(text: str, kind: str, counts: Counter[str]) -> str:
    pattern, length_of = KINDS[kind]

    def write_over(match: re.Match[str]) -> str:
        length = length_of(match[0])
        if not length:
            return match[0]
        counts[kind] += 1
        return f"[{kind.upper()}]{match[0][length:]}"

    return pattern.sub(write_over, text)


def _ip_address(text: str) -> int:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return 0
    return len(text) if any(character.isdigit() for character in text) else 0


def _iban(text: str) -> int:
    """Return the length of a valid IBAN at the beginning of a text (ISO 13616: modulo 97 is 1), or 0 without one."""
    while len(text) >= SHORTEST_IBAN:
        joined = text.replace(" ", "")
        if int("".join(str(int(character, 36)) for character in joined[4:] + joined[:4])) % 97 == 1:
            return len(text)
        # The pattern may have taken the next word as a last group.
        text = text.rpartition(" ")[0]
    return 0


def _credit_card(text: str) -> int:
    """Return the length of a matched card number if it is valid (ISO/IEC 7812: Luhn checksum), or 0 if it is not."""
    digits = [int(character) for character in reversed(text) if character.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])  # 7 -> 14 -> 1 + 4
    return 0 if (sum(digits[::2]) + sum(doubled)) % 10 else len(text)


def _phone(text: str) -> int:
    return len(text) if 8 <= sum(character.isdigit() for character in text) <= 15 else 0


KINDS: dict[str, tuple[re.Pattern[str], Callable[[str], int]]] = {
    "email": (EMAIL, len),
    "ip_address": (IP_ADDRESS, _ip_address),
    "iban": (IBAN, _iban),
    "credit_card": (CREDIT_CARD, _credit_card),
    "phone": (PHONE, _phone),
}
"""Kinds of personal data, each with a pattern and a function that returns the length of a valid match, 0 if the match
is not valid. The order matters, since a card's number may look like a phone's."""
