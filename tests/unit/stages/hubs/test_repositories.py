"""Downloads from Hugging Face and ModelScope, faked by one server: selection of files, checks and retries."""

import hashlib
import json
import traceback
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from stages.core.contract import StageContext, StageResult
from stages.core.errors import DataError, DownloadError, LifecycleError, ModelError, ResourceError, TransientError
from stages.kinds.download.config import DownloadConfig
from stages.kinds.download.run import run
from stages.models.recorded import is_asked_as_chat, trained_on_conversations
from tests.http_server import serving
from tests.hub_repository import model_files
from tests.hub_server import Fault, HubServer
from tests.inspecting_proxy import inspecting_proxy
from tests.unit.stages.hubs.conftest import Download

SOURCES = {"hf": "hf://org/tiny", "modelscope": "modelscope://org/tiny@main"}
BOTH = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
TAKEN = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def repository(hub: HubServer):
    repository = hub.repository("org/tiny")
    repository.commit(model_files())
    return repository


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def refusal(download: Download, error: type[LifecycleError], **config: object) -> str:
    with pytest.raises(error) as caught:
        download(**config)
    return str(caught.value)


@BOTH
def test_takes_the_files_of_a_safe_model_with_their_bytes(source: str, repository, download: Download, tmp_path: Path):
    result = download(model=source)
    assert names(tmp_path / "model") == TAKEN
    for name in TAKEN:
        assert (tmp_path / "model" / name).read_bytes() == model_files()[name]
    assert result.metrics["bytes"] == sum(len(model_files()[name]) for name in TAKEN)
    assert result.metrics["num_files"] == 4
    assert result.tags["source"] == source


@BOTH
def test_a_hub_is_reached_by_a_proxy_that_a_private_authority_vouches_for(
    source: str, hub: HubServer, repository, download: Download, tmp_path: Path, monkeypatch
) -> None:
    for variable in ("NO_PROXY", "no_proxy", "SSL_CERT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    with inspecting_proxy(tmp_path, {"hub.example": hub.port}) as proxy:
        for variable in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
            monkeypatch.setenv(variable, "https://hub.example")
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(proxy.authority))
        download(model=source)
    assert set(proxy.asked) == {"hub.example"}
    for name in TAKEN:
        assert (tmp_path / "model" / name).read_bytes() == model_files()[name]


@BOTH
def test_a_stranger_s_note_of_a_training_is_not_taken_for_ours(
    source: str, hub: HubServer, repository, download: Download, tmp_path: Path
) -> None:
    """A stranger's `trained_on.json`, which only our stages write, is ignored: it might be invalid, or set prompts."""
    repository.commit({**model_files(), "trained_on.json": b"5", "tokenizer_config.json": b'{"chat_template": "x"}'})
    download(model=source)
    assert "trained_on.json" not in names(tmp_path / "model")
    assert is_asked_as_chat(tmp_path / "model")
    assert "trained_on.json of" in (tmp_path / "events.jsonl").read_text()


def test_a_note_of_our_own_training_comes_along(tmp_path: Path) -> None:
    for place, is_kept in (("store/train/sft-0123456789ab/model", True), ("downloads/sft/model", False)):
        for name, content in {**model_files(1000), "trained_on.json": b'{"conversations": false}'}.items():
            if "/" not in name:
                (tmp_path / place).mkdir(parents=True, exist_ok=True)
                (tmp_path / place / name).write_bytes(content)
        config = DownloadConfig.model_validate({"kind": "download", "model": f"file://{tmp_path / place}"})
        work = tmp_path / "store" / ".work" / "download" / f"base-{is_kept}"
        work.mkdir(parents=True)
        run(config, StageContext(work, "base", "0" * 12, {}, {}, tmp_path / "cache", config.resolve_outside()))
        assert trained_on_conversations(work / "model") is (False if is_kept else None)


def test_code_is_kept_only_when_the_recipe_trusts_it(repository, download: Download, tmp_path: Path) -> None:
    download(model="hf://org/tiny", trust_remote_code=True)
    assert "modeling_own.py" in names(tmp_path / "model")


def test_says_so_when_a_model_needs_the_code_that_was_left_out(hub: HubServer, download: Download, tmp_path: Path):
    hub.repository("org/own").commit({**model_files(), "config.json": b'{"model_type": "own", "auto_map": {}}'})
    download(model="hf://org/own")
    assert "trust_remote_code" in (tmp_path / "events.jsonl").read_text()


