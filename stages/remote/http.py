"""Checks of a server's answer to a request for a file, or for the rest of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus

import httpx

from stages.core.errors import DownloadError
from stages.core.redaction import quoted, shortened
from stages.remote.http_answers import number_in
from stages.remote.retry import busy_from_status

QUOTED_CHARACTERS = 100
_PART = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


def check_status(status: int, headers: Mapping[str, str], doing: str, token_variable: str) -> None:
    """Raise BusyError for what is worth another attempt, DownloadError for a refusal."""
    if 200 <= status < 300:
        return
    if busy := busy_from_status(status, headers):
        raise busy
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        advice = f"set {token_variable} to a token that may read it"
    else:
        advice = "check that the repository still has this revision"
    raise DownloadError(f"{doing}: the server answered {status}; {advice}")


def check_part(response: httpx.Response, start: int, size_bytes: int, doing: str) -> None:
    """Check, before anything is read, that an answer is a file of `size_bytes` from byte `start` on.

    A whole file may come without a length; whoever reads it counts. Raises DownloadError.
    """
    if response.status_code == HTTPStatus.PARTIAL_CONTENT:
        content_range = response.headers.get("content-range", "")
        part = _PART.fullmatch(content_range)
        is_right = part is not None and (int(part[1]), int(part[3])) == (start, size_bytes)
        sent = f"a part with the Content-Range {quoted(content_range, QUOTED_CHARACTERS)}"
    else:
        length = response.headers.get("content-length")
        is_right = start == 0 and (length is None or number_in(length) == size_bytes)
        sent = f"{shortened(length or 'all', QUOTED_CHARACTERS)} bytes from the beginning"
    if not is_right:
        raise DownloadError(
            f"{doing}: the hub listed {size_bytes} bytes, of which those from byte {start} on were asked for, but the "
            f"server sends {sent}; the hub, a mirror or a proxy is wrong"
        )
