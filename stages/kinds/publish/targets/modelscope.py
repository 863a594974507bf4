"""Publishing target on the ModelScope hub (`modelscope://owner/name`): a model repository, one commit per publication.

Respects MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN. Large files go to the hub's storage first, where the next attempt
finds them by their sha256; the commit that names them comes last, so that no reader sees half a model. Written from the
source of the package `modelscope_hub`, which speaks to the hub; never run against the hub itself.
"""

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import requests
from modelscope_hub import HubApi, HubConfig, RepoInfo
from modelscope_hub.constants import (
    MODEL_LFS_SUFFIX,
    UPLOAD_INLINE_METADATA_PATHS,
    UPLOAD_LFS_FORCE_THRESHOLD_BYTES,
    Visibility,
)
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

from stages.core.errors import LifecycleError, PublishError, TransientError
from stages.hubs.hub import Product, repository
from stages.hubs.listing import Digest, content_hash
from stages.hubs.modelscope import DEFAULT_REVISION, HUB, TOKEN_VARIABLE
from stages.kinds.publish.targets.target import Address, LocalFile, LocalFiles, Names, Sent, TargetContents

KIND: Product = "model"
NOTHING = {"type": "normal", "size": 0, "sha256": "", "content": "", "encoding": ""}
"""Empty values for a file's fields in a ModelScope commit, which requires all of them."""


class ModelScopeRepository:
    """Model repository `owner/name` on ModelScope, created if it does not exist. private: required visibility."""

    def __init__(self, name: str, *, private: bool) -> None:
        self._name = name
        self._private = private
        self._source = repository("modelscope", KIND, name)
        # An empty token keeps the library from looking for one that a login left on disk.
        self._api = HubApi(HubConfig(token=os.environ.get(TOKEN_VARIABLE, "")))
        self._hub = self._api.legacy
        self._revision = ""

    def check(self) -> None:
        if not os.environ.get(TOKEN_VARIABLE):
            raise PublishError(
                f"publishing to {self._source} needs {TOKEN_VARIABLE}, a token that may write there; set it"
            )
        found = self._found()
        if self._private and found and found.visibility != Visibility.PRIVATE:
            raise PublishError(
                f"publishing to {self._source}: others can read that repository, but the recipe does not say "
                "`private: false`; say so, name another repository, or make this one private"
            )

    def prepare(self, licence: str | None) -> None:
        if self._found():
            return
        if licence is None:  # the client's default would be Apache-2.0
            raise PublishError(
                f"publishing to {self._source}: there is no such repository, or {TOKEN_VARIABLE} may not see it, and "
                "a new one has to state a licence, which neither the recipe nor the card of the base says; say "
                f"`license`, or make the repository at {self._hub.endpoint}"
            )
        visibility = Visibility.PRIVATE if self._private else Visibility.PUBLIC
        with self._explained():
            self._api.create_repo(self._name, KIND, visibility=visibility, license=licence)
        self.check()  # before anything is sent, check that the hub created it as requested

    def _found(self) -> RepoInfo | None:
        """Return the model repository on ModelScope; None if it does not exist or the token may not see it."""
        with self._explained():
            try:
                return self._api.get_repo(self._name, KIND)
            except NotExistError:
                return None

    def held(self, expected: LocalFiles) -> TargetContents:
        with self._explained():
            listed = self._hub.list_repo_files(self._name, KIND, revision=DEFAULT_REVISION)
        files = {file["Path"]: file.get("Sha256") or "" for file in listed if file["Type"] != "tree"}
        self._revision = content_hash(files.items())
        return TargetContents({name: Digest("sha256", sha256) for name, sha256 in files.items()}, self._revision)

    def read_text(self, name: str) -> str | None:
        return HUB.read_file(self._source, self._revision, name)

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        actions = []
        with self._explained():
            for name in missing:
                actions.append(self._uploaded(name, files[name]))
                sent(files[name].size_bytes)
            actions += [{**NOTHING, "action": "delete", "path": name} for name in stale]
            self._hub.create_commit(self._name, KIND, actions, "Publish a promoted model", DEFAULT_REVISION)

    def _uploaded(self, name: str, file: LocalFile) -> dict[str, Any]:
        """Upload a large file to the hub's storage; return its entry, or a small file's content, for a commit."""
        action = {"action": "create", "path": name, "size": file.size_bytes}
        if not _is_large(name, file.size_bytes):
            content = base64.b64encode(file.path.read_bytes()).decode()
            return {**NOTHING, **action, "content": content, "encoding": "base64"}
        wanted = [{"oid": file.sha256, "size": file.size_bytes}]
        if url := self._hub.validate_blobs(self._name, KIND, wanted).get(file.sha256):
            with file.path.open("rb") as stream:
                self._hub.upload_blob(url, stream, file.size_bytes)
        return {**NOTHING, **action, "type": "lfs", "sha256": file.sha256}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate ModelScope's errors into short ones with only the hub's message, without its signed URLs."""
        try:
            yield
        except (NetworkError, requests.RequestException) as error:
            raise TransientError(
                f"publishing to {self._source}: the connection to {self._hub.endpoint} failed "
                f"({type(error).__name__}); check the network, or try again later: what was sent is not sent again"
            ) from None
        except HubError as error:
            raise self._refused(error) from None
        except (KeyError, TypeError, ValueError) as error:
            raise PublishError(
                f"publishing to {self._source}: {self._hub.endpoint} does not answer like a hub ({error})"
            ) from None

    def _refused(self, error: HubError) -> LifecycleError:
        status = f" {error.status_code}" if isinstance(error, APIError) and error.status_code else ""
        doing = f"publishing to {self._source}: ModelScope answered{status}: {error.message}"
        if isinstance(error, ServerError | RateLimitError):
            return TransientError(f"{doing}; try again later, what was sent is not sent again")
        if isinstance(error, AuthenticationError | PermissionDeniedError | NotExistError):
            return PublishError(f"{doing}; set {TOKEN_VARIABLE} to a token that may write there")
        return PublishError(doing)


def _is_large(name: str, size_bytes: int) -> bool:
    """Return whether ModelScope keeps a file in its storage for large files, by the rule of its own client."""
    path = PurePosixPath(name)
    named = path.suffix.lower() in MODEL_LFS_SUFFIX or size_bytes > UPLOAD_LFS_FORCE_THRESHOLD_BYTES
    return named and path.name.upper() not in UPLOAD_INLINE_METADATA_PATHS


def open_target(address: Address, *, private: bool) -> ModelScopeRepository:
    """Open a model repository on ModelScope as a publishing target."""
    return ModelScopeRepository(address.place, private=private)
