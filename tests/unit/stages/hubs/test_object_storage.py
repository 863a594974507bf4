"""Downloads from a real S3 server are identified by content, resumed when cut off, and report what is missing."""

import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from stages.core.contract import StageContext
from stages.core.errors import DataError, DownloadError, TransientError
from stages.hubs import object_storage
from stages.hubs.registry import read_model_config
from stages.kinds.download.config import DownloadConfig
from stages.remote import buckets
from stages.remote.buckets import explained
from tests.http_server import serving
from tests.hub_repository import model_files
from tests.s3_server import ENVIRONMENT, S3Server, running_s3
from tests.unit.stages.hubs.conftest import Download

ROWS = b"".join(b'{"text": "row %d"}\n' % number for number in range(500))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with running_s3(monkeypatch) as server:
        server.put({"nights/train.jsonl": ROWS, "nights/more/test.jsonl": ROWS[:100], "nights/.hidden/x.jsonl": b"{}"})
        yield server


def revision(limit_s: float | None = None, **config: object) -> str:
    return str(DownloadConfig.model_validate({"kind": "download", **config}).resolve_outside(limit_s)["revision"])


def test_the_objects_below_a_prefix_are_copied(s3: S3Server, download: Download, tmp_path: Path) -> None:
    result = download(dataset="s3://lake/nights/")
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in (tmp_path / "data").rglob("*.jsonl")}
    assert files == {"data/train.jsonl": ROWS, "data/more/test.jsonl": ROWS[:100]}
    assert result.tags["source"] == "s3://lake/nights"


def test_one_object_keeps_its_name(s3: S3Server, download: Download, tmp_path: Path) -> None:
    s3.put({"a name %20.jsonl": ROWS})
    download(dataset="s3://lake/a name %20.jsonl")
    assert (tmp_path / "data" / "a name %20.jsonl").read_bytes() == ROWS


def test_a_model_is_taken_without_what_is_unsafe(s3: S3Server, download: Download, tmp_path: Path) -> None:
    s3.put({f"models/tiny/{name}": content for name, content in model_files(1000).items()})
    download(model="s3://lake/models/tiny")
    copied = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert copied == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    config = DownloadConfig(kind="download", model="s3://lake/models/tiny")
    revision_now = str(config.resolve_outside()["revision"])
    assert read_model_config(config.source, revision_now)["model_type"] == "qwen3"


def test_the_revision_follows_what_is_taken_and_the_identity_forgets_the_place(s3: S3Server) -> None:
    first = revision(dataset="s3://lake/nights")
    s3.put({"elsewhere/train.jsonl": ROWS, "elsewhere/more/test.jsonl": ROWS[:100], "elsewhere/notes.txt": b"x"})
    assert revision(dataset="s3://lake/elsewhere") == first
    s3.put({"nights/train.jsonl": ROWS.replace(b"row 7", b"row 8")})  # of the same size
    assert revision(dataset="s3://lake/nights") != first
    identities = [DownloadConfig(kind="download", dataset=f"s3://lake/{name}").identity() for name in "ab"]
    assert identities[0] == identities[1]


def test_what_an_earlier_attempt_left_is_gone_on_with_but_for_its_last_piece(
    s3: S3Server, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "CHUNK_BYTES", 1000)
    named = hashlib.sha256(revision(dataset="s3://lake/nights").encode()).hexdigest()
    arrived = tmp_path / "scratch" / named / "train.jsonl"
    arrived.parent.mkdir(parents=True)
    arrived.write_bytes(b"X" * 2500)  # of which no more than the first 1500 need have reached the disk
    download(dataset="s3://lake/nights")
    assert (tmp_path / "data" / "train.jsonl").read_bytes() == b"X" * 1500 + ROWS[1500:]


