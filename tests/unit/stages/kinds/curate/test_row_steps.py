"""Steps of the curate stage: filters by pattern, personal data and quality, samples, and held-out rows."""

import json
import random

import pytest
from pydantic import ValidationError

from stages.core.errors import DataError
from stages.kinds.curate import row_steps
from stages.kinds.curate.config import CurateConfig
from tests.planted_rows import near_duplicate, planted_duplicates, text
from tests.unit.stages.kinds.curate.curating import curate, lines

PERSONAL = {
    "Write to jane.doe+x@mail.example.co.uk.": "Write to [EMAIL].",
    "请发邮件到abc@x.com谢谢": "请发邮件到[EMAIL]谢谢",
    "메일은 abc@x.com으로": "메일은 [EMAIL]으로",
    "taro@例え.jp и почта@пример.рф": "[EMAIL] и [EMAIL]",
    "电话+8613812345678请，服务器192.168.0.17的": "电话[PHONE]请，服务器[IP_ADDRESS]的",
    "账号DE89370400440532013000请": "账号[IBAN]请",
    "Call 1-800-555-0199.": "Call [PHONE].",
    "From 192.168.0.17: or 2001:db8::8a2e:370:7334, ok": "From [IP_ADDRESS]: or [IP_ADDRESS], ok",
    "Pay DE89 3704 0044 0532 0130 00 NOW": "Pay [IBAN] NOW",
    "Pay BE68 5390 0754 7034 THIS WEEK or GB82WEST12345698765432.": "Pay [IBAN] THIS WEEK or [IBAN].",
    "Card 4111 1111 1111 1111, or 5500-0000-0000-0004": "Card [CREDIT_CARD], or [CREDIT_CARD]",
    "Call +49 30 123456-78 or (555) 123-4567 or 555-123-4567!": "Call [PHONE] or [PHONE] or [PHONE]!",
}
NOT_PERSONAL = (
    "On 2024-01-02 at 12:30:15, version 1.2.3 of std::vector @home, 3 + 4 = 7, a@b",
    "Card 4111 1111 1111 1112, DE89 3704 0045 0532 0131 00, 999.1.1.1, 1234567890123456789012345",
)
ALL = ["email", "ip_address", "iban", "credit_card", "phone"]


@pytest.mark.parametrize(("before", "after"), PERSONAL.items())
def test_personal_data_are_written_over_in_every_text_of_a_row(tmp_path, before, after):
    found = curate(tmp_path, [{"text": "x"}, {"text": before, "meta": {"more": [before]}}], redact=ALL)
    assert found.rows == [{"text": "x"}, {"text": after, "meta": {"more": [after]}}]
    counts = {name: value for name, value in found.result.metrics.items() if name.startswith("redacted")}
    assert counts == {f"redacted_{kind}": 2 * after.count(kind.upper()) for kind in ALL if kind.upper() in after}


@pytest.mark.parametrize("text", NOT_PERSONAL)
def test_what_only_looks_like_personal_data_stays(tmp_path, text):
    assert curate(tmp_path, [{"text": text}], redact=ALL).rows == [{"text": text}]


def test_only_the_named_kinds_are_written_over_and_copies_are_found_afterwards(tmp_path):
    rows = [{"text": f"I am {name}@example.com at 10.0.0.1"} for name in ("ann", "bob")]
    found = curate(tmp_path, rows, redact=["email"], exact_duplicates=True)
    assert found.rows == [{"text": "I am [EMAIL] at 10.0.0.1"}]


def test_a_pair_that_differs_in_personal_data_alone_is_left_out(tmp_path):
    pair = {"prompt": "Who?", "chosen": " a@example.com", "rejected": " b@example.com"}
    other = {"prompt": "Who?", "chosen": " Me.", "rejected": " You."}
    found = curate(tmp_path, [pair, other], redact=["email"])
    assert found.rows == [other]
    assert "once personal data are written over" in found.dropped[0]["reason"]


def test_patterns_leave_out_rows_and_say_what_was_found(tmp_path):
    rows = [{"prompt": "Why?", "completion": f" {answer}"} for answer in ("As an AI, no", "Because of it.", "Hm")]
    found = curate(tmp_path, rows, patterns={"exclude": ["(?i)as an ai"], "require": [r"\.$"]})
    assert found.rows == rows[1:2]
    assert [row["reason"] for row in found.dropped] == [
        "holds 'As an AI', which the pattern '(?i)as an ai' excludes",
        r"holds nothing like '\\.$', which is required",
    ]


