"""The ModelScope hub (`modelscope://`): a repository's files with sizes, digests and addresses.

Respects MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN. The hub does not reliably give the commit of a branch, but the
sha256 of every file: a hash over those is what a revision is pinned to.
"""

from __future__ import annotations

import os
import re

from modelscope_hub import FileInfo, HubApi, HubConfig
from modelscope_hub.errors import (
    APIError,
    AuthenticationError,
    HubError,
    NetworkError,
    NotExistError,
    PermissionDeniedError,
    RateLimitError,
    ServerError,
)

from stages.core.errors import DownloadError, LifecycleError, TransientError
from stages.hubs.fetch import RemoteFile, Snapshot
from stages.hubs.hub import Request
from stages.hubs.repository import RepositoryHub
from stages.hubs.source import Source
from stages.hubs.verification import Digest, content_hash

TOKEN_VARIABLE = "MODELSCOPE_API_TOKEN"  # noqa: S105 - the name of a variable
DEFAULT_REVISION = "master"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelScope(RepositoryHub):
    """A revision is a hash over the contents that the source's branch or tag holds."""

    def resolve_revision(self, request: Request) -> str:
        return _list_now(request.source).revision

    def list_snapshot(self, source: Source, revision: str) -> Snapshot:
        snapshot = _list_now(source)
        if snapshot.revision != revision:
            raise DownloadError(f"{source} changed after this refresh was planned; run it again")
        return snapshot


HUB = ModelScope()


def _list_now(source: Source) -> Snapshot:
    """The files of the source's branch or tag as it is now."""
    # An empty token keeps the library from looking for one that a login left on disk.
    token = os.environ.get(TOKEN_VARIABLE, "")
    api = HubApi(HubConfig(token=token))
    branch = source.revision or DEFAULT_REVISION
    try:
        listed = api.list_repo_files(source.name, source.product, revision=branch)
    except HubError as error:
        raise _explained(source, branch, error) from error
    except ValueError as error:
        raise DownloadError(f"{source}: {api.legacy.endpoint} does not answer like a hub ({error})") from error
    files = tuple(_remote_file(source, api, branch, file) for file in listed if file.type != "tree")
    if not files:
        raise DownloadError(f"{source}: ModelScope lists no files at revision {branch!r}")
    content = content_hash((file.name, file.digest.hex) for file in files)
    headers = {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}
    return Snapshot(str(source), content, files, TOKEN_VARIABLE, headers)


def _remote_file(source: Source, api: HubApi, branch: str, file: FileInfo) -> RemoteFile:
    if not file.sha256 or not _SHA256.fullmatch(file.sha256):
        raise DownloadError(f"{source}: the hub lists {file.path} without a sha256, so it cannot be verified")
    url = api.legacy.get_download_url(source.name, source.product, file.path, revision=branch)
    return RemoteFile(file.path, file.size, Digest("sha256", file.sha256), url)


def _explained(source: Source, branch: str, error: HubError) -> LifecycleError:
    status = f" {error.status_code}" if isinstance(error, APIError) and error.status_code else ""
    answer = f"ModelScope answered{status}: {error.message}"
    if isinstance(error, NotExistError):
        return DownloadError(f"{source}: ModelScope has no such {source.product}, or no revision {branch!r} of it")
    if isinstance(error, AuthenticationError | PermissionDeniedError):
        return DownloadError(f"{source} may not be read; set {TOKEN_VARIABLE} to a token that may ({answer})")
    if isinstance(error, NetworkError | ServerError | RateLimitError):
        return TransientError(f"asking for {source}: {answer}; check the network, or try again later")
    return DownloadError(f"{source}: {answer}")