def test_objects_that_change_after_the_plan_are_refused(s3: S3Server, tmp_path: Path) -> None:
    config = DownloadConfig(kind="download", dataset="s3://lake/nights")
    planned = str(config.resolve_outside()["revision"])
    s3.put({"nights/train.jsonl": ROWS + ROWS})
    context = StageContext(tmp_path, "base", "0" * 12, {}, {}, tmp_path / "cache")
    with pytest.raises(DownloadError, match="changed after this refresh was planned"):
        object_storage.HUB.deliver(config.request, planned, tmp_path / "data", context)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("source", "error", "word"),
    [
        ("s3://lake/nowhere", DownloadError, "s3://lake/nowhere does not exist"),
        ("s3://no-such-bucket/nights", DownloadError, "s3://no-such-bucket/nights does not exist"),
        ("s3://lake/papers", DataError, "no data files"),
        ("az://container/nights", DownloadError, "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_what_is_not_there_is_named(
    s3: S3Server, source: str, error: type, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    s3.put({"papers/one.pdf": b"x"})
    with pytest.raises(error, match=word):
        revision(dataset=source)


def test_keys_that_are_not_accepted_are_named_and_not_shown(s3: S3Server) -> None:
    s3.admit_nobody()
    with pytest.raises(DownloadError, match=r"AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.* are not accepted") as raised:
        revision(dataset="s3://lake/nights")
    assert not any(ENVIRONMENT[name] in str(raised.value) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))


class Denies(BaseHTTPRequestHandler):
    """HTTP server of a private bucket, which answers 403 to requests without credentials."""

    def do_HEAD(self) -> None:
        self.send_response(403 if "Authorization" not in self.headers else 500)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, *_: object) -> None:
        pass


def test_a_bucket_without_credentials_is_named_with_what_to_set(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with serving(Denies) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(DownloadError, match="no AWS_ACCESS_KEY_ID and no AWS_SECRET_ACCESS_KEY; set credentials"):
            revision(dataset="s3://lake/nights")


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("gs://lake/nights", {"GOOGLE_APPLICATION_CREDENTIALS": "/no/such/file.json"}),
        ("az://lake/nights", {"AZURE_STORAGE_ACCOUNT_NAME": "nobody", "AZURE_STORAGE_ACCOUNT_KEY": "no base64"}),
    ],
)
def test_credentials_that_cannot_be_used_at_all_are_named(
    source: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials rejected by the provider's library, in errors unknown to pyarrow, are named by variable."""
    monkeypatch.delenv("AZURE_STORAGE_SAS_TOKEN", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        DownloadError, match=rf"{source} may not be read: .*\({', '.join(variables)}\) are not accepted"
    ):
        revision(dataset=source)


def test_google_s_library_is_given_up_soon_where_no_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr(buckets, "RETRIED_WITHOUT_CREDENTIALS_S", 0.1)
    with pytest.raises(DownloadError, match="has no GOOGLE_APPLICATION_CREDENTIALS; set"):
        revision(dataset="gs://lake/nights")


NO_TOKEN = (
    "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of Could not create a OAuth2 "
    "access token to authenticate the request. [...] Could not resolve hostname error_info={reason=, metadata={}})"
)
"""Error of Google's library after a minute on a machine outside Google's cloud, with or without credentials."""


def test_google_s_library_without_credentials_is_told_from_one_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with (
        pytest.raises(DownloadError, match="has no GOOGLE_APPLICATION_CREDENTIALS; set"),
        explained("gs://lake/nights"),
    ):
        raise OSError(NO_TOKEN)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "account.json")
    with pytest.raises(TransientError, match="Could not resolve hostname"), explained("gs://lake/nights"):
        raise OSError(NO_TOKEN)


def test_a_server_that_is_away_may_be_back_later(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Denies) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    with pytest.raises(TransientError, match=r"s3://lake/nights.*try again later"):
        revision(dataset="s3://lake/nights")
    with pytest.raises(TransientError, match=r"s3://lake/nights: 127\.0\.0\.1 does not answer at port"):
        revision(60.0, dataset="s3://lake/nights")


def test_a_plan_asks_a_server_that_answers(s3: S3Server) -> None:
    assert revision(60.0, dataset="s3://lake/nights") == revision(dataset="s3://lake/nights")
