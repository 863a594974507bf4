"""Datasets that stay in a bucket or on a hub are streamed, with the same rows as a local copy."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from stages.core.contract import StageContext, StageInput
from stages.core.errors import DownloadError, TransientError
from stages.data import tokenized_rows
from stages.data.any_rows import AnyRowReader
from stages.data.config import DataConfig
from stages.data.files import FilePart, Row, find_files, read_part, read_rows
from stages.data.prepare import prepare
from stages.kinds.download.config import DownloadConfig
from stages.kinds.download.run import run
from stages.kinds.train.check import check
from stages.models.facts import ModelFacts
from stages.remote import http, pointers
from stages.remote.pointers import open_file
from tests.hub_server import Fault, HubServer, running_hub
from tests.s3_server import S3Server, running_s3
from tests.train_stage import make_config
from tests.unit.stages.data.reports import Reports

NUM_ROWS = 120


def chat(number: int) -> dict[str, object]:
    said = [("user", f"question {number} €"), ("assistant", f"answer {number} " * (number % 7 + 1))]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def lines(*numbers: int) -> bytes:
    return "".join(json.dumps(chat(number), ensure_ascii=False) + "\n" for number in numbers).encode()


def table() -> bytes:
    """Return a Parquet file with several row groups."""
    sink = pyarrow.BufferOutputStream()
    rows = pyarrow.Table.from_pylist([chat(number) for number in range(NUM_ROWS)])
    pyarrow.parquet.write_table(rows, sink, row_group_size=40, compression="none")
    return bytes(sink.getvalue())


CONTENTS = {
    "train.jsonl": lines(*range(NUM_ROWS)),
    "train.parquet": table(),
    "train.jsonl.gz": bytes(pyarrow.compress(lines(*range(NUM_ROWS)), "gzip", asbytes=True)),
    "train.json": json.dumps([chat(number) for number in range(NUM_ROWS)]).encode(),
}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as environment, running_s3(environment) as server:
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "token-of-the-test")
        monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
        yield server


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sizes of network reads small, so that reading a few rows takes many reads."""
    monkeypatch.setattr(tokenized_rows, "PART_BYTES", 3000)
    monkeypatch.setattr(tokenized_rows, "PART_BYTES_ELSEWHERE", 6000)
    monkeypatch.setattr(pointers, "BUFFER_BYTES", 4000)


@pytest.fixture
def fetched(tmp_path: Path):
    """Provide a function that runs a download stage, and returns the folder of the downloaded dataset."""

    def fetch(source: str, *, stream: bool) -> Path:
        config = DownloadConfig(kind="download", dataset=source, stream=stream)
        work = tmp_path / ("streamed" if stream else "copied")
        work.mkdir(exist_ok=True)
        fetch.result = run(config, StageContext(work, "base", "0" * 12, {}, {}, tmp_path / "cache"))
        return work / "data"

    return fetch


@pytest.fixture
def prepared(tmp_path: Path, tokenizer_folder: Path):
    def prepare_folder(folder: Path, **options: object):
        return prepare(
            folder,
            DataConfig(dataset="data", sequence_length=256, **options),
            ModelFacts(tokenizer_folder),
            rows="examples",
            cache=tmp_path / f"cache-{folder.parent.name}",
            report=Reports(),
            bad_rows_file=tmp_path / "bad_rows.jsonl",
        )

    return prepare_folder