@BOTH
def test_a_branch_that_moves_gives_another_revision_and_an_old_one_stays_readable(
    source: str, repository, download: Download, tmp_path: Path
) -> None:
    config = DownloadConfig.model_validate({"kind": "download", "model": source})
    first = config.resolve_outside()
    assert config.resolve_outside() == first
    old = repository.refs["main"]
    repository.commit({**model_files(), "README.md": b"# Changed"})
    assert config.resolve_outside() != first
    download(model=f"{source.partition('@')[0]}@{old}")
    assert (tmp_path / "model" / "README.md").read_bytes() == b"# A model"


def test_a_commit_needs_no_question_to_the_hub(hub: HubServer, repository) -> None:
    commit = repository.refs["main"]
    config = DownloadConfig.model_validate({"kind": "download", "model": f"hf://org/tiny@{commit}"})
    assert config.resolve_outside() == {"revision": commit}
    assert hub.requests == []


def test_the_branch_is_no_part_of_the_identity() -> None:
    identities = [
        DownloadConfig.model_validate({"kind": "download", "model": source}).identity()
        for source in ("hf://org/tiny", "hf://org/tiny@main")
    ]
    assert identities[0] == identities[1]


@pytest.mark.parametrize("how", ["reset", "close", "short"])
@BOTH
def test_a_broken_transfer_goes_on_where_it_broke_off(
    source: str, how: str, hub: HubServer, repository, download: Download, tmp_path: Path
) -> None:
    hub.faults += [Fault("(cdn|FilePath=).*model.safetensors", times=3, break_after_bytes=100_000, how=how)]
    download(model=source)
    content = model_files()["model.safetensors"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == content
    # A reset may swallow what was still under way, nothing more.
    assert hub.served_bytes["model.safetensors"] < len(content) + 3 * 100_000
    ranges = [r.headers["Range"] for r in hub.requests if "Range" in r.headers]
    assert ranges


def test_a_server_that_ignores_ranges_gives_the_right_bytes_all_the_same(
    hub: HubServer, repository, download: Download, tmp_path: Path
) -> None:
    hub.faults += [Fault("cdn.*model.safetensors", break_after_bytes=100_000), Fault("cdn", ignore_range=True)]
    download(model="hf://org/tiny")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == model_files()["model.safetensors"]


def test_what_an_earlier_attempt_left_is_not_fetched_again_but_verified(
    hub: HubServer, repository, download: Download, tmp_path: Path
) -> None:
    hub.faults += [Fault("cdn.*model.safetensors", times=99, break_after_bytes=0, how="close")]
    refusal(download, TransientError, model="hf://org/tiny")
    arrivals = tmp_path / "scratch" / hashlib.sha256(repository.refs["main"].encode()).hexdigest()
    (arrivals / "config.json").write_bytes(b"damaged since")
    (arrivals / "model.safetensors.partial").write_bytes(b"wrong" * 1000)
    hub.faults.clear()
    hub.served_bytes.clear()
    download(model="hf://org/tiny")
    assert (tmp_path / "model" / "config.json").read_bytes() == model_files()["config.json"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == model_files()["model.safetensors"]
    assert set(hub.served_bytes) == {"config.json", "model.safetensors"}


@BOTH
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again_and_then_given_up_as_transient(
    source: str, status: int, hub: HubServer, repository, download: Download
) -> None:
    file = "(resolve|FilePath=).*config.json"
    hub.faults += [Fault(file, status=status, times=2, retry_after_s=0)]
    download(model=source)
    hub.faults += [Fault(file, status=status, times=99, retry_after_s=0)]
    assert f"{status}" in refusal(download, TransientError, model=source)


def test_a_hub_that_asks_for_too_long_a_wait_is_not_waited_for(hub: HubServer, repository, download: Download) -> None:
    hub.faults += [Fault("config.json", status=429, times=99, retry_after_s=3600)]
    assert "3600 s" in refusal(download, TransientError, model="hf://org/tiny")
    assert len(hub.paths("config.json")) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_at_plan_time_is_transient(status: int, hub: HubServer, repository, download: Download) -> None:
    hub.faults += [Fault("/api/models", status=status, times=2, retry_after_s=0)]
    download(model="hf://org/tiny")
    hub.faults += [Fault("/api/models", status=status, times=99, retry_after_s=0)]
    assert f"{status}" in refusal(download, TransientError, model="hf://org/tiny")


def test_a_busy_modelscope_at_plan_time_is_transient(hub: HubServer, repository, download: Download) -> None:
    hub.faults += [Fault("/repo/files", status=503, times=99, retry_after_s=0)]
    assert "503" in refusal(download, TransientError, model="modelscope://org/tiny@main")


def test_an_unreachable_hub_is_transient_and_named(hub: HubServer, download: Download) -> None:
    hub.stop()
    assert hub.url in refusal(download, TransientError, model="hf://org/tiny")


@pytest.mark.parametrize(
    ("variable", "value", "word"), [("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE"), ("HF_ENDPOINT", "hub", "HF_ENDPOINT")]
)
def test_a_wrong_environment_is_named(
    variable: str, value: str, word: str, hub: HubServer, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", variable == "HF_HUB_OFFLINE")
    assert word in refusal(download, DownloadError, model="hf://org/tiny")


def test_an_endpoint_that_is_no_hub_is_named(hub: HubServer, download: Download, monkeypatch: pytest.MonkeyPatch):
    hub.pages["/api/models/org/tiny"] = b"<html>Please log in</html>"
    assert "does not answer like a hub" in refusal(download, DownloadError, model="hf://org/tiny")


class Redirecting(BaseHTTPRequestHandler):
    """HTTP server that redirects every request to `target`, which is missing or redirects again."""

    target = ""

    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/gone" else 302)
        self.send_header("Location", f"http://me:s3cret-of-a-mirror@{self.headers['Host']}{self.target}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("target", "said"), [("/gone", "the hub answered 404"), ("/circle", "maximum allowed redirects")]
)
def test_a_hub_that_redirects_is_named_and_no_password_of_its_addresses_is_kept(
    target: str, said: str, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Redirecting, "target", target)
    with serving(Redirecting) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(DownloadError, match=said) as caught:
            download(model="hf://org/tiny")
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@BOTH
def test_what_does_not_exist_is_named(source: str, hub: HubServer, repository, download: Download) -> None:
    missing = source.replace("tiny", "tinny")
    assert "org/tinny" in refusal(download, DownloadError, model=missing)
    assert "v9" in refusal(download, DownloadError, model=f"{source.partition('@')[0]}@v9")


def test_the_closest_revision_is_proposed(repository, download: Download) -> None:
    assert "did you mean 'main'" in refusal(download, DownloadError, model="hf://org/tiny@mian")


@pytest.mark.parametrize(
    ("source", "variable"),
    [("hf://org/tiny", "HF_TOKEN"), ("modelscope://org/tiny@main", "MODELSCOPE_API_TOKEN")],
    ids=["hf", "modelscope"],
)
def test_a_private_model_needs_the_token_of_the_environment(
    source: str,
    variable: str,
    hub: HubServer,
    repository,
    download: Download,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path,
) -> None:
    repository.token = "right-secret"
    assert variable in refusal(download, DownloadError, model=source)
    monkeypatch.setenv(variable, "wrong-secret")
    assert "wrong-secret" not in refusal(download, DownloadError, model=source)
    monkeypatch.setenv(variable, "right-secret")
    result = download(model=source)
    written = [path.read_text() for path in tmp_path.glob("*.json*")]
    assert "right-secret" not in "".join([*written, result.model_dump_json()])
    to_the_cdn = [request.headers for request in hub.requests if "/cdn/" in request.path]
    assert bool(to_the_cdn) == source.startswith("hf://"), "only this hub sends elsewhere for large files"
    assert all("right-secret" not in json.dumps(headers) for headers in to_the_cdn)


def test_a_gated_model_tells_where_to_accept_its_terms(hub: HubServer, repository, download: Download) -> None:
    repository.token, repository.gated = "secret", True
    message = refusal(download, DownloadError, model="hf://org/tiny")
    assert f"{hub.url}/org/tiny" in message and "gated" in message and "HF_TOKEN" in message


@BOTH
@pytest.mark.parametrize("listed_bytes", [5_000, 5_000_000])
def test_a_size_that_the_hub_lied_about_is_an_error(
    source: str, listed_bytes: int, repository, download: Download, tmp_path: Path
) -> None:
    repository.listed_sizes["model.safetensors"] = listed_bytes
    assert f"{listed_bytes} bytes" in refusal(download, DownloadError, model=source)
    assert not (tmp_path / "model").exists()


@BOTH
def test_a_body_without_end_is_cut_off_at_the_listed_size(source: str, hub, repository, download: Download) -> None:
    content = model_files()["model.safetensors"]
    endless = Fault("(cdn|FilePath=).*safetensors", break_after_bytes=10**9, how="short", send_instead=content * 2)
    hub.faults += [endless]
    assert "sends more" in refusal(download, DownloadError, model=source)


@BOTH
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_bytes_than_the_hub_lists_are_refused(
    source: str, name: str, hub: HubServer, repository, download: Download, tmp_path: Path
) -> None:
    content = model_files()[name]
    hub.faults += [Fault(f"(cdn|resolve|FilePath=).*{name}", times=9, send_instead=b"\0" * len(content))]
    message = refusal(download, DownloadError, model=source)
    assert "does not hash" in message
    assert not (tmp_path / "model").exists()


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(
    hub: HubServer, repository, download: Download
) -> None:
    repository.listed_sizes["model.safetensors"] = 10**16
    message = refusal(download, ResourceError, model="hf://org/tiny")
    assert "9313225.75 GiB" in message and "free" in message
    assert hub.paths("resolve") == []


@pytest.mark.parametrize("name", ["../escape.json", "/etc/escape.json", "a/../../escape.json"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, hub: HubServer, download: Download, tmp_path: Path):
    hub.repository("org/evil").commit({**model_files(), name: b"{}"})
    assert "leads out" in refusal(download, DownloadError, model="hf://org/evil")
    assert not list(tmp_path.parent.rglob("escape.json"))


def test_pickled_weights_alone_are_refused_without_a_download(hub: HubServer, download: Download) -> None:
    files = {name: content for name, content in model_files().items() if not name.endswith(".safetensors")}
    hub.repository("org/old").commit(files)
    assert "pytorch_model.bin" in refusal(download, ModelError, model="hf://org/old")
    assert hub.served_bytes == {}


def test_a_model_without_tokenizer_is_refused(hub: HubServer, download: Download) -> None:
    files = {name: content for name, content in model_files().items() if name != "tokenizer.json"}
    hub.repository("org/mute").commit(files)
    assert "tokenizer" in refusal(download, ModelError, model="hf://org/mute")


DATASET = {
    "data/train.jsonl": b'{"text": "x"}\n' * 1000,
    "data/test.parquet": b"PAR1",
    "load.py": b"",
    "README.md": b"#",
}


@pytest.mark.parametrize("source", ["hf://datasets/org/rows", "modelscope://datasets/org/rows@main"])
def test_takes_the_files_of_a_dataset_but_not_its_script(
    source: str, hub: HubServer, download: Download, tmp_path: Path
):
    hub.repository("datasets/org/rows").commit(DATASET)
    download(dataset=source)
    assert names(tmp_path / "data") == ["README.md", "data/test.parquet", "data/train.jsonl"]
    assert (tmp_path / "data" / "data" / "train.jsonl").read_bytes() == DATASET["data/train.jsonl"]


def test_only_files_that_match_are_taken(hub: HubServer, download: Download, tmp_path: Path) -> None:
    hub.repository("datasets/org/rows").commit(DATASET)
    download(dataset="hf://datasets/org/rows", files=["*.jsonl"])
    assert names(tmp_path / "data") == ["README.md", "data/train.jsonl"]
    message = refusal(download, DownloadError, dataset="hf://datasets/org/rows", files=["*.jsonl", "tset*"])
    assert "tset*" in message and "data/train.jsonl" in message


def test_a_dataset_that_is_only_a_script_is_refused(hub: HubServer, download: Download) -> None:
    hub.repository("datasets/org/script").commit({"load.py": b"import os"})
    assert "never run" in refusal(download, DataError, dataset="hf://datasets/org/script")


def test_progress_ends_at_the_total_in_bytes(repository, download: Download, tmp_path: Path) -> None:
    result: StageResult = download(model="hf://org/tiny")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "progress"][-1]
    assert last["done"] == last["total"] == result.metrics["bytes"]
    assert last["unit"] == "B" and last["message"].endswith("MiB/s")
