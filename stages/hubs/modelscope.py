"""ModelScope hub (`modelscope://`): lists the files of a repository with sizes, digests and download addresses.

Respects MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN. A revision is a hash over the files' sha256, as the hub does not
reliably give a branch's commit.
"""

import re
from http import HTTPStatus
from urllib.parse import urlencode

from modelscope_hub import HubApi, HubConfig
from modelscope_hub.constants import REPO_FILES_TRUNCATION_LIMIT
from pydantic import Field

from stages.core.errors import DownloadError, TransientError
from stages.core.redaction import quoted
from stages.hubs.hub import Request, Source
from stages.hubs.listing import Digest, FileSize, content_hash
from stages.hubs.repository import LISTING_BYTES, RemoteFile, RepositoryHub, Snapshot, ask_hub
from stages.remote.http import AnswerModel
from stages.remote.hub_file import token_in

TOKEN_VARIABLE = "MODELSCOPE_API_TOKEN"  # noqa: S105 - the name of a variable
DEFAULT_REVISION = "master"
FOLDER = "tree"
PAGE_FILES = 200
"""Number of files on a page of the list that the ModelScope API returns for a dataset."""
MAX_REQUESTS = 5000
"""Largest number of requests for one list of files, since a faulty hub could return pages without end."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Entry(AnswerModel):
    """File or folder in the ModelScope API's list of a repository's files."""

    path: str = Field(alias="Path")
    kind: str = Field("blob", alias="Type")
    size: FileSize | None = Field(None, alias="Size")
    sha256: str | None = Field(None, alias="Sha256")


class _Files(AnswerModel):
    """List of files in an answer of the ModelScope API; None if it is empty."""

    files: list[_Entry] | None = Field(alias="Files")


class _Listing(AnswerModel):
    """Answer of the ModelScope API that holds a list of files."""

    data: _Files = Field(alias="Data")


class ModelScope(RepositoryHub):
    """ModelScope hub; a revision is a hash of the contents of all files of the named branch or tag."""

    def resolve_revision(self, request: Request) -> str:
        return _list_now(request.source, request.limit_s).revision

    def list_snapshot(self, source: Source, revision: str) -> Snapshot:
        snapshot = _list_now(source)
        if snapshot.revision != revision:
            raise DownloadError(f"{source} changed after this refresh was planned; run it again")
        return snapshot


HUB = ModelScope()


def _list_now(source: Source, limit_s: float | None = None) -> Snapshot:
    """Return the files that a branch or tag of a ModelScope repository has now."""
    token = token_in(TOKEN_VARIABLE)
    headers = {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}
    # An empty token keeps the library from looking for one that a login left on disk.
    api = HubApi(HubConfig(token=token))
    branch = source.revision or DEFAULT_REVISION
    listed = _Lister(source, api.legacy.endpoint, branch, headers, limit_s).files()
    files = tuple(_remote_file(source, api, branch, entry) for entry in listed if entry.kind != FOLDER)
    if not files:
        raise DownloadError(f"{source}: ModelScope lists no files at revision {branch!r}")
    content = content_hash((file.name, file.digest.hex) for file in files)
    return Snapshot(str(source), content, files, TOKEN_VARIABLE, headers)


class _Lister:
    """Reader of the complete list of a repository's files, which may take several requests to the ModelScope API."""

    def __init__(
        self, source: Source, endpoint: str, branch: str, headers: dict[str, str], limit_s: float | None
    ) -> None:
        self._source = source
        self._endpoint = endpoint
        self._branch = branch
        self._headers = headers
        self._limit_s = limit_s
        self._num_requests = 0
        self._left_bytes = LISTING_BYTES

    def files(self) -> list[_Entry]:
        return self._paged() if self._source.product == "dataset" else self._below("")

    def _paged(self) -> list[_Entry]:
        entries: list[_Entry] = []
        while True:
            number = len(entries) // PAGE_FILES + 1
            page = self._asked("tree", Recursive="True", PageNumber=str(number), PageSize=str(PAGE_FILES))
            entries += page
            # The last page: shorter than a whole one, and maybe empty.
            if len(page) < PAGE_FILES:
                return entries

    def _below(self, folder: str) -> list[_Entry]:
        """Return a model's files below a folder; if the API truncates the list, ask for each subfolder."""
        root = {"Root": folder} if folder else {}
        entries = self._asked("files", Recursive="True", **root)
        if len(entries) < REPO_FILES_TRUNCATION_LIMIT:
            return entries
        entries = self._asked("files", Recursive="False", **root)
        if len(entries) >= REPO_FILES_TRUNCATION_LIMIT:
            raise DownloadError(
                f"{self._source}: ModelScope lists no more than {REPO_FILES_TRUNCATION_LIMIT} files of the folder "
                f"{quoted(folder or '/', 200)}, which has more; what is missing cannot be known"
            )
        inner = [entry.path for entry in entries if entry.kind == FOLDER]
        return [*entries, *(entry for path in inner for entry in self._below(path))]

    def _asked(self, listing: str, **query: str) -> list[_Entry]:
        self._num_requests += 1
        if self._num_requests > MAX_REQUESTS:
            raise DownloadError(f"{self._source}: ModelScope's list of files did not end after {MAX_REQUESTS} requests")
        url = (
            f"{self._endpoint}/api/v1/{self._source.product}s/{self._source.name}/repo/{listing}?"
            f"{urlencode({'Revision': self._branch, **query})}"
        )
        doing = f"asking {self._endpoint} for {self._source}"
        answer = ask_hub(doing, url, self._headers, "MODELSCOPE_ENDPOINT", self._limit_s, self._left_bytes)
        # One limit for the whole list, however many requests it takes.
        self._left_bytes -= len(answer.body)
        if answer.status == HTTPStatus.NOT_FOUND:
            raise DownloadError(
                f"{self._source}: ModelScope has no such {self._source.product}, or no revision {self._branch!r} of it"
            )
        reason = answer.expected.quoted(answer.body)
        if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise DownloadError(
                f"{self._source} may not be read; set {TOKEN_VARIABLE} to a token that may (ModelScope answered "
                f"{answer.status}: {reason})"
            )
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise TransientError(f"{doing}: ModelScope answered {answer.status}: {reason}; try again later")
        if not answer.is_success:
            raise DownloadError(f"{doing}: ModelScope answered {answer.status}: {reason}; check the name")
        try:
            return answer.parsed(_Listing).data.files or []
        except DownloadError as error:
            raise DownloadError(f"{self._endpoint} does not answer like a hub: {error}") from None


def _remote_file(source: Source, api: HubApi, branch: str, entry: _Entry) -> RemoteFile:
    if entry.size is None or not entry.sha256 or not _SHA256.fullmatch(entry.sha256):
        raise DownloadError(
            f"{source}: the hub lists {quoted(entry.path, 200)} without a sha256 or a size, so it cannot be verified"
        )
    url = api.legacy.get_download_url(source.name, source.product, entry.path, revision=branch)
    return RemoteFile(entry.path, entry.size, Digest("sha256", entry.sha256), url)