def test_a_search_that_does_not_end_names_pattern_and_row(tmp_path, monkeypatch):
    monkeypatch.setattr(row_steps, "SEARCH_TIMEOUT_S", 0.2)
    with pytest.raises(DataError, match=r"`patterns`: mine train.jsonl:1 has 41 characters, .* takes over 0.2 s"):
        curate(tmp_path, [{"text": "a" * 40 + "!"}], patterns={"exclude": ["(a|aa)+$"]})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"patterns": {}}, "names no pattern"),
        ({"patterns": {"exclude": ["(a"]}}, "is no regular expression: missing"),
        ({"redact": ["names"]}, "Input should be 'email'"),
        ({"sample": {}}, "names both or neither"),
        ({"sample": {"rows": 0}}, "greater than 0"),
        ({"sample": {"fraction": 1.5}}, "less than 1"),
        ({"held_out": {"fraction": 1.0}}, "less than 1"),
        ({"quality": {"rewards": {"a": {"type": "exact_match"}}, "above": 0}}, "name its column in `reference`"),
        ({"quality": {"rewards": {"a": {"type": "length", "max_tokens": 9}}, "above": 0}}, "counts tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_recipe(fields, expected):
    with pytest.raises(ValidationError, match=expected):
        CurateConfig.model_validate({"kind": "curate", "datasets": ["mine"], **fields})


def test_quality_keeps_rows_whose_answer_the_rewards_praise(tmp_path):
    answers = {"<answer>4</answer>": "4", "4": "4", "<answer>5</answer>": "4"}
    rows = [
        {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": said}], "right": right}
        for said, right in answers.items()
    ]
    rewards = {"form": {"type": "regex", "pattern": "<answer>"}, "right": {"type": "number"}}
    found = curate(tmp_path, rows, quality={"rewards": rewards, "above": 1, "reference": "right"})
    assert found.rows == rows[:1]
    assert [row["reason"] for row in found.dropped] == ["has the reward 1, not above 1"] * 2


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "chosen": " b", "rejected": " c"}, "mine train.jsonl:1 is a pair of two answers"),
        ({"prompt": "a"}, "is a prompt alone"),
        ({"prompt": "a", "completion": " b"}, "has nothing in `right`"),
    ],
)
def test_rows_that_quality_cannot_judge_are_named(tmp_path, row, expected):
    quality = {"rewards": {"right": {"type": "number"}}, "above": 0, "reference": "right"}
    with pytest.raises(DataError, match=expected):
        curate(tmp_path, [row], quality=quality)


def test_a_sample_is_the_same_whatever_the_order_and_another_with_another_seed(tmp_path):
    rows = [{"text": f"Row {number}"} for number in range(300)]
    draw = {"sample": {"rows": 50}}
    one = curate(tmp_path / "a", rows, **draw)
    other = curate(tmp_path / "b", rows[::-1], **draw)
    third = curate(tmp_path / "c", rows, **draw, seed=1)
    assert len(one.rows) == 50
    assert [row for row in rows if row in one.rows] == one.rows == other.rows[::-1]
    assert one.rows != third.rows
    share = curate(tmp_path / "d", rows, sample={"fraction": 0.25})
    assert 0.15 < len(share.rows) / 300 < 0.35


def test_near_duplicates_are_all_held_out_or_all_trained_on(tmp_path):
    draw = random.Random(3)
    planted = planted_duplicates(400)
    chain = [text(draw)]
    for _ in range(8):  # each like the one before it, the last not like the first
        chain.append(near_duplicate(draw, chain[-1], 0))
    rows = [{"text": one} for one in (*planted.texts, *chain)]
    draw.shuffle(rows)
    found = curate(tmp_path, rows, held_out={"fraction": 0.3})
    held_out = {row["text"] for row in lines(found.folder / "data" / "validation.jsonl")}
    trained_on = {row["text"] for row in found.rows}
    assert held_out | trained_on == {row["text"] for row in rows}
    assert not held_out & trained_on
    assert 0.2 < len(held_out) / len(rows) < 0.4
    for copy, original in planted.copies.items():
        assert (planted.texts[copy] in held_out) == (planted.texts[original] in held_out)
    assert len({one in held_out for one in chain}) == 1
    assert found.result.metrics["num_held_out"] == len(held_out)


def test_held_out_rows_that_would_be_none_or_all_are_named(tmp_path):
    rows = [{"text": "The very same words of a row"}] * 2
    with pytest.raises(DataError, match=r"`held_out`: a fraction of 0.001 of 1 groups .* no row to be held out"):
        curate(tmp_path, rows, held_out={"fraction": 0.001})


def test_a_killed_curation_begins_again_and_gives_the_same(tmp_path):
    rows = [{"text": f"Row {number % 9} of nine rows in all"} for number in range(20)]
    whole = curate(tmp_path / "a", rows, near_duplicates={})
    left = tmp_path / "b" / "work" / "scratch" / "rows"
    left.mkdir(parents=True)
    (left / "rows.jsonl").write_text(json.dumps(rows[0])[:10])
    again = curate(tmp_path / "b", rows, near_duplicates={})
    assert again.rows == whole.rows
