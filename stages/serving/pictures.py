"""Check of the media in chat requests, before an engine sees them: nothing is fetched, and all is bounded.

A picture is OpenAI's part {type: image_url, image_url: {url}} with a `data:` address, a video one of `video_url`, a
sound one of `audio_url` or OpenAI's `input_audio`; an engine would also fetch addresses of the web and read files. A
video is measured as one of a row, and decoded by the engine; a sound is decoded here, as training does, and goes on at
the model's rate. What is passed on is what was checked: parsed and written again.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.core.redaction import quoted
from stages.data.media import sounds, videos
from stages.data.media.addresses import FORMS
from stages.data.media.images import from_data_address
from stages.models.media import KINDS, NOUNS, SHOWN_TO_ANY, HeardSound, MediaError, MediaKind, TakenFrames
from stages.serving.exchange import json_object

MAX_BODY_BYTES = 64 * 2**20
"""Largest request to a model that sees: a picture of the largest size as base64, and others beside it."""
MEDIA = re.compile(rb'"\w{0,32}(?:image|audio|video|file|embeds)\w{0,32}"|\\u00[4-7]|\0')
"""Pattern of request bodies that may hold media: their names, letters written as escapes, and other encodings."""
TEXTS = ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
SHOWN_CHARACTERS = 60
OPENAI_SOUND = "input_audio"
"""Type of OpenAI's parts with sounds, whose base64 stands in no address."""
PLACED_ALIKE = ("Qwen3VLVideoProcessor",)
"""Processors of videos after which vLLM numbers places as Transformers does, and takes the same frames."""
PLACED_OTHERWISE = (
    "vLLM is not known to read a video as training did, but for Qwen3-VL with `media.fps` of at most 30 and "
    "`media.max_frames` of at most 768 (after one, it numbers the places of Qwen2-VL and Qwen2.5-VL otherwise)"
)
LEAST_FRAMES, MOST_FRAMES, MOST_FRAMES_A_SECOND = 4, 768, 30
"""Bounds of the frames that vLLM takes of a video, whatever its processor says."""
MOST_SECONDS = 300
"""Largest number of seconds of a sound in a request to a model whose processor has no bound."""


class RefusedRequestError(ValueError):
    """Raised for a request that no engine may see; the message is for the client."""


@dataclass(frozen=True)
class Limits:
    """Largest number of media of each kind in a request, and what the served model takes of them.

    most: 0 for a model that reads text alone. taken: by kind, as `ServedKind` has it; None for a kind that the model
    learned from and is served without.
    """

    most: int = 0
    taken: Mapping[MediaKind, Any] = field(default_factory=lambda: dict.fromkeys(SHOWN_TO_ANY, True))

    def of(self, kind: MediaKind) -> int:
        """Return the largest number of media of a kind in a request."""
        return self.most if self.taken.get(kind) else 0

    @property
    def reasons(self) -> dict[MediaKind, str]:
        """Reasons by kind why media that the model learned from are not taken, where there is one."""
        found = {kind: SERVED[kind].unseen for kind, taken in self.taken.items() if not taken}
        return {kind: reason for kind, reason in found.items() if reason}

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """Kinds of media that the model takes."""
        return frozenset(kind for kind in KINDS if self.of(kind))

    @property
    def expected(self) -> str:
        """Kinds of parts that a message may have beside text, in words."""
        return " or ".join(served.example for kind, served in SERVED.items() if self.of(kind))


def address_for(kind: MediaKind, data: bytes, limits: Limits) -> str:
    """Return an encoded medium as the `data:` address that an engine gets; raises MediaError for one out of bounds."""
    return FORMS[kind].address(SERVED[kind].checked(data, limits.taken[kind]))


@dataclass(frozen=True)
class ServedKind:
    """Media of one kind as servers take them.

    example: of a message's part with one. taken: returns what a model takes by the settings of its processor; falsy if
    none. checked: checks an encoded medium by what is taken, and returns what an engine gets. unseen: reason why models
    that learned from such media may be served without them. openai: OpenAI's own type of such parts.
    """

    example: str
    taken: Callable[[dict[str, Any] | None], Any]
    checked: Callable[[bytes, Any], bytes]
    unseen: str | None = None
    openai: str | None = None


