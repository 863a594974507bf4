"""Requests with videos are checked before the engine sees them, and bounded."""

import json
import re
from base64 import b64encode

import pytest

from stages.serving.pictures import Limits, RefusedRequestError, checked
from tests.unit.stages.data.media.conftest import repeated_frame, video
from tests.unit.stages.serving.test_proxy import PNG, at, chat


def film(address: str) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": address}}


def test_videos_reach_the_engine_only_inside_of_requests_and_bounded():
    def asked(*parts: dict[str, object]) -> bytes:
        return checked(json.dumps(chat(*parts)).encode(), Limits(1, 1))

    content = video()
    mp4, lists = (f"data:video/{kind};base64,{b64encode(content).decode()}" for kind in ("mp4", "jpeg"))
    assert json.loads(asked(at(PNG), film(mp4))) == json.loads(asked(at(PNG), film(lists))) == chat(at(PNG), film(mp4))
    refused = {
        "http://127.0.0.1/a.mp4": "video 1 is at 'http://127.0.0.1/a.mp4'; nothing is fetched here",
        "file:///etc/hostname": "nothing is fetched here",
        PNG: "nothing is fetched here",
        "data:video/jpeg;base64,AA,AA": "video 1 is not base64",
        "data:video/mp4;base64,AAAA": "video 1 is no video that can be decoded",
        f"data:video/mp4;base64,{b64encode(repeated_frame((4096, 4096), 1)).decode()}": "expected at most 8,388,608",
    }
    for address, message in refused.items():
        with pytest.raises(RefusedRequestError, match=re.escape(message)):
            asked(film(address))
    with pytest.raises(RefusedRequestError, match="more than 1 videos, the server's `max_images`"):
        asked(film(mp4), film(mp4))
    for limits in (Limits(1), Limits()):
        with pytest.raises(RefusedRequestError, match="a part of type 'video_url'"):
            checked(json.dumps(chat(film(mp4))).encode(), limits)
