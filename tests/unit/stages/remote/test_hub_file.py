"""Streamed files of a hub are used only if a digest or the answer's headers confirm their bytes."""

import hashlib
import io
from collections.abc import Callable, Iterator

import pytest

from stages.core.errors import DownloadError
from stages.remote import http
from stages.remote.hub_file import opened
from stages.remote.pointers import Pointer
from tests.hub_repository import LARGE_FILE_BYTES, blob_id
from tests.hub_server import Fault, HubServer, running_hub

LARGE = b"".join(b'{"text": "row %06d"}\n' % number for number in range(5000))
SMALL = LARGE[: LARGE_FILE_BYTES // 2]
DOWNLOAD = "download the dataset without `stream: true`"
WITHOUT_DIGEST = {"X-Linked-ETag": None}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
        yield server


def pointer(hub: HubServer, content: bytes) -> Pointer:
    commit = hub.repository("datasets/org/rows").commit({"a.jsonl": content})
    tag = hashlib.sha256(content).hexdigest() if len(content) >= LARGE_FILE_BYTES else blob_id(content)
    return Pointer(address=f"hf://datasets/org/rows@{commit}/a.jsonl", size_bytes=len(content), tag=tag)


def whole(file: io.RawIOBase) -> bytes:
    return bytes(file.readall())


def middle(file: io.RawIOBase) -> bytes:
    file.seek(2000)
    return bytes(file.read(1000) or b"")


def beginning(file: io.RawIOBase) -> bytes:
    return bytes(file.read(1000) or b"")


def twice(file: io.RawIOBase) -> bytes:
    whole(file)
    file.seek(0)
    return whole(file)


@pytest.mark.parametrize("read", [whole, middle, beginning, twice])
@pytest.mark.parametrize("content", [LARGE, SMALL], ids=["large", "small"])
def test_what_the_hub_vouches_for_is_read_anywhere(content: bytes, read: Callable, hub: HubServer) -> None:
    with opened(pointer(hub, content)) as file:
        assert read(file) == {middle: content[2000:3000], beginning: content[:1000]}.get(read, content)


@pytest.mark.parametrize("content", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("read", [whole, twice])
def test_a_whole_file_is_compared_with_its_digest(read: Callable, content: bytes, hub: HubServer) -> None:
    """A streamed file read whole is compared with its digest; mirrors may send no digest, or other bytes."""
    about = pointer(hub, content)
    hub.faults.append(Fault("/resolve/", headers={**WITHOUT_DIGEST, "ETag": None}, times=2))
    with opened(about) as file:
        assert read(file) == content
    hub.faults[:] = [Fault("/cdn/|/resolve/.*", send_instead=content.replace(b"row", b"raw"), times=9)]
    with pytest.raises(DownloadError, match=f"does not hash to {about.tag}"), opened(about) as file:
        read(file)


def test_the_second_reading_is_compared_too(hub: HubServer) -> None:
    about = pointer(hub, LARGE)
    with pytest.raises(DownloadError, match="does not hash"), opened(about) as file:
        assert whole(file) == LARGE
        hub.faults.append(Fault("/cdn/", send_instead=LARGE[::-1]))
        file.seek(0)
        whole(file)


@pytest.mark.parametrize(("content", "read"), [(LARGE, middle), (LARGE, beginning), (SMALL, middle)])
def test_a_part_without_a_digest_is_refused(content: bytes, read: Callable, hub: HubServer) -> None:
    hub.faults.append(Fault("/resolve/", headers={**WITHOUT_DIGEST, "ETag": None}))
    with pytest.raises(DownloadError, match=DOWNLOAD), opened(pointer(hub, content)) as file:
        read(file)


def test_rows_that_are_left_before_the_end_are_refused_too(hub: HubServer) -> None:
    def rows() -> Iterator[bytes]:
        with opened(pointer(hub, LARGE)) as file:
            yield from io.BufferedReader(file, 4000)

    hub.faults.append(Fault("/resolve/", headers=WITHOUT_DIGEST))
    read = rows()
    next(read)
    with pytest.raises(DownloadError, match=DOWNLOAD):
        read.close()


@pytest.mark.parametrize(
    "content_range",
    [None, "", "bytes 0-9/10", "bytes 2001-{end}/{size}", "bytes 2000-{end}/*", "bytes 2000-{end}/2{size}", "x" * 999],
)
def test_a_part_from_another_place_is_refused(content_range: str | None, hub: HubServer) -> None:
    about = pointer(hub, LARGE)
    sent = content_range and content_range.format(end=about.size_bytes - 1, size=about.size_bytes)
    hub.faults += [Fault("/resolve/"), Fault("/cdn/", headers={"Content-Range": sent})]
    with pytest.raises(DownloadError, match="of which those from byte 2000 on were asked for"), opened(about) as file:
        middle(file)


def test_the_rest_after_a_break_comes_from_where_it_broke_off(hub: HubServer) -> None:
    about = pointer(hub, LARGE)
    hub.faults += [Fault("/cdn/", break_after_bytes=30_000), Fault("/resolve/", headers=WITHOUT_DIGEST)]
    with opened(about) as file:
        assert whole(file) == LARGE
    end, size = about.size_bytes - 1, about.size_bytes
    hub.faults[:] = [Fault("/cdn/", break_after_bytes=30_000, how="close"), Fault("/resolve/", times=1)]
    hub.faults.append(Fault("/cdn/", headers={"Content-Range": f"bytes 7-{end}/{size}"}))
    with pytest.raises(DownloadError, match="the server sends a part"), opened(about) as file:
        whole(file)


@pytest.mark.parametrize("how", ["short", "with a length"])
@pytest.mark.parametrize("read", [whole, middle])
def test_an_answer_longer_than_its_file_is_refused(read: Callable, how: str, hub: HubServer) -> None:
    """A hub's response that is longer than the requested file is refused, with a Content-Length header and without."""
    about = pointer(hub, LARGE)
    longer = Fault("/cdn/", send_instead=LARGE + b'{"text": "more"}\n')
    if read is middle:
        longer.headers = {"Content-Range": f"bytes 2000-{about.size_bytes - 1}/{about.size_bytes}"}
    if how == "short":
        longer.break_after_bytes, longer.how = 10**9, how
    hub.faults += [Fault("/resolve/"), longer]
    with pytest.raises(DownloadError, match="the server sends"), opened(about) as file:
        read(file)
        whole(file)


@pytest.mark.parametrize("tag", ['"{other}"', 'W/"{other}"', "", "²", "x" * 999])
def test_another_digest_is_refused(tag: str, hub: HubServer) -> None:
    about = pointer(hub, LARGE)
    hub.faults.append(Fault("/resolve/", headers={"X-Linked-ETag": tag.format(other="b" * 64)}))
    refused = pytest.raises(DownloadError, match=r"the hub listed the digest .* a mirror or a proxy is wrong")
    with refused as caught, opened(about) as file:
        middle(file)
    assert len(str(caught.value)) < 700


def test_an_address_that_is_none_is_refused() -> None:
    about = Pointer(address="hf://datasets/org/rows", size_bytes=1, tag="a")
    with pytest.raises(DownloadError, match="Download the dataset again"), opened(about):
        pass
