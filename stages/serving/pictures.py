"""Check of the pictures in chat requests, before an engine sees them: nothing is fetched, and all is bounded.

A picture is OpenAI's part {type: image_url, image_url: {url}} with a `data:` address; an engine would also fetch
addresses of the web and read files. What is passed on is what was checked: parsed and written again.
"""

import json
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from stages.core.redaction import quoted
from stages.data.media.images import PictureError, as_data_address, from_data_address
from stages.serving.exchange import json_object

MAX_BODY_BYTES = 64 * 2**20
"""Largest request to a model that sees: a picture of the largest size as base64, and others beside it."""
MEDIA = re.compile(rb'"\w{0,32}(?:image|audio|video|file|embeds)\w{0,32}"|\\u00[4-7]|\0')
"""Pattern of request bodies that may hold media: their names, letters written as escapes, and other encodings."""
TEXTS = ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
ADDRESS = "data:image/"
SHOWN_CHARACTERS = 60
EXPECTED = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}'


class RefusedRequestError(ValueError):
    """Raised for a request that no engine may see; the message is for the client."""


def checked(body: bytes, max_images: int) -> bytes:
    """Return a chat request for the engine, with at most `max_images` pictures, decoded everywhere to the same pixels.

    Bodies without media are returned as they are. Raises RefusedRequestError.
    """
    if not MEDIA.search(body):
        return body
    asked = json_object(body)
    if asked is None:
        raise RefusedRequestError("expected a JSON object in UTF-8")
    numbers = count(1)
    messages = asked.get("messages")
    if not isinstance(messages, list):
        return body
    kept = [_message(message, max_images, numbers) for message in messages]
    return json.dumps({**asked, "messages": kept}).encode()


def _message(message: Any, max_images: int, numbers: Iterator[int]) -> Any:
    """Return a message with its pictures checked. numbers: 1, 2, … for the pictures of the request."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list | dict):
        return message
    content = message["content"]
    if isinstance(content, dict):
        raise RefusedRequestError("a message's `content` is an object; expected a text or a list of parts")
    return {**message, "content": [_part(part, max_images, numbers) for part in content]}


def _part(part: Any, max_images: int, numbers: Iterator[int]) -> Any:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    # With a `uuid`, vLLM reads the part's other fields whatever its type, or another request's picture.
    if not isinstance(part, dict) or not isinstance(kind, str) or part.get("uuid") is not None:
        raise RefusedRequestError(f"a part of a message is no text and no picture; expected {EXPECTED}")
    if kind in TEXTS:
        return part
    if kind != "image_url":
        raise RefusedRequestError(
            f"a message has a part of type {quoted(kind, SHOWN_CHARACTERS)}; expected text"
            + (f", or {EXPECTED}" if max_images else ": this model reads text alone")
        )
    number = next(numbers)
    if number > max_images:
        raise RefusedRequestError(
            f"the request has more than {max_images} pictures, the server's `max_images`; send fewer"
            if max_images
            else "the request has a picture, and this model reads text alone"
        )
    return {"type": "image_url", "image_url": {"url": _address(part.get("image_url"), number)}}


def _address(holder: Any, number: int) -> str:
    url = holder.get("url") if isinstance(holder, dict) else holder
    if not isinstance(url, str) or not url.startswith(ADDRESS):
        shown = f"at {quoted(url, SHOWN_CHARACTERS)}" if isinstance(url, str) else "without an address"
        raise RefusedRequestError(f"picture {number} is {shown}; nothing is fetched here: expected {EXPECTED}")
    try:
        return as_data_address(from_data_address(url))
    except PictureError as error:
        raise RefusedRequestError(f"picture {number} {error}") from error