def _taken_frames(settings: dict[str, Any] | None) -> TakenFrames | None:
    """Return the frames that vLLM takes by a processor's settings as training does; None where it would not."""
    processor = settings or {}
    rate, least, most = (processor.get(name) for name in ("fps", "min_frames", "max_frames"))
    taken = TakenFrames(rate or 0, least or LEAST_FRAMES, most or MOST_FRAMES)
    is_alike = processor.get("video_processor_type") in PLACED_ALIKE and not processor.get("num_frames")
    within = 0 < taken.fps <= MOST_FRAMES_A_SECOND and taken.max_frames <= MOST_FRAMES
    return taken if is_alike and within else None


def _heard(settings: dict[str, Any] | None) -> HeardSound | None:
    extractor = settings or {}
    rate = extractor.get("sampling_rate")
    return HeardSound(rate, extractor.get("chunk_length") or MOST_SECONDS) if rate else None


def _checked_video(data: bytes, frames: TakenFrames) -> bytes:
    videos.check_served(data, frames)
    return data


SERVED: dict[MediaKind, ServedKind] = {
    "image": ServedKind(
        '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}',
        lambda settings: settings is not None,
        lambda data, _: data,
    ),
    "video": ServedKind(
        '{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,…"}}',
        _taken_frames,
        _checked_video,
        unseen=PLACED_OTHERWISE,
    ),
    "audio": ServedKind(
        '{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,…"}}',
        _heard,
        sounds.sound_as_heard,
        openai=OPENAI_SOUND,
    ),
}
PARTS = {f"{kind}_url": kind for kind in SERVED} | {one.openai: kind for kind, one in SERVED.items() if one.openai}
"""Kind of the media by a part's type."""


def checked(body: bytes, limits: Limits) -> bytes:
    """Return a chat request for the engine, with no more media than `limits`, which it decodes as training does.

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
        raise RefusedRequestError(f"a part of a message is no text and no medium; {_expected(limits)}")
    if name in TEXTS:
        return part
    kind = PARTS.get(name)
    if kind and (reason := limits.reasons.get(kind)):
        raise RefusedRequestError(f"the request has a {NOUNS[kind]}, and {reason}")
    if kind is None or not limits.of(kind):
        raise RefusedRequestError(f"a message has a part of type {quoted(name, SHOWN_CHARACTERS)}; {_expected(limits)}")
    counts[kind] += 1
    if counts[kind] > limits.of(kind):
        raise RefusedRequestError(
            f"the request has more than {limits.of(kind)} {NOUNS[kind]}s, the server's `max_images`; send fewer"
        )
    address = _address(part.get(name), name, limits, counts[kind])
    return {"type": f"{kind}_url", f"{kind}_url": {"url": address}}


def _expected(limits: Limits) -> str:
    return f"expected text, or {limits.expected}" if limits.expected else "expected text: this model reads text alone"


def _address(holder: Any, name: str, limits: Limits, number: int) -> str:
    """Return the `data:` address of the medium in a part of type `name`, the number-th of its kind."""
    kind = PARTS[name]
    if name == OPENAI_SOUND and isinstance(holder, dict) and isinstance(holder.get("data"), str):
        url: Any = f"data:audio/wav;base64,{holder['data']}"
    else:
        url = holder.get("url") if isinstance(holder, dict) else holder
    if not isinstance(url, str) or not url.startswith(f"data:{kind}/"):
        shown = f"at {quoted(url, SHOWN_CHARACTERS)}" if isinstance(url, str) else "without an address"
        raise RefusedRequestError(
            f"{NOUNS[kind]} {number} is {shown}; nothing is fetched here: expected {SERVED[kind].example}"
        )
    try:
        return address_for(kind, from_data_address(url, FORMS[kind].max_bytes), limits)
    except MediaError as error:
        raise RefusedRequestError(f"{NOUNS[kind]} {number} {error}") from error
