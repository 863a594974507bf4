"""Requests with videos and sounds are checked before the engine sees them, bounded, and changed to what it hears."""

import io
import json
import re
from base64 import b64decode, b64encode
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from stages.data.media import videos
from stages.data.media.sounds import decode_sound, inspect_sound
from stages.models.media import HeardSound, TakenFrames
from stages.serving.pictures import Limits, RefusedRequestError, checked
from tests.unit.stages.data.media.conftest import repeated_frame, sound, video
from tests.unit.stages.serving.test_proxy import PNG, at, chat

LIMITS = Limits(1, {"image": True, "video": TakenFrames(2, 4, 8), "audio": HeardSound(16_000, 30)})


def address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def asked(*parts: dict[str, Any], limits: Limits = LIMITS) -> bytes:
    return checked(json.dumps(chat(*parts)).encode(), limits)


def refusal(*parts: dict[str, Any], limits: Limits = LIMITS) -> str:
    with pytest.raises(RefusedRequestError) as error:
        asked(*parts, limits=limits)
    return str(error.value)


def test_videos_reach_the_engine_only_inside_of_requests_and_bounded():
    content = video()
    mp4, lists = (part("video", address(f"video/{kind}", content)) for kind in ("mp4", "jpeg"))
    assert json.loads(asked(at(PNG), mp4)) == json.loads(asked(at(PNG), lists)) == chat(at(PNG), mp4)
    refused = {
        "http://127.0.0.1/a.mp4": "video 1 is at 'http://127.0.0.1/a.mp4'; nothing is fetched here",
        "file:///etc/hostname": "nothing is fetched here",
        PNG: "nothing is fetched here",
        "data:video/jpeg;base64,AA,AA": "video 1 is not base64",
        "data:video/mp4;base64,AAAA": "video 1 is no video that can be decoded",
        address("video/mp4", repeated_frame((4096, 4096), 1)): "expected at most 8,388,608",
    }
    for url, message in refused.items():
        assert message in refusal(part("video", url))
    assert "more than 1 videos, the server's `max_images`" in refusal(mp4, mp4)
    for limits in (Limits(1), Limits()):
        assert "a part of type 'video_url'" in refusal(mp4, limits=limits)
    assert "has a video, and vLLM is not known" in refusal(mp4, limits=Limits(1, {"image": True, "video": None}))


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_sounds_reach_the_engine_as_training_hears_them(kind: str):
    content = sound(0.6, 22050, 2, 1, kind)
    encoded = b64encode(content).decode()
    openai = {"type": "input_audio", "input_audio": {"data": encoded, "format": kind.lower()}}
    sent, own = (json.loads(asked(one)) for one in (part("audio", address("audio/x", content)), openai))
    assert sent == own
    (given,) = (one for one in sent["messages"][0]["content"] if one["type"] == "audio_url")
    samples, rate = soundfile.read(io.BytesIO(b64decode(given["audio_url"]["url"].partition(",")[2])), dtype="float32")
    assert rate == 16_000
    np.testing.assert_array_equal(samples, decode_sound(content, inspect_sound(content), 16_000).samples)


def test_other_sounds_are_refused():
    refused = {
        "https://127.0.0.1/a.wav": "sound 1 is at 'https://127.0.0.1/a.wav'; nothing is fetched here",
        "file:///etc/hostname": "nothing is fetched here",
        "data:audio/wav;base64,AAAA": "sound 1 is no sound that can be decoded",
        "data:audio/wav;base64,%%": "sound 1 is not base64",
        address("audio/wav", sound(31, 8000)): "has 31.0 seconds; the served model takes at most 30: cut it",
        address("audio/wav", sound(rate=96_000)): "expected at most 48,000",
        address("audio/wav", sound()[:-1000]): "is cut off",
    }
    for url, message in refused.items():
        assert message in refusal(part("audio", url))
    hears = part("audio", address("audio/wav", sound()))
    assert "more than 1 sounds" in refusal(hears, hears)
    assert re.search("a part of type 'audio_url'; expected text, or .*image_url", refusal(hears, limits=Limits(1)))
    assert "reads text alone" in refusal(hears, limits=Limits())
    deaf = refusal(at(PNG), limits=Limits(1, {"audio": HeardSound(16_000, 30)}))
    assert "a part of type 'image_url'; expected text, or" in deaf and "audio_url" in deaf
    assert "without an address" in refusal({"type": "input_audio", "input_audio": {"format": "wav"}})


def filmed(codec: str = "libx264", pix_fmt: str = "yuv420p", kind: str = "mp4", every: int = 1) -> bytes:
    """Return a black video of 12 frames, of which each stands `every` times as long as its rate says."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=12, width=64, height=64, pix_fmt=pix_fmt)
        for number in range(12):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            frame.pts, frame.time_base = number * every if number else 0, Fraction(1, 12)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # Not AV1: in a process of root, its encoder takes real-time priority before all others, for good.
        (filmed("msmpeg4", kind="matroska"), "is encoded as msmpeg4v3 with 8 bits a color"),
        (filmed(pix_fmt="yuv420p10le"), "is encoded as h264 with 10 bits a color"),
        (filmed(kind="matroska", every=3), "has 12 frames, and .* by its header"),
        (filmed(), "has 4 frames of 64 × 64 pixels that the model takes, in all 16,384 pixels; expected at most 9,999"),
    ],
)
def test_videos_that_servers_decode_otherwise_are_refused(monkeypatch, content, message):
    if "9,999" in message:
        monkeypatch.setattr(videos, "MAX_TAKEN_PIXELS", 9999)
    assert re.search(message, refusal(part("video", address("video/mp4", content))))
