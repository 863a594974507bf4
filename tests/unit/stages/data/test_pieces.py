"""A dataset is tokenized in parts, each cached by its content, with the same result as in one pass."""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from stages.core.errors import DataError
from stages.core.supervised import SupervisedProcess
from stages.data import tokenized_rows, tokenizing
from stages.data.config import DataConfig
from stages.data.files import read_part, read_rows
from stages.data.messages import Conversation
from stages.data.prepare import prepare
from stages.data.tokenized_rows import parts_of
from stages.data.tokenizer import DocumentTokenizer
from stages.models.facts import ModelFacts
from tests.damage import flip_bit
from tests.unit.stages.data.reports import Reports


def chat(number):
    said = [("user", f"question {number}"), ("assistant", f"answer {number} " * (number % 7 + 1))]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


@pytest.fixture
def run(tmp_path, tokenizer_folder):
    def prepare_folder(folder, cache="cache", reports=None, **options):
        prepare_folder.reports = reports or Reports()
        return prepare(
            folder,
            DataConfig(dataset="data", **{"sequence_length": 256, **options}),
            ModelFacts(tokenizer_folder),
            rows="examples",
            cache=tmp_path / cache,
            report=prepare_folder.reports,
            bad_rows_file=tmp_path / "bad_rows.jsonl",
        ).training

    return prepare_folder


def write_shards(write_rows, count, rows_each=40):
    for number in range(count):
        rows = [chat(row) for row in range(number * rows_each, (number + 1) * rows_each)]
        folder = write_rows(rows, f"train/{number:03}.jsonl")
    return folder


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pieces(tmp_path):
    return {path.name: path.stat().st_ino for path in (tmp_path / "cache" / "pieces").iterdir()}


def test_of_files_that_are_there_already_none_is_tokenized_again(run, write_rows, tmp_path):
    run(write_shards(write_rows, 5))
    before = pieces(tmp_path)
    folder = write_shards(write_rows, 6)
    grown = run(folder)
    after = pieces(tmp_path)
    assert len(before) == 5
    assert len(after) == 6
    assert before.items() <= after.items()
    assert content(grown.folder) == content(run(folder, cache="other").folder)
    assert grown.num_documents == 240


def test_rows_that_are_appended_to_a_file_are_tokenized_alone(run, write_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenized_rows, "PART_BYTES", 1000)
    run(write_rows([chat(number) for number in range(200)]))
    before = pieces(tmp_path)
    folder = write_rows([chat(number) for number in range(210)])
    grown = run(folder)
    assert len(before.keys() - pieces(tmp_path).keys()) == 0
    assert len(pieces(tmp_path)) <= len(before) + 3
    monkeypatch.setattr(tokenized_rows, "PART_BYTES", 1 << 20)
    assert content(grown.folder) == content(run(folder, cache="other").folder)


def test_what_repeats_and_what_is_bad_is_named_by_its_place_over_all_parts(run, write_rows, monkeypatch):
    monkeypatch.setattr(tokenized_rows, "PART_BYTES", 500)
    rows = [chat(number) for number in range(60)]
    rows[40] = {"messages": []}
    rows[50] = rows[3]
    rows[55] = {"messages": [*rows[55]["messages"]], "more": "unread"}
    run(write_rows(rows), on_bad_rows="drop", max_bad_row_fraction=0.5)
    assert [warning.removeprefix("training data: ") for warning in run.reports.warnings] == [
        "1 of 60 rows cannot be learned from and were dropped: train.jsonl:41 has an empty list in `messages`; "
        "expected messages",
        "fields that are not read, and teach nothing: `more` (1 row)",
        "1 of 59 rows repeat an earlier one, and are learned as often as they are there: train.jsonl:51 is "
        "train.jsonl:4 again",
    ]
    with pytest.raises(DataError, match=r"train.jsonl:41 has an empty list"):
        run(write_rows(rows))


