"""Publishing target on the Hugging Face hub (`hf://owner/name`): a model repository, with one commit per publication.

Respects HF_ENDPOINT (a mirror) and HF_TOKEN. Large files go to the hub's storage first, where the next attempt finds
them by their sha256; the commit that names them comes last, so that no reader sees half a model.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelInfo
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars

from stages.core.errors import LifecycleError, PublishError, TransientError
from stages.hubs.hub import Request, repository
from stages.hubs.huggingface import HUB, hub_api
from stages.kinds.publish.targets.target import Address, LocalFiles, Names, Sent, TargetContents
from stages.remote.http import busy_from_status
from stages.remote.hub_file import TOKEN_VARIABLE, endpoint


class HuggingFaceRepository:
    """Model repository on the Hugging Face hub. private: visibility of a new one, required of an existing one."""

    def __init__(self, name: str, *, private: bool) -> None:
        self._name = name
        self._private = private
        self._source = repository("hf", "model", name)
        self._revision: str | None = None

    def check(self) -> None:
        if not os.environ.get(TOKEN_VARIABLE):
            raise PublishError(
                f"publishing to {self._source} needs {TOKEN_VARIABLE}, a token that may write there; set it"
            )
        with self._explained():
            user = hub_api().whoami()
        if (user.get("auth") or {}).get("accessToken", {}).get("role") == "read":
            raise PublishError(f"publishing to {self._source}: {TOKEN_VARIABLE} may only read; make another token")
        info = self._info()
        if self._private and info and not info.private:
            raise PublishError(
                f"publishing to {self._source}: everyone can read that repository, but the recipe does not say "
                "`private: false`; say so, name another repository, or make this one private"
            )

    def prepare(self, licence: str | None) -> None:
        if self._info() is None:
            with self._explained():
                hub_api().create_repo(self._name, private=self._private, exist_ok=True)

    def _info(self) -> ModelInfo | None:
        with self._explained():
            try:
                return hub_api().model_info(self._name)
            except RepositoryNotFoundError:
                return None

    def held(self, expected: LocalFiles) -> TargetContents:
        self._revision = HUB.resolve_revision(Request(self._source))
        snapshot = HUB.list_snapshot(self._source, self._revision)
        return TargetContents({file.name: file.digest for file in snapshot.files}, self._revision)

    def read_text(self, name: str) -> str | None:
        return HUB.read_file(self._source, self._revision or "", name)

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        disable_progress_bars()
        additions = []
        with self._explained():
            for name in missing:
                addition = CommitOperationAdd(name, files[name].path)
                addition.upload_info.sha256 = bytes.fromhex(files[name].sha256)
                hub_api().preupload_lfs_files(self._name, [addition])
                additions.append(addition)
                sent(files[name].size_bytes)
            hub_api().create_commit(
                self._name,
                [*additions, *(CommitOperationDelete(name) for name in stale)],
                commit_message="Publish a promoted model",
                parent_commit=self._revision,  # the hub refuses (412) if another commit came in between
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate errors of huggingface_hub into short ones with only the hub's message, without its signed URLs."""
        try:
            yield
        except HfHubHTTPError as error:
            raise self._refused(error) from None
        except httpx.TransportError as error:
            raise self._silent(error) from None
        except RuntimeError as error:  # the library's error for a failed upload
            if isinstance(error.__cause__, HfHubHTTPError):
                raise self._refused(error.__cause__) from None
            if isinstance(error.__cause__, httpx.TransportError):
                raise self._silent(error.__cause__) from None
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # JSON of another form
            raise PublishError(
                f"publishing to {self._source}: {endpoint()} does not answer like a hub ({error})"
            ) from None

    def _refused(self, error: HfHubHTTPError) -> LifecycleError:
        status, message = error.response.status_code, error.server_message or "no reason given"
        doing = f"publishing to {self._source}: the hub answered {status}: {message}"
        if busy_from_status(status, error.response.headers) or status in (409, 412):
            return TransientError(f"{doing}; try again later, what was sent is not sent again")
        if status in (401, 403, 404):
            return PublishError(f"{doing}; set {TOKEN_VARIABLE} to a token that may write there")
        return PublishError(doing)

    def _silent(self, error: Exception) -> TransientError:
        return TransientError(
            f"publishing to {self._source}: the connection to {endpoint()} failed ({type(error).__name__}: {error}); "
            "check the network, or try again later: what was sent is not sent again"
        )


def open_target(address: Address, *, private: bool) -> HuggingFaceRepository:
    """Open a model repository on the Hugging Face hub as a publishing target."""
    return HuggingFaceRepository(address.place, private=private)