def arrays(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_rows_of_a_bucket_are_those_of_its_copy(s3: S3Server, fetched, prepared, name: str) -> None:
    s3.put({f"{name}/train.{name.rpartition('.')[2]}": CONTENTS[name]})
    options = {"evaluation_fraction": 0.1}
    streamed, copied = (prepared(fetched(f"s3://lake/{name}", stream=stream), **options) for stream in (True, False))
    for one, other in ((streamed.training, copied.training), (streamed.evaluation, copied.evaluation)):
        assert arrays(one.folder) == arrays(other.folder)
        assert one.about == other.about


def test_no_copy_lies_on_disk(s3: S3Server, fetched) -> None:
    s3.put({"nights/train.jsonl": CONTENTS["train.jsonl"]})
    folder = fetched("s3://lake/nights", stream=True)
    assert [path.name for path in folder.iterdir()] == ["train.jsonl.pointer"]
    assert fetched.result.metrics["streamed_bytes"] == len(CONTENTS["train.jsonl"])
    assert fetched.result.metrics["bytes"] == sizes(folder) < 300
    assert json.loads((folder / "train.jsonl.pointer").read_bytes())["address"] == "s3://lake/nights/train.jsonl"


@pytest.mark.parametrize("num_bytes", [1, 7, 64, 1000, 10_000])
def test_parts_that_begin_anywhere_hold_each_line_once(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(lines(*range(9)) + b"\n\n" + lines(9) + b"not JSON\n" + lines(10).rstrip())
    whole = list(read_rows(tmp_path, [path]))
    assert [row.place.number for row in whole] == [*range(1, 10), 12, 13, 14]
    begins = range(0, path.stat().st_size, num_bytes)
    found = [row for begin in begins for row in read_part(FilePart(path, "train.jsonl", begin, begin + num_bytes))]
    assert [vars(row) | {"place": 0} for row in found] == [vars(row) | {"place": 0} for row in whole]


def test_a_bad_row_is_found_where_its_place_says(s3: S3Server, fetched, prepared, tmp_path: Path) -> None:
    content = lines(*range(50)) + b"not JSON\n" + lines(*range(50, 60))
    s3.put({"train.jsonl": content})
    prepared(fetched("s3://lake/train.jsonl", stream=True), on_bad_rows="drop", max_bad_row_fraction=0.5)
    (bad,) = map(json.loads, (tmp_path / "bad_rows.jsonl").read_text().splitlines())
    begin = int(bad["file"].partition("from byte ")[2].rstrip(")"))
    assert content[begin:].split(b"\n")[bad["line"] - 1] == b"not JSON"


def test_an_object_that_changed_is_named(s3: S3Server, fetched, prepared) -> None:
    s3.put({"train.jsonl": CONTENTS["train.jsonl"]})
    folder = fetched("s3://lake/train.jsonl", stream=True)
    s3.put({"train.jsonl": CONTENTS["train.jsonl"].replace(b"7", b"8")})  # of the same size
    with pytest.raises(DownloadError, match=r"s3://lake/train\.jsonl changed: .* run the refresh again"):
        prepared(folder)


def test_the_check_of_inputs_names_the_field_of_an_object_that_changed(
    s3: S3Server, fetched, tokenizer_folder: Path, tmp_path: Path
) -> None:
    s3.put({"train.jsonl": CONTENTS["train.jsonl"]})
    folder = fetched("s3://lake/train.jsonl", stream=True)
    s3.put({"train.jsonl": CONTENTS["train.jsonl"].replace(b"7", b"8")})
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model").symlink_to(tokenizer_folder)
    config = make_config(data={"dataset": "chats", "sequence_length": 64}).model_dump(mode="json")
    inputs = {"base": tmp_path / "base", "chats": folder.parent}
    of_stage = StageInput(
        name="sft", kind="train", version="0" * 12, config=config, inputs=inputs, cache=tmp_path / "cache"
    )
    ((field, error),) = check(of_stage)
    assert field == "data.dataset"
    assert isinstance(error, DownloadError) and "changed" in str(error)


def test_an_object_that_changes_while_it_is_read_is_named(s3: S3Server, fetched) -> None:
    s3.put({"train.jsonl": CONTENTS["train.jsonl"]})
    folder = fetched("s3://lake/train.jsonl", stream=True)
    with (
        pytest.raises(DownloadError, match=r"train\.jsonl changed"),
        open_file(folder / "train.jsonl.pointer") as stream,
    ):
        stream.readline()
        s3.put({"train.jsonl": CONTENTS["train.jsonl"].replace(b"7", b"8")})
        stream.read()


def test_what_is_kept_is_not_fetched_again(s3: S3Server, fetched, prepared, tmp_path: Path) -> None:
    """A streamed dataset that was prepared before is taken from the cache, without reading its files again."""
    s3.put({"nights/train.jsonl": CONTENTS["train.jsonl"]})
    folder = fetched("s3://lake/nights", stream=True)
    first = prepared(folder).training.folder
    s3.put({"nights/train.jsonl": b""})
    assert prepared(folder).training.folder == first


@pytest.mark.parametrize("name", CONTENTS)
def test_rows_of_a_hub_are_those_of_its_copy(hub: HubServer, fetched, prepared, name: str) -> None:
    repository = hub.repository("datasets/org/chats")
    repository.token = "token-of-the-test"
    commit = repository.commit({f"data/{name}": CONTENTS[name], "README.md": b"# Chats"})
    folder = fetched("hf://datasets/org/chats", stream=True)
    assert f"hf://datasets/org/chats@{commit}/data/{name}" in (folder / "data" / f"{name}.pointer").read_text()
    assert "token-of-the-test" not in "".join(path.read_text() for path in folder.rglob("*.pointer"))
    streamed, copied = prepared(folder), prepared(fetched("hf://datasets/org/chats", stream=False))
    assert arrays(streamed.training.folder) == arrays(copied.training.folder)


def test_a_hub_that_breaks_off_is_asked_for_the_rest(hub: HubServer, fetched) -> None:
    repository = hub.repository("datasets/org/chats")
    repository.token = "token-of-the-test"
    repository.commit({"train.jsonl": CONTENTS["train.jsonl"]})
    folder = fetched("hf://datasets/org/chats", stream=True)
    hub.faults += [
        Fault("/cdn/", break_after_bytes=3000),
        Fault("/cdn/", break_after_bytes=2000, how="reset"),
        Fault("/resolve/", status=503),
    ]
    rows = [row.content for row in read_rows(folder, find_files(folder, "train")) if isinstance(row, Row)]
    assert rows == [chat(number) for number in range(NUM_ROWS)]
    assert not any(fault.times for fault in hub.faults)
    to_the_cdn = [request for request in hub.requests if request.path.startswith("/cdn/")]
    assert len(to_the_cdn) == 3 and not any("Authorization" in request.headers for request in to_the_cdn)


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_a_hub_that_is_down_is_no_fault_of_the_file(hub: HubServer, fetched, name: str) -> None:
    hub.repository("datasets/org/chats").commit({name: CONTENTS[name]})
    folder = fetched("hf://datasets/org/chats", stream=True)
    hub.faults.append(Fault("/resolve/", status=503, times=1000))
    with pytest.raises(TransientError, match=rf"reading hf://datasets/org/chats@\w+/{name}: the server answered 503"):
        next(read_rows(folder, find_files(folder, "train")))


def test_a_mirror_that_sends_other_files_is_named(hub: HubServer, fetched) -> None:
    repository = hub.repository("datasets/org/chats")
    commit = repository.commit({"train.jsonl": CONTENTS["train.jsonl"]})
    folder = fetched("hf://datasets/org/chats", stream=True)
    for content in (CONTENTS["train.jsonl"] + b" ", CONTENTS["train.jsonl"].replace(b"7", b"8")):
        repository.commits[commit] = {"train.jsonl": content}
        with pytest.raises(DownloadError, match=r"the hub listed .* a mirror or a proxy is wrong"):
            next(read_rows(folder, find_files(folder, "train")))


def test_other_readers_take_what_is_streamed(s3: S3Server, fetched) -> None:
    s3.put({"train.parquet": CONTENTS["train.parquet"]})
    folder = fetched("s3://lake/train.parquet", stream=True)
    reader = AnyRowReader()
    read = [reader.read(row.content).content for row in read_rows(folder, find_files(folder, "train"))]
    assert read == [chat(number) for number in range(NUM_ROWS)]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"dataset": "file://data/mine.jsonl"}, "hf://, s3://, gs://, az://"),
        ({"dataset": "builtin/addition"}, "only, not at "),
        ({"model": "s3://lake/model"}, "`stream` is for a `dataset`"),
    ],
)
def test_what_cannot_be_streamed_is_refused(config: dict[str, str], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        DownloadConfig(kind="download", stream=True, **config)


def test_the_place_of_what_stays_there_is_identity() -> None:
    streamed = [
        DownloadConfig(kind="download", dataset=f"s3://lake/{name}", stream=True).identity() for name in ("a", "b")
    ]
    assert streamed[0] != streamed[1]
    of_hub = DownloadConfig(kind="download", dataset="hf://datasets/org/chats@main", stream=True).identity()
    assert of_hub["dataset"] == "hf://datasets/org/chats"
