"""Prompts and right answers are extracted from rows of every format."""

from typing import Any

import pytest

from stages.core.errors import DataError
from stages.data.any_rows import PromptReader
from stages.data.messages import Conversation, PlainText, RowError

ASKED = {"role": "user", "content": "What is 1 + 2?"}
ANSWERED = {"role": "assistant", "content": "3"}

ROWS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": [ASKED], "answer": 3}, "3"),
    ({"prompt": [ASKED], "solution": "It is 3."}, "It is 3."),
    ({"prompt": [ASKED]}, None),
    ({"messages": [ASKED], "ground_truth": "3"}, "3"),
    ({"messages": [ASKED, ANSWERED]}, "3"),
    ({"conversations": [{"from": "human", "value": "What is 1 + 2?"}, {"from": "gpt", "value": "3"}]}, "3"),
    ({"prompt": [ASKED], "completion": [ANSWERED]}, "3"),
    ({"instruction": "What is 1 + 2?", "output": "3"}, "3"),
    ({"messages": [ASKED, ANSWERED], "label": True}, "3"),
    ({"messages": [ASKED, ANSWERED], "label": False}, None),
    ({"prompt": [ASKED], "completion": [ANSWERED], "label": "false"}, None),
    ({"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [{**ANSWERED, "content": "4"}]}, "3"),
]


@pytest.mark.parametrize(("row", "reference"), ROWS)
def test_a_conversation_is_asked_up_to_its_last_answer(row: dict[str, Any], reference: str | None) -> None:
    found = PromptReader(None).read(row)
    assert isinstance(found.document, Conversation)
    assert found.document.messages == [ASKED]
    assert found.reference == reference


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 2 =", "completion": "3"},
        {"prompt": "1 + 2 =", "answer": "3"},
        {"prompt": "1 + 2 =", "chosen": "3", "rejected": "4"},
    ],
)
def test_plain_text_is_asked_as_it_is(row: dict[str, Any]) -> None:
    found = PromptReader(None).read(row)
    assert found.document == PlainText("1 + 2 =", "")
    assert found.reference == "3"


def test_earlier_turns_are_asked_with_the_last_question() -> None:
    messages = [ASKED, ANSWERED, {"role": "user", "content": "And 2 + 2?"}]
    for row in ({"messages": [*messages, {"role": "assistant", "content": "4"}]}, {"messages": messages}):
        document = PromptReader(None).read(row).document
        assert isinstance(document, Conversation)
        assert document.messages == messages


def test_a_recipe_may_name_the_column_of_the_right_answer() -> None:
    reader = PromptReader("label")
    assert reader.read({"messages": [ASKED, ANSWERED], "label": 7}).reference == "7"
    with pytest.raises(RowError, match="has nothing in `label`"):
        reader.read({"messages": [ASKED, ANSWERED]})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("text", "is a string; expected an object"),
        ({"prompt": []}, "empty list in `prompt`"),
        ({"prompt": [ANSWERED]}, "has `assistant` in message 1 where `user` was expected"),
        ({"prompt": [ASKED, ASKED]}, "has `user` in message 2"),
        ({"prompt": " "}, "has an empty `prompt`"),
        ({"text": "once upon a time"}, "has text, but no prompt"),
        ({"prompt": [ASKED], "answer": [3]}, "has a list as its right answer"),
        ({"prompt": [ASKED], "images": ["a.png"]}, "expected text alone"),
    ],
)
def test_rows_that_ask_nothing(row: object, expected: str) -> None:
    with pytest.raises(RowError, match=expected):
        PromptReader(None).read(row)


def test_columns_of_no_format_are_listed() -> None:
    with pytest.raises(DataError, match="the first row has the columns `question`"):
        PromptReader(None).read({"question": "1 + 2?"})


def test_what_a_tool_gave_may_be_the_last_that_is_asked() -> None:
    call = {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 1, "b": 2}}'}
    row = {"messages": [ASKED, call, {"role": "tool_response", "content": "3"}], "solution": "3"}
    found = PromptReader(None).read(row)
    assert isinstance(found.document, Conversation)
    assert [message["role"] for message in found.document.messages] == ["user", "assistant", "tool"]
