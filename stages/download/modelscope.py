"""The ModelScope hub: a repository's files with sizes, digests and addresses.

Respects MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN. The hub does not reliably tell the commit of a branch, but the
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
from stages.download.fetch import RemoteFile, Snapshot
from stages.download.source import HubSource
from stages.download.verification import Digest, content_hash

TOKEN_VARIABLE = "MODELSCOPE_API_TOKEN"  # noqa: S105 - the name of a variable
DEFAULT_REVISION = "master"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def resolve_content(source: HubSource) -> str:
    """The hash of what the source's revision holds now.

    Raises DownloadError when there is no such thing or it may not be read, TransientError when the hub does not answer.
    """
    return list_snapshot(source).revision


def list_snapshot(source: HubSource) -> Snapshot:
    """The files of the source's revision as it is now. Raises like `resolve_content`."""
    # An empty token keeps the library from looking for one that a login left on disk.
    token = os.environ.get(TOKEN_VARIABLE, "")
    api = HubApi(HubConfig(token=token))
    branch = source.revision or DEFAULT_REVISION
    try:
        listed = api.list_repo_files(source.repository, source.product, revision=branch)
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


def _remote_file(source: HubSource, api: HubApi, branch: str, file: FileInfo) -> RemoteFile:
    if not file.sha256 or not _SHA256.fullmatch(file.sha256):
        raise DownloadError(f"{source}: the hub lists {file.path} without a sha256, so it cannot be verified")
    url = api.legacy.get_download_url(source.repository, source.product, file.path, revision=branch)
    return RemoteFile(file.path, file.size, Digest("sha256", file.sha256), url)


def _explained(source: HubSource, branch: str, error: HubError) -> LifecycleError:
    status = f" {error.status_code}" if isinstance(error, APIError) and error.status_code else ""
    answer = f"ModelScope answered{status}: {error.message}"
    if isinstance(error, NotExistError):
        return DownloadError(f"{source}: ModelScope has no such {source.product}, or no revision {branch!r} of it")
    if isinstance(error, AuthenticationError | PermissionDeniedError):
        return DownloadError(f"{source} may not be read; set {TOKEN_VARIABLE} to a token that may ({answer})")
    if isinstance(error, NetworkError | ServerError | RateLimitError):
        return TransientError(f"asking for {source}: {answer}; check the network, or try again later")
    return DownloadError(f"{source}: {answer}")
