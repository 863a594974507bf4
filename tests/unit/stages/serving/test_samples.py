"""Requests to a server are recorded as dataset rows: their content, what is never recorded, and the size limit."""

import fcntl
import json
import random
from pathlib import Path

import pytest

from flows.ledger.home import store_root
from flows.running.adopt import adopt
from flows.store.store import Store
from stages.core.errors import ResourceError
from stages.data.formats import RowReader
from stages.serving import samples as samples_module
from stages.serving.exchange import Exchange
from stages.serving.samples import Samples, row_of
from tests.faults.tiny import Notes
from tests.serving import wait_for

MIB = 2**20
QUESTION = {
    "role": "user",
    "content": "I am jo@example.org, card 4111 1111 1111 1111, key hf_abcdefghijklmnopqrstuvwx.",
}
ANSWER = {"role": "assistant", "content": "Hello, jo@example.org."}


def exchange(asked: dict, *answers: dict, reason: str = "stop") -> Exchange:
    """Return the proxy's record of a request and its response, which is streamed if several texts are given."""
    found = Exchange(asked, keeps_content=True)
    key, kind = ("delta", "text/event-stream") if len(answers) > 1 else ("message", "application/json")
    found.begin(200, kind, None)
    for number, answer in enumerate(answers, 1):
        ended = reason if number == len(answers) else None
        content = json.dumps({"choices": [{"index": 0, key: answer, "finish_reason": ended}]})
        found.passed(f"data: {content}\n\n".encode() if key == "delta" else content.encode())
    found.end()
    return found


def row(asked: dict, *answers: dict, reason: str = "stop") -> dict | None:
    line = row_of(exchange(asked, *answers, reason=reason), "3")
    return json.loads(line) if line else None


def rows_in(folder: Path) -> list[dict]:
    return [
        json.loads(line) for file in sorted(folder.glob("requests-*.jsonl")) for line in file.read_text().splitlines()
    ]


def test_a_row_holds_what_was_said_and_no_personal_data_and_no_key(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "of-this-process")
    system = {
        "role": "system",
        "content": [{"type": "text", "text": "Never say "}, {"type": "text", "text": "of-this-process"}],
    }
    asked = {"messages": [system, QUESTION], "user": "jo", "temperature": 1, "stream": True}
    assert row(asked, {"role": "assistant", "content": ""}, {"content": "Hello, "}, {"content": "jo@example.org."}) == {
        "messages": [
            {"role": "system", "content": "Never say ***"},
            {"role": "user", "content": "I am [EMAIL], card [CREDIT_CARD], key ***."},
            {"role": "assistant", "content": "Hello, [EMAIL]."},
        ],
        "version": "3",
    }


def test_tool_calls_of_a_stream_are_put_together():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    deltas = [
        {"content": None, "reasoning_content": "Two "},
        {"reasoning_content": "calls."},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": '}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "add", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    asked = {"messages": [{"role": "user", "content": "1?"}], "tools": tools, "stream": True}
    found = row(asked, *deltas, reason="tool_calls")
    assert found
    assert found["tools"] == tools
    message = found["messages"][-1]
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [("a", "add", '{"x": 1}'), ("b", "add", "{}")]
    assert message["reasoning_content"] == "Two calls."
    whole = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Two calls.",
        "tool_calls": message["tool_calls"],
    }
    assert row(asked, whole, reason="tool_calls") == found
    assert RowReader("messages", "examples").read(found)


PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([QUESTION], "length"),
        ([PICTURE], "stop"),
        ([{"role": "developer", "content": "x"}, QUESTION], "stop"),
        ([QUESTION, QUESTION], "stop"),
        ([{"role": "user", "content": "x" * MIB}], "stop"),
        ("what", "stop"),
        ([], "stop"),
    ],
    ids=["cut off", "picture", "role", "no turns", "too long", "no messages", "nothing"],
)
def test_what_teaches_nothing_is_no_row(messages, reason):
    assert row({"messages": [QUESTION]}, ANSWER) is not None
    assert row({"messages": messages}, ANSWER, reason=reason) is None


def test_what_was_refused_is_no_row():
    refused = Exchange({"messages": [QUESTION]})
    refused.begin(400, "application/json", None)
    refused.passed(b'{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}')
    refused.end()
    assert row_of(refused, "3") is None


def test_a_share_of_the_conversations_is_sampled_and_can_be_adopted(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    folder, numbers = tmp_path / "samples", random.Random(5)
    expected = [number for number in range(30) if numbers.random() < 0.4]
    with Samples(folder, 0.4, MIB, random_seed=5) as samples:
        for number in range(30):
            if samples.draws():
                samples.take(exchange({"messages": [{"role": "user", "content": f"{number}?"}]}, ANSWER), "3")
    built = adopt(Store(store_root()), folder, "dataset", "questions", Notes())
    files = [*(built.artifact / "data").rglob("*.jsonl")]
    assert len(files) == 1
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [one["messages"][0]["content"] for one in rows] == [f"{number}?" for number in expected]


def test_the_oldest_requests_make_room_for_new_ones(tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text("{}\n")
    for number in range(60):  # a context each: what is sampled at a time is written when it ends
        with Samples(tmp_path, 1.0, 64 * 1024) as samples:
            content = f"{number} {'x' * 8000}"
            samples.take(exchange({"messages": [{"role": "user", "content": content}]}, ANSWER), "3")
    files = [*tmp_path.glob("requests-*.jsonl")]
    assert 40 * 1024 < sum(file.stat().st_size for file in files) <= 64 * 1024
    kept = {int(one["messages"][0]["content"].split()[0]) for one in rows_in(tmp_path)}
    assert 59 in kept
    assert 0 not in kept
    assert (tmp_path / "mine.jsonl").exists()
    assert "is full: for new requests, the oldest are removed" in capsys.readouterr().out


def test_a_file_that_is_old_enough_is_part_of_the_dataset_though_nobody_asks_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_module, "FILE_AGE_S", 0.1)
    with Samples(tmp_path, 1.0, MIB) as samples:
        samples.take(exchange({"messages": [QUESTION]}, ANSWER), "3")
        wait_for(lambda: len(rows_in(tmp_path)) == 1, what="the file")


def test_what_a_killed_server_left_is_completed_and_what_another_writes_is_left_alone(tmp_path):
    (tmp_path / ".requests-1.jsonl").write_text('{"whole": 1}\n{"torn')
    with (tmp_path / ".requests-2.jsonl").open("w") as other:
        other.write('{"whole": 2}\n')
        fcntl.flock(other, fcntl.LOCK_EX)
        with Samples(tmp_path, 1.0, MIB):
            assert sorted(path.name for path in tmp_path.iterdir()) == [".requests-2.jsonl", "requests-1.jsonl"]
    assert rows_in(tmp_path) == [{"whole": 1}]


def test_a_folder_that_cannot_be_written_to_is_told_of_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="choose another folder"), Samples(tmp_path / "file" / "x", 1.0, MIB):
        pass


def test_a_disk_that_fails_ends_the_sampling_and_nothing_else(tmp_path, capsys):
    folder = tmp_path / "samples"
    with Samples(folder, 1.0, MIB) as samples:
        folder.rmdir()
        for _ in range(100):
            samples.take(exchange({"messages": [QUESTION]}, ANSWER), "3")
    assert "requests are not sampled any more" in capsys.readouterr().out
