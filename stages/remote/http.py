"""What a server's answer to a request for a file means."""

from __future__ import annotations

import httpx

from stages.core.errors import DownloadError
from stages.remote.http_answers import number_in
from stages.remote.retry import busy_from_status


def check_status(response: httpx.Response, doing: str, token_variable: str) -> None:
    """Raise BusyError for what is worth another attempt, DownloadError for a refusal."""
    if response.is_success:
        return
    status = response.status_code
    if busy := busy_from_status(status, response.headers):
        raise busy
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        advice = f"set {token_variable} to a token that may read it"
    else:
        advice = "check that the repository still has this revision"
    raise DownloadError(f"{doing}: the server answered {status}; {advice}")


def promised_bytes(response: httpx.Response) -> int | None:
    """The size of the whole file, of which the answer may be a part; None where the server does not say it."""
    content_range = response.headers.get("content-range", "")
    promised = content_range.rpartition("/")[2] or response.headers.get("content-length", "")
    return number_in(promised)
