"""The Hugging Face hub (`hf://`): a repository's commit, and its files with sizes, digests and addresses.

Respects HF_ENDPOINT (a mirror) and HF_TOKEN; a token that `hf auth login` left on disk is not used.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from stages.core.errors import DownloadError, LifecycleError
from stages.hubs.fetch import RemoteFile, Snapshot
from stages.hubs.hub import Request
from stages.hubs.repository import RepositoryHub
from stages.hubs.source import Source
from stages.hubs.verification import Digest
from stages.remote.hub_file import TOKEN_VARIABLE, authorization, endpoint
from stages.remote.pointers import Pointer
from stages.remote.retry import NUM_ATTEMPTS, RetryBackoff, busy_from_status, busy_from_transport

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 30.0

Answer = TypeVar("Answer")


class HuggingFace(RepositoryHub):
    """A revision is the commit that the source's revision, or the default branch, points to."""

    def resolve_revision(self, request: Request) -> str:
        source = request.source
        if source.revision and _COMMIT.fullmatch(source.revision):
            return source.revision
        return str(_repository_info(source, source.revision, files_metadata=False, limit_s=request.limit_s).sha)

    def list_snapshot(self, source: Source, revision: str) -> Snapshot:
        info = _repository_info(source, revision, files_metadata=True)
        files = tuple(_remote_file(source, revision, sibling) for sibling in info.siblings or ())
        return Snapshot(str(source), revision, files, TOKEN_VARIABLE, authorization())

    def pointers(self, request: Request, revision: str) -> dict[str, Pointer]:
        address = f"hf://datasets/{request.source.name}@{revision}"
        return {
            file.name: Pointer(address=f"{address}/{file.name}", size_bytes=file.size_bytes, tag=file.digest.hex)
            for file in self.requested(request, revision).files
        }


HUB = HuggingFace()


def _remote_file(source: Source, revision: str, sibling: Any) -> RemoteFile:
    """Large files carry a sha256, small ones the id of their git blob."""
    if sibling.size is None or not (sibling.lfs or sibling.blob_id):
        raise DownloadError(f"{source}: the hub lists {sibling.rfilename} without size or digest; use another mirror")
    digest = Digest("sha256", sibling.lfs.sha256) if sibling.lfs else Digest("git-blob-sha1", sibling.blob_id)
    url = hf_hub_url(source.name, sibling.rfilename, repo_type=source.product, revision=revision, endpoint=endpoint())
    return RemoteFile(sibling.rfilename, sibling.size, digest, url)


def _repository_info(
    source: Source, revision: str | None, *, files_metadata: bool, limit_s: float | None = None
) -> Any:
    api = hub_api()

    def ask() -> Any:
        return api.repo_info(
            source.name,
            revision=revision,
            repo_type=source.product,
            files_metadata=files_metadata,
            timeout=limit_s or _TIMEOUT_S,
        )

    return _ask(source, ask, NUM_ATTEMPTS if limit_s is None else 1)


def _ask(source: Source, ask: Callable[[], Answer], num_attempts: int) -> Answer:
    """Ask the hub until it answers, or there is no use in it."""
    backoff = RetryBackoff(f"asking {endpoint()} for {source}", num_attempts=num_attempts)
    while True:
        try:
            return ask()
        except HfHubHTTPError as error:
            busy = busy_from_status(error.response.status_code, error.response.headers)
            if busy is None:
                raise _explained(
                    source, error
                ) from None  # its text has the address that it was led to, password and all
            backoff.wait(busy)
        except OfflineModeIsEnabled as error:
            raise DownloadError(
                f"{source} must be asked for at the hub, but HF_HUB_OFFLINE is set; unset it"
            ) from error
        except (httpx.UnsupportedProtocol, httpx.TooManyRedirects) as error:
            raise DownloadError(f"asking {endpoint()} for {source}: {error}; check HF_ENDPOINT") from error
        except httpx.TransportError as error:
            backoff.wait(busy_from_transport(error))
        except ValueError as error:
            raise DownloadError(f"asking {endpoint()} for {source}: it does not answer like a hub ({error})") from error


def _explained(source: Source, error: HfHubHTTPError) -> LifecycleError:
    """What to do about a refusal. The hub answers 401 for what does not exist, too, without a token."""
    address = f"{endpoint()}/{'datasets/' if source.product == 'dataset' else ''}{source.name}"
    if isinstance(error, GatedRepoError):
        return DownloadError(f"{source} is gated: accept its terms at {address}, then set {TOKEN_VARIABLE}")
    if isinstance(error, RevisionNotFoundError):
        return DownloadError(f"{source}: the repository has no revision {source.revision!r}{_closest_revision(source)}")
    if isinstance(error, RepositoryNotFoundError):
        hint = "your token may not read it" if os.environ.get(TOKEN_VARIABLE) else f"private ones need {TOKEN_VARIABLE}"
        return DownloadError(f"{source}: {endpoint()} has no such {source.product}; check the name ({hint})")
    status = error.response.status_code
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return DownloadError(f"{source}: the hub answered {status}; set {TOKEN_VARIABLE} to a token that may read it")
    return DownloadError(f"{source}: the hub answered {status}: {error.server_message or 'no reason given'}")


def _closest_revision(source: Source) -> str:
    try:
        refs = hub_api().list_repo_refs(source.name, repo_type=source.product)
    except (HfHubHTTPError, httpx.HTTPError):  # Only a hint: what is missing is known without it.
        return ""
    names = [ref.name for ref in [*refs.branches, *refs.tags]]
    closest = difflib.get_close_matches(source.revision or "", names, n=1)
    return f"; did you mean {closest[0]!r}?" if closest else f"; it has: {', '.join(names[:10])}"


def hub_api() -> HfApi:
    """The hub's own client, with the token of the environment or none."""
    return HfApi(endpoint=endpoint(), token=os.environ.get(TOKEN_VARIABLE) or False)
