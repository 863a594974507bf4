"""Estimates of a document's tokens without a tokenizer, for a first recipe."""

import json
import math

from stages.data.media_reference import MediaReference
from stages.data.messages import Document, PlainText, texts_of

TEMPLATE_TOKENS, TOOLS_TOKENS, MESSAGE_TOKENS = 128, 256, 16
"""Most tokens that a chat template adds: for a system prompt, for tool instructions, and around each message."""
PIXELS_PER_TOKEN, TOKENS_PER_SECOND = 28 * 28, 25
"""Pixels of a picture, or of a second of a video, that have a token, and tokens of a second of a sound (Qwen)."""
BYTES_PER_TOKEN = 3
"""Bytes per token, for estimates; deliberately low, since English text has 4 or more."""


def most_tokens(document: Document) -> int:
    """Return an upper bound of a document's number of tokens for any byte-level tokenizer and usual chat template."""
    if isinstance(document, PlainText):
        return num_bytes(document) + 2  # the special tokens around it
    framed = TEMPLATE_TOKENS + MESSAGE_TOKENS * len(document.messages) + TOOLS_TOKENS * bool(document.tools)
    return framed + num_bytes(document) + sum(map(_tokens_of, document.media))


def _tokens_of(medium: MediaReference) -> int:
    """Return an estimate of the tokens of a medium and its borders, as of Qwen's models."""
    seconds = medium.length / medium.rate if medium.rate else 0
    # A sound has no pixels, and a picture no length.
    of_pixels = math.ceil(max(1, seconds) * medium.width * medium.height / PIXELS_PER_TOKEN)
    return (of_pixels or int(TOKENS_PER_SECOND * seconds)) + MESSAGE_TOKENS


def num_bytes(document: Document) -> int:
    """Count a document's bytes in UTF-8, with tool definitions indented as JSON, as some templates write them."""
    if isinstance(document, PlainText):
        return len((document.prompt + document.completion).encode())
    texts = [text for message in document.messages for text in message.values() if isinstance(text, str)]
    texts += [text for one in document.messages if isinstance(one["content"], list) for text in texts_of(one)]
    objects = [*document.tools, *(message["tool_calls"] for message in document.messages if "tool_calls" in message)]
    texts += [json.dumps(value, ensure_ascii=False, indent=4) for value in objects]
    return sum(len(text.encode()) for text in texts)
