"""Hugging Face hub (`hf://`): lists the files of a repository's commit with sizes, digests and download addresses.

Respects HF_ENDPOINT (a mirror) and HF_TOKEN, not a token that `hf auth login` left on disk. Our own reader bounds and
types the hub's answers; huggingface_hub knows what a refusal means.
"""

import difflib
import os
import re
from typing import TypeVar
from urllib.parse import quote

import httpx
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import hf_raise_for_status
from pydantic import Field

from stages.core.errors import DownloadError, LifecycleError
from stages.core.redaction import quoted, shortened
from stages.hubs.hub import Request, Source
from stages.hubs.listing import Digest, FileSize, Sha1, Sha256
from stages.hubs.repository import RemoteFile, RepositoryHub, Snapshot, ask_hub
from stages.remote.http import Answer, AnswerModel
from stages.remote.hub_file import TOKEN_VARIABLE, authorization, endpoint, token_in
from stages.remote.pointers import Pointer

_COMMIT = re.compile(r"[0-9a-f]{40}")
NUM_NAMED = 10

Shape = TypeVar("Shape")


class _Lfs(AnswerModel):
    """Sha256 of a large file (kept with Git LFS), as the Hugging Face API lists it."""

    sha256: Sha256


class _File(AnswerModel):
    """File as the Hugging Face API lists it. blobId: git's id of a small file's content."""

    rfilename: str
    size: FileSize | None = None
    blobId: Sha1 | None = None  # noqa: N815 - the hub's name
    lfs: _Lfs | None = None


class _Commit(AnswerModel):
    """Commit id, in the Hugging Face API's answer for a branch, tag or commit."""

    sha: Sha1


class _Listing(_Commit):
    """Commit of a repository with the list of its files, as the Hugging Face API returns it."""

    siblings: list[_File]


class _Reference(AnswerModel):
    """Branch or tag of a repository, as the Hugging Face API lists it."""

    name: str


class _References(AnswerModel):
    """Branches and tags of a repository, as the Hugging Face API lists them."""

    branches: list[_Reference] = Field(default_factory=list)
    tags: list[_Reference] = Field(default_factory=list)


class HuggingFace(RepositoryHub):
    """Hugging Face hub; a revision is the commit that the named branch or tag, or the default branch, points to."""

    def resolve_revision(self, request: Request) -> str:
        source = request.source
        if source.revision and _COMMIT.fullmatch(source.revision):
            return source.revision
        where = f"/revision/{quote(source.revision, safe='')}" if source.revision else ""
        return _asked(source, where, _Commit, request.limit_s).sha

    def list_snapshot(self, source: Source, revision: str) -> Snapshot:
        listing = _asked(source, f"/revision/{quote(revision, safe='')}?blobs=true", _Listing)
        if listing.sha != revision:
            raise DownloadError(
                f"asking {endpoint()} for {source}: the hub lists the files of commit {listing.sha}, where those of "
                f"{quoted(revision, 40)} were asked for; a mirror or a proxy is wrong"
            )
        files = tuple(_remote_file(source, revision, file) for file in listing.siblings)
        return Snapshot(str(source), revision, files, TOKEN_VARIABLE, authorization())

    def pointers(self, request: Request, revision: str) -> dict[str, Pointer]:
        address = f"hf://datasets/{request.source.name}@{revision}"
        return {
            file.name: Pointer(address=f"{address}/{file.name}", size_bytes=file.size_bytes, tag=file.digest.hex)
            for file in self.requested(request, revision).files
        }


HUB = HuggingFace()


def _remote_file(source: Source, revision: str, file: _File) -> RemoteFile:
    """Return a listed file with its download address and the digest to expect (a git blob id for small files)."""
    if file.lfs:
        digest = Digest("sha256", file.lfs.sha256)
    elif file.blobId:
        digest = Digest("git-blob-sha1", file.blobId)
    if file.size is None or not (file.lfs or file.blobId):
        raise DownloadError(
            f"{source}: the hub lists {quoted(file.rfilename, 200)} without size or digest; use another mirror"
        )
    url = hf_hub_url(source.name, file.rfilename, repo_type=source.product, revision=revision, endpoint=endpoint())
    return RemoteFile(file.rfilename, file.size, digest, url)


def _asked(source: Source, where: str, shape: type[Shape], limit_s: float | None = None) -> Shape:
    """Return the API's information about a repository. where: rest of the URL's path, with the query."""
    doing = f"asking {endpoint()} for {source}"
    if constants.HF_HUB_OFFLINE:
        raise DownloadError(f"{source} must be asked for at the hub, but HF_HUB_OFFLINE is set; unset it")
    url = f"{endpoint()}/api/{source.product}s/{source.name}{where}"
    answer = ask_hub(doing, url, authorization(), "HF_ENDPOINT", limit_s)
    if not answer.is_success:
        raise _explained(source, answer, url, doing)
    try:
        return answer.parsed(shape)
    except DownloadError as error:
        raise DownloadError(f"{endpoint()} does not answer like a hub: {error}") from None


def _explained(source: Source, answer: Answer, url: str, doing: str) -> LifecycleError:
    """Return the error, with advice, for a refusal by the API, which without a token is 401 for the missing, too."""
    address = f"{endpoint()}/{'datasets/' if source.product == 'dataset' else ''}{source.name}"
    headers = {name: answer.headers[name] for name in ("x-error-code", "x-error-message") if name in answer.headers}
    # huggingface_hub knows a refusal by these headers; nothing else of the answer reaches it.
    response = httpx.Response(answer.status, headers=headers, request=httpx.Request("GET", url))
    try:
        hf_raise_for_status(response)
    except GatedRepoError:
        return DownloadError(f"{source} is gated: accept its terms at {address}, then set {TOKEN_VARIABLE}")
    except RevisionNotFoundError:
        return DownloadError(f"{source}: the repository has no revision {source.revision!r}{_closest_revision(source)}")
    except RepositoryNotFoundError:
        hint = "your token may not read it" if os.environ.get(TOKEN_VARIABLE) else f"private ones need {TOKEN_VARIABLE}"
        return DownloadError(f"{source}: {endpoint()} has no such {source.product}; check the name ({hint})")
    except HfHubHTTPError:
        if answer.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            advice = f"set {TOKEN_VARIABLE} to a token that may read it"
            return DownloadError(f"{source}: the hub answered {answer.status}; {advice}")
    reason = answer.expected.quoted(answer.body) if answer.body else "no reason given"
    return DownloadError(f"{doing}: the hub answered {answer.status}: {reason}; check the name and HF_ENDPOINT")


def _closest_revision(source: Source) -> str:
    try:
        references = _asked(source, "/refs", _References)
    except LifecycleError:  # only a hint: what is missing is known without it
        return ""
    names = [reference.name for reference in [*references.branches, *references.tags]]
    closest = difflib.get_close_matches(source.revision or "", names, n=1)
    if closest:
        return f"; did you mean {quoted(closest[0], 200)}?"
    return f"; it has: {shortened(', '.join(names[:NUM_NAMED]), 500)}"


def hub_api() -> HfApi:
    """Return huggingface_hub's client, with the token of the environment if there is one."""
    # False: the library does not look for a token on disk.
    return HfApi(endpoint=endpoint(), token=token_in(TOKEN_VARIABLE) or False)
