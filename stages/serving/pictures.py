"""Check of the media in chat requests, before an engine sees them: nothing is fetched, and all is bounded.

A picture is OpenAI's part {type: image_url, image_url: {url}} with a `data:` address, a video one of `video_url`; an
engine would also fetch addresses of the web and read files. A video is measured as one of a row, and decoded by the
engine. What is passed on is what was checked: parsed and written again.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from stages.core.redaction import quoted
from stages.data.media.addresses import as_video_address
from stages.data.media.images import as_data_address, from_data_address
from stages.data.media.videos import MAX_BYTES
from stages.models.media import NOUNS, MediaError, MediaKind
from stages.serving.exchange import json_object

MAX_BODY_BYTES = 64 * 2**20
"""Largest request to a model that sees: a picture of the largest size as base64, and others beside it."""
MEDIA = re.compile(rb'"\w{0,32}(?:image|audio|video|file|embeds)\w{0,32}"|\\u00[4-7]|\0')
"""Pattern of request bodies that may hold media: their names, letters written as escapes, and other encodings."""
TEXTS = ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
SHOWN_CHARACTERS = 60
KINDS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video"}
"""Kind of the media by a part's type."""
EXPECTED = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}'
EXPECTED_VIDEO = '{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,…"}}'


class RefusedRequestError(ValueError):
    """Raised for a request that no engine may see; the message is for the client."""


@dataclass(frozen=True)
class Limits:
    """Largest numbers of pictures and of videos in a request; 0 for what the served model does not take."""

    images: int = 0
    videos: int = 0

    def of(self, kind: MediaKind) -> int:
        return {"image": self.images, "video": self.videos}.get(kind, 0)

    @property
    def expected(self) -> str:
        """Kinds of parts that a message may have beside text, in words."""
        return " or ".join([EXPECTED, *([EXPECTED_VIDEO] if self.videos else [])])


def checked(body: bytes, limits: Limits) -> bytes:
    """Return a chat request for the engine, with no more media than `limits`, decoded everywhere to the same pixels.

    Bodies without media are returned as they are. Raises RefusedRequestError.
    """
    if not MEDIA.search(body):
        return body
    asked = json_object(body)
    if asked is None:
        raise RefusedRequestError("expected a JSON object in UTF-8")
    messages = asked.get("messages")
    if not isinstance(messages, list):
        return body
    counts: Counter[MediaKind] = Counter()
    kept = [_message(message, limits, counts) for message in messages]
    return json.dumps({**asked, "messages": kept}).encode()


def _message(message: Any, limits: Limits, counts: Counter[MediaKind]) -> Any:
    """Return a message with its media checked. counts: number of those of the request, by kind."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list | dict):
        return message
    content = message["content"]
    if isinstance(content, dict):
        raise RefusedRequestError("a message's `content` is an object; expected a text or a list of parts")
    return {**message, "content": [_part(part, limits, counts) for part in content]}


def _part(part: Any, limits: Limits, counts: Counter[MediaKind]) -> Any:
    if isinstance(part, str):
        return part
    name = part.get("type") if isinstance(part, dict) else None
    # With a `uuid`, vLLM reads the part's other fields whatever its type, or another request's picture.
    if not isinstance(part, dict) or not isinstance(name, str) or part.get("uuid") is not None:
        raise RefusedRequestError(f"a part of a message is no text and no picture; expected {limits.expected}")
    if name in TEXTS:
        return part
    kind = KINDS.get(name)
    if kind is None or (kind != "image" and not limits.of(kind)):
        raise RefusedRequestError(
            f"a message has a part of type {quoted(name, SHOWN_CHARACTERS)}; expected text"
            + (f", or {limits.expected}" if limits.images else ": this model reads text alone")
        )
    counts[kind] += 1
    if counts[kind] > limits.of(kind):
        raise RefusedRequestError(
            f"the request has more than {limits.of(kind)} {NOUNS[kind]}s, the server's `max_images`; send fewer"
            if limits.images
            else "the request has a picture, and this model reads text alone"
        )
    return {"type": name, name: {"url": _address(part.get(name), kind, counts[kind])}}


def _address(holder: Any, kind: MediaKind, number: int) -> str:
    url = holder.get("url") if isinstance(holder, dict) else holder
    if not isinstance(url, str) or not url.startswith(f"data:{kind}/"):
        shown = f"at {quoted(url, SHOWN_CHARACTERS)}" if isinstance(url, str) else "without an address"
        expected = EXPECTED_VIDEO if kind == "video" else EXPECTED
        raise RefusedRequestError(f"{NOUNS[kind]} {number} is {shown}; nothing is fetched here: expected {expected}")
    try:
        if kind == "video":
            return as_video_address(from_data_address(url, MAX_BYTES))
        return as_data_address(from_data_address(url))
    except MediaError as error:
        raise RefusedRequestError(f"{NOUNS[kind]} {number} {error}") from error