@pytest.fixture
def two_processes(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(tokenized_rows, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_another_process_tokenizes_without_transformers(tokenizer_folder):
    here = DocumentTokenizer(tokenizer_folder, None, "assistant")
    [[unit]] = here.render_units([Conversation(chat(1)["messages"])])
    program = """
import pickle, sys
tokenizer, conversation = pickle.load(sys.stdin.buffer)
[[unit]] = tokenizer.render_units([conversation])
print(tokenizer.encode([unit])[0].ids.tolist(), sorted({"torch", "transformers"} & sys.modules.keys()))
"""
    sent = pickle.dumps((here, Conversation(chat(1)["messages"])))
    done = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().strip() == f"{here.encode([unit])[0].ids.tolist()} []"


def test_any_number_of_processes_gives_the_same_bytes_and_says_how_fast(run, write_rows, monkeypatch, request):
    monkeypatch.setattr(tokenized_rows, "PART_BYTES", 3000)
    rows = [*(chat(number) for number in range(300)), {"messages": []}, chat(7)]
    folder = write_rows(rows)
    options = {"on_bad_rows": "drop", "over_long": "truncate"}
    alone = run(folder, **options)
    warnings = run.reports.warnings
    request.getfixturevalue("two_processes")
    together = run(folder, cache="other", **options)
    assert content(alone.folder) == content(together.folder)
    assert run.reports.warnings == warnings
    assert "rows/s" in run.reports.messages[-1]
    bad = write_rows([chat(0), *[{"text": "no conversation"}] * 200])
    with pytest.raises(DataError, match=r"200 of 201 rows cannot be learned from:\n  train.jsonl:2 has no `messages`"):
        run(bad)


def test_a_part_of_many_tokens_is_several_pieces(run, write_rows, tmp_path, monkeypatch):
    folder = write_rows([chat(number) for number in range(3000)])
    whole = run(folder, cache="other")
    monkeypatch.setattr(tokenizing, "PIECE_TOKENS", 100)
    assert content(run(folder).folder) == content(whole.folder)
    assert len(pieces(tmp_path)) == 4


def test_of_a_part_whose_pieces_are_damaged_or_gone_all_are_made_again(run, write_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "PIECE_TOKENS", 100)
    monkeypatch.setattr(tokenizing, "CHUNK_ROWS", 20)
    folder = write_rows([chat(number) for number in range(50)])
    whole = content(run(folder).folder)
    kept = sorted((tmp_path / "cache" / "pieces").iterdir())
    assert len(kept) > 1
    for piece in (kept[0], kept[-1]):
        for damaged in (b"", piece.read_bytes()[:-1], bytes(piece.stat().st_size), b"\xff" * 100, None):
            shutil.rmtree(tmp_path / "cache" / "tokenized")
            piece.unlink() if damaged is None else piece.write_bytes(damaged)
            assert content(run(folder).folder) == whole


def test_a_flipped_bit_of_what_is_kept_is_never_learned(run, write_rows, tmp_path):
    folder = write_rows([chat(number) for number in range(50)])
    dataset = run(folder)
    whole = content(dataset.folder)
    (piece,) = (tmp_path / "cache" / "pieces").iterdir()
    for at in range(5, piece.stat().st_size, piece.stat().st_size // 20):
        shutil.rmtree(tmp_path / "cache" / "tokenized")
        flip_bit(piece, at)
        assert content(run(folder).folder) == whole
        assert run.reports.warnings[0].startswith("1 part of the tokenized data"), at
    assert content(run(folder).folder) == whole and not run.reports.warnings
    for path in sorted(dataset.folder.iterdir()):
        if path.stat().st_size:
            flip_bit(path, path.stat().st_size // 2)
            assert content(run(folder).folder) == whole
            expected = f"training data: {dataset.folder} held other bytes than were written, and was made again"
            assert run.reports.warnings == [expected], path


def test_a_file_that_changes_while_it_is_read_is_named(run, write_rows, tmp_path):
    folder = write_rows([chat(number) for number in range(2000)])

    class Appending(Reports):
        def progress(self, *_):
            with (folder / "train.jsonl").open("a") as stream:
                stream.write("\n")

    with pytest.raises(DataError, match=r"train.jsonl changed while it was read: it had [\d,]+ bytes and"):
        run(folder, reports=Appending())
    assert not [*tmp_path.glob("cache/tokenized/*/about.json")]
    assert not [*tmp_path.glob("cache/pieces/*")], "the file's former content would be taken for these tokens"


def test_parts_of_parquet_have_its_rows_under_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenized_rows, "PART_BYTES", 200)
    path = tmp_path / "train.parquet"
    table = pyarrow.table({"text": [f"text {number}" for number in range(100)]})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    found = list(parts_of(path, "train.parquet"))
    assert len(found) > 3
    assert len({one.digest for one in found}) == len(found)
    rows = [row for one in found for row in read_part(one.part)]
    assert rows == list(read_rows(tmp_path, [path]))
    assert [row.place.number for row in rows] == list(range(1, 101))


KILLED = """
import os
import sys
from pathlib import Path
from stages.data import tokenized_rows
from stages.data.config import DataConfig
from stages.data.prepare import prepare
from stages.models.facts import ModelFacts

class Reports:
    def progress(self, *_):
        print("begun", flush=True)
    def warn(self, _):
        pass

if __name__ == "__main__":
    tokenized_rows.PART_BYTES = 1 << 16  # so that the first part is soon done
    tokenized_rows.BYTES_PER_PROCESS = 1
    os.sched_getaffinity = lambda _: {0, 1}
    folder, tokenizer, cache = map(Path, sys.argv[1:])
    config = DataConfig(dataset="data", sequence_length=256)
    options = {"rows": "examples", "cache": cache, "report": Reports(), "bad_rows_file": cache / "bad"}
    prepare(folder, config, ModelFacts(tokenizer), **options)
"""


GRACE_S = 120.0


def processes_with(word):
    """Return the /proc folders of all processes whose environment contains a given word."""
    found = []
    for folder in (path for path in Path("/proc").iterdir() if path.name.isdecimal()):
        with contextlib.suppress(OSError):
            found += [folder] if word.encode() in (folder / "environ").read_bytes() else []
    return found


@pytest.fixture
def program(tmp_path, tokenizer_folder, write_rows):
    """Provide a program that tokenizes in two processes: command, environment, and their mark in it."""
    folder = write_rows([chat(number) for number in range(20_000)])
    for shard in range(8):
        (folder / f"train-{shard:05}-of-00008.jsonl").write_bytes((folder / "train.jsonl").read_bytes() + b"\n" * shard)
    (folder / "train.jsonl").unlink()
    (tmp_path / "cache").mkdir()
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    mark = f"MARK_{os.getpid()}_{tmp_path.name}"
    arguments = [sys.executable, str(program), str(folder), str(tokenizer_folder), str(tmp_path / "cache")]
    return arguments, {**os.environ, "OMP_NUM_THREADS": "2", "INCREMENT_MARK": mark}, mark


def test_no_process_outlives_the_one_that_asked_for_it(tmp_path, program):
    arguments, environment, mark = program
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n"
        while len(processes_with(mark)) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait(300)
    until_s = time.monotonic() + 300
    while (left := processes_with(mark)) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not left
    assert not [*tmp_path.glob("cache/tokenized/*/about.json")]


def test_stopped_as_by_ctrl_c_no_process_has_to_be_killed_after_its_time_of_grace(tmp_path, program):
    arguments, environment, mark = program
    with (tmp_path / "log.txt").open("wb") as log:
        supervised = SupervisedProcess(arguments, environment=environment, output=log, grace_s=GRACE_S)
    while "begun" not in (tmp_path / "log.txt").read_text():  # pytest's own limit is the longest
        assert supervised.alive()
        time.sleep(0.05)
    while len(processes_with(mark)) < 3:
        assert supervised.alive()
        time.sleep(0.05)
    began_s = time.monotonic()
    supervised.stop()
    assert time.monotonic() - began_s < GRACE_S / 2
    assert not processes_with(mark)
