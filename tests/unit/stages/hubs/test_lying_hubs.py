"""Malicious hubs cannot make a download write outside its folder, show a traceback, or accept a wrong file."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from stages.core.contract import StageContext
from stages.core.errors import DownloadError, LifecycleError
from stages.hubs.builtin.hub import HUB as BUILTINS
from stages.hubs.delivery import arrivals_folder, move_into_place
from stages.hubs.hub import Request
from stages.hubs.listing import path_in
from stages.hubs.registry import parse_source, read_model_config
from stages.kinds.download.config import DownloadConfig
from stages.kinds.download.run import run
from stages.remote import buckets
from tests.http_server import serving
from tests.hub_repository import Repository, model_files
from tests.hub_server import Fault, HubServer
from tests.s3_server import ENVIRONMENT
from tests.unit.stages.hubs.conftest import Download

LONG = "x" * 300
NAMES = [
    "../escape.json",
    "/etc/escape.json",
    "a/../../escape.json",
    "a\\..\\escape.json",
    "./escape.json",
    "a//escape.json",
    "a/",
    "",
    "a\0.json",
    "a\n.json",
    "a\x1b[31m.json",
    f"{LONG}.json",
    f"{LONG}/a.json",
    "a/" * 1500 + "a.json",
]
NO_NAMES = [None, 5, 1.5, True, ["config.json"], {"name": "config.json"}]
NO_SIZES = [-5, "9", 1.5, True, [9], {"bytes": 9}, 2**63, 10**400]


@pytest.fixture
def repository(hub: HubServer) -> Repository:
    repository = hub.repository("org/tiny")
    repository.commit(model_files(1000))
    return repository


def refusal(download: Download, model: str) -> str:
    with pytest.raises(DownloadError) as caught:
        download(model=model)
    message = str(caught.value)
    assert len(message) < 2000 and message.isprintable()
    return message


def listing(hub: HubServer, repository: Repository, change: Callable[[dict], object]) -> None:
    """Make the fake Hugging Face hub send a list of files that `change` edits in place or replaces."""
    commit = repository.refs["main"]
    files = repository.commits[commit].items()
    answer = {"sha": commit, "siblings": [repository.sibling(file, content) for file, content in files]}
    content = json.dumps(change(answer) or answer).encode()
    hub.pages |= {f"/api/models/org/tiny{where}": content for where in ("", f"/revision/{commit}", "/revision/main")}


@pytest.mark.parametrize(
    "sha",
    ["victim", "../../victim", "", "A" * 40, "a" * 39, "a" * 40 + "\n", LONG, 5, None, ["a" * 40]],
    ids=lambda sha: repr(sha)[:20],
)
def test_a_revision_that_is_no_commit_is_refused(
    sha: object, hub: HubServer, repository: Repository, download: Download, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "own.txt").write_text("the user's")
    listing(hub, repository, lambda answer: answer.update(sha=str(victim) if sha == "victim" else sha))
    assert hub.url in refusal(download, "hf://org/tiny")
    assert (victim / "own.txt").read_text() == "the user's"
    assert not (tmp_path / "model").exists()


def test_the_files_of_another_commit_are_refused(hub: HubServer, repository: Repository, download: Download) -> None:
    commit = repository.refs["main"]
    listing(hub, repository, lambda answer: answer.update(sha="b" * 40))
    assert f"lists the files of commit {'b' * 40}" in refusal(download, f"hf://org/tiny@{commit}")


@pytest.mark.parametrize("revision", ["/abs/folder", "../../x", "a" * 40, "\ud800", LONG])
def test_files_gather_in_a_folder_of_ours_whatever_a_revision_is(revision: str, tmp_path: Path) -> None:
    context = StageContext(tmp_path, "base", "0" * 12, {}, {}, tmp_path / "cache")
    folder = arrivals_folder(context, revision)
    assert folder.parent == tmp_path / "scratch"
    (folder / "a.json").write_text("{}")
    (folder / "left.json.partial").write_text("of an earlier list")
    (folder / "link").symlink_to(tmp_path)
    move_into_place(folder, {"a.json"}, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", [*NAMES, *NO_NAMES], ids=lambda name: repr(name)[:20])
def test_a_name_that_is_no_path_below_a_folder_is_refused(
    name: object, hub: HubServer, repository: Repository, download: Download, tmp_path: Path
) -> None:
    listing(hub, repository, lambda answer: answer["siblings"][0].update(rfilename=name))
    message = refusal(download, "hf://org/tiny")
    assert "hf://org/tiny" in message or hub.url in message
    assert not list(tmp_path.parent.rglob("escape.json"))
    assert hub.served_bytes == {}


def test_two_files_of_the_same_place_are_refused(hub: HubServer, repository: Repository, download: Download) -> None:
    listing(hub, repository, lambda answer: answer["siblings"].append(answer["siblings"][0]))
    assert "twice" in refusal(download, "hf://org/tiny")
    hub.pages.clear()
    extra = ({"rfilename": "config.json/x.json"}, {"rfilename": "config.json.partial"})
    listing(hub, repository, lambda answer: answer["siblings"].extend(answer["siblings"][0] | one for one in extra))
    for pattern in ("*/x.json", "*.partial"):
        with pytest.raises(DownloadError, match="cannot be written to one folder"):
            download(model="hf://org/tiny", files=["config.json", pattern])


@pytest.mark.parametrize(
    ("field", "size"),
    [
        *(("size", size) for size in [*NO_SIZES, None]),
        *((field, size) for field in ("sha256", "blobId", "lfs", "siblings") for size in (5, "9", [9])),
        ("siblings", None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_sizes_digests_and_lists_have_their_types(
    field: str, size: object, hub: HubServer, repository: Repository, download: Download
) -> None:
    def change(answer: dict) -> None:
        large = next(one for one in answer["siblings"] if one["rfilename"] == "model.safetensors" or "lfs" in one)
        if field == "siblings":
            answer["siblings"] = size
        elif field == "sha256":
            large["lfs"]["sha256"] = size
        elif field == "lfs":
            large["lfs"] = size
        else:
            large |= {"lfs": None, "blobId": None, field: size}

    repository.commit(model_files(10_000))
    listing(hub, repository, change)
    message = refusal(download, "hf://org/tiny")
    assert hub.url in message or "hf://org/tiny" in message


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b"5", b"null", b"<html>", b'{"sha": NaN}', b"[" * 5000, b'"\\ud800"', b"\xff\xfe"]
)
@pytest.mark.parametrize("source", ["hf://org/tiny", "modelscope://org/tiny@main"])
def test_an_answer_of_another_form_is_named(
    source: str, answer: bytes, hub: HubServer, repository: Repository, download: Download
) -> None:
    hub.pages |= {"/api/models/org/tiny": answer, "/api/v1/models/org/tiny/repo/files": answer}
    message = refusal(download, source)
    assert "does not answer like a hub" in message and hub.url in message


@pytest.mark.parametrize(
    "change",
    [
        *({"Path": name} for name in (NAMES[0], NAMES[-1], *NO_NAMES[:3], ["config.json"])),
        *({"Size": size} for size in NO_SIZES),
        *({"Sha256": digest} for digest in (None, 5, "A" * 64, ["a" * 64], "a" * 64 + "\n")),
    ],
    ids=lambda change: repr(change)[:30],
)
def test_what_modelscope_lists_has_its_types(
    change: dict, hub: HubServer, repository: Repository, download: Download, tmp_path: Path
) -> None:
    entry = {"Path": "config.json", "Type": "blob", "Size": 9, "Sha256": "a" * 64, **change}
    hub.pages["/api/v1/models/org/tiny/repo/files"] = json.dumps({"Data": {"Files": [entry]}}).encode()
    message = refusal(download, "modelscope://org/tiny@main")
    assert hub.url in message or "modelscope://org/tiny" in message
    assert not list(tmp_path.parent.rglob("escape.json"))


def test_a_list_without_end_is_left(hub: HubServer, download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"Path": f"{number}.jsonl", "Type": "blob", "Size": 9, "Sha256": "a" * 64} for number in range(200)]
    hub.pages["/api/v1/datasets/org/rows/repo/tree"] = json.dumps({"Data": {"Files": entries}}).encode()
    monkeypatch.setattr("stages.hubs.modelscope.MAX_REQUESTS", 3)
    with pytest.raises(DownloadError, match="did not end after 3 requests"):
        download(dataset="modelscope://datasets/org/rows")
    monkeypatch.setattr("stages.hubs.modelscope.LISTING_BYTES", 30_000)
    with pytest.raises(DownloadError, match="more than"):
        download(dataset="modelscope://datasets/org/rows")


def test_a_list_that_modelscope_cuts_off_is_asked_for_folder_by_folder(
    hub: HubServer, repository: Repository, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.hubs.modelscope.REPO_FILES_TRUNCATION_LIMIT", 3)
    with pytest.raises(DownloadError, match="no more than 3 files of the folder '/'"):
        download(model="modelscope://org/tiny@main")
    assert len(hub.paths("/repo/files.*Recursive=False")) == 1


@pytest.mark.parametrize(
    "content_range",
    [
        None,
        "bytes",
        "bytes 0-9/10",
        "bytes 99999-100000/{size}",
        "bytes {start}-{end}/*",
        "bytes {start}-{end}/²",
        "bytes {start}-{end}/1{size}",
        "x" * 5000,
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_part_from_another_place_is_refused(
    content_range: str | None, hub: HubServer, repository: Repository, download: Download
) -> None:
    repository.commit(model_files())
    size, start = len(model_files()["model.safetensors"]), 16_384 * 6
    if content_range:
        content_range = content_range.format(size=size, start=start, end=size - 1)
    hub.faults += [
        Fault("/cdn/.*model.safetensors", break_after_bytes=start, how="close"),
        Fault("/cdn/.*model.safetensors", headers={"Content-Range": content_range}),
    ]
    assert "of which those from byte" in refusal(download, "hf://org/tiny")


@pytest.mark.parametrize("length", ["-5", "9", "²"])
def test_a_length_that_is_not_the_listed_one_is_refused(
    length: str, hub: HubServer, repository: Repository, download: Download
) -> None:
    hub.faults.append(Fault("/resolve/.*config.json", headers={"Content-Length": length}, times=99))
    with pytest.raises(LifecycleError, match=r"downloading config\.json of hf://org/tiny"):
        download(model="hf://org/tiny")


@pytest.mark.parametrize("source", ["hf://org/tiny", "modelscope://org/tiny@main"])
def test_a_config_that_is_read_for_a_plan_is_the_listed_one(
    source: str, hub: HubServer, repository: Repository
) -> None:
    parsed = parse_source(source, "model")
    revision = str(DownloadConfig(kind="download", model=source).resolve_outside()["revision"])
    assert read_model_config(parsed, revision)["model_type"] == "qwen3"
    content = repository.commits[repository.refs["main"]]["config.json"]
    for wrong in (content.replace(b"qwen3", b"qwen2"), content * 10**6):
        hub.faults.append(Fault("config.json", send_instead=wrong))
        with pytest.raises(DownloadError, match=r"does not hash to|more than"):
            read_model_config(parsed, revision)
    repository.listed_sizes["config.json"] = 10**10
    with pytest.raises(DownloadError, match=r"10,000,000,000 bytes; expected at most|changed after"):
        read_model_config(parsed, revision)


def test_a_link_that_lies_in_the_way_is_not_followed(hub: HubServer, repository: Repository, tmp_path: Path) -> None:
    config = DownloadConfig(kind="download", model="hf://org/tiny", files=("*.json", "sub/*", "*.safetensors"))
    repository.commit({**model_files(1000), "sub/more.json": b"{}"})
    revision = str(config.resolve_outside()["revision"])
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("the user's")
    for link, target in (("sub", outside), ("config.json.partial", outside / "precious")):
        context = StageContext(tmp_path / link, "base", "0" * 12, {}, {}, tmp_path / "cache", {"revision": revision})
        context.work.mkdir()
        (arrivals_folder(context, revision) / link).symlink_to(target)
        with pytest.raises(DownloadError, match="by a link"):
            run(config, context)
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "the user's"


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_every_hub_checks_paths_by_the_same_function(name: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="s3://lake/nights lists a file"):
        path_in(tmp_path, name, "s3://lake/nights")


def test_an_ordinary_path_is_below_its_folder(tmp_path: Path) -> None:
    for name in ("config.json", "data/train-00000-of-00001.parquet", "a b/日本語 €.jsonl", ".gitattributes", "a..b"):
        assert path_in(tmp_path, name, "hf://org/tiny") == tmp_path / name


@pytest.mark.parametrize(
    ("metadata", "tag"),
    [
        ({}, ""),
        ({"ETag": '""'}, ""),
        ({"Last-Modified": "now"}, ""),
        ({"ETag": b'"a\xff"'}, "a\\xff"),
        ({"generation": 5}, "5"),
    ],
)
def test_an_object_is_pinned_by_what_changes_with_its_content(metadata: dict, tag: str) -> None:
    assert buckets._tag(metadata) == tag


class LyingStorage(BaseHTTPRequestHandler):
    """Malicious S3 server that returns one object, or a list of keys, with arbitrary headers."""

    keys: tuple[str, ...] = ()
    headers_sent: dict[str, str] = {}  # noqa: RUF012 - the tests set it

    def do_HEAD(self) -> None:
        self.send_response(404 if self.keys and self.path == "/lake/nights" else 200)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        contents = "".join(f"<Contents><Key>{key}</Key><Size>9</Size></Contents>" for key in self.keys)
        body = f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("keys", "headers", "words"),
    [
        ((), {"Content-Length": "9"}, "no ETag"),
        ((), {"Content-Length": "9", "ETag": '""'}, "no ETag"),
        (("nights/../../x.jsonl",), {"Content-Length": "9", "ETag": '"a"'}, "s3://lake/nights"),
        (("elsewhere/x.jsonl",), {"Content-Length": "9", "ETag": '"a"'}, "lies somewhere else"),
    ],
)
def test_a_storage_that_lies_is_named(
    keys: tuple[str, ...], headers: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LyingStorage, "keys", keys)
    monkeypatch.setattr(LyingStorage, "headers_sent", headers)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with serving(LyingStorage) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(LifecycleError, match=words):
            print(DownloadConfig(kind="download", dataset="s3://lake/nights").resolve_outside())


def test_the_source_of_a_repository_is_no_path() -> None:
    for text in ("hf://../..", "hf://org/..", "hf://./tiny", "modelscope://../x"):
        with pytest.raises(ValueError, match="is no model repository"):
            parse_source(text, "model")


def test_a_builtin_needs_no_revision_of_a_hub(tmp_path: Path) -> None:
    request = Request(parse_source("builtin/addition", "dataset"))
    assert BUILTINS.resolve_revision(request) == "1"


@pytest.mark.parametrize(
    ("source", "variable"), [("hf://org/tiny", "HF_TOKEN"), ("modelscope://org/tiny@main", "MODELSCOPE_API_TOKEN")]
)
@pytest.mark.parametrize("token", ["a-tokén", "a-token\n"])
def test_a_token_that_cannot_be_sent_is_named_and_not_shown(
    source: str, variable: str, token: str, hub: HubServer, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, token)
    message = refusal(download, source)
    assert variable in message and "a-tok" not in message
