"""Rewards by a judge model, from a real OpenAI-compatible server: scores, cached answers and the cost limit."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stages.core.errors import DataError, LifecycleError, RecipeError, ServerError, TransientError
from stages.data.messages import PlainText
from stages.remote import http
from stages.rewards.judge import JudgeClient, JudgeReward
from stages.rewards.judging import judging
from stages.rewards.reward import Completion, RewardContext
from tests.judge_server import KEY, MODEL, Judge, judge_server
from tests.lying_server import head, lying_server, whole


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """Provide the server of a judge model that rates an answer by its length."""
    monkeypatch.setenv("CRITIC_KEY", KEY)
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
    with judge_server() as judge:
        yield judge


def completion(text: str, reference: str | None = None) -> Completion:
    return Completion("Why?", text, 1, reference, {}, PlainText("Why?", ""))


def judged(server: Judge, kept: Path, *completions: Completion, **config: Any) -> list[float]:
    reward = JudgeReward.model_validate({"type": "judge", **SERVER, "url": server.url, **config})
    context = RewardContext({}, kept, lambda message: None)
    with judging({"liked": reward}, context) as judge:
        return [one.total for one in judge([(f"completion {place}", one) for place, one in enumerate(completions)])]


SERVER = {"url": "http://127.0.0.1:9/v1", "served_model": MODEL, "key_variable": "CRITIC_KEY"}


def test_ratings_are_in_order_and_every_answer_is_kept_without_the_key(server: Judge, tmp_path: Path) -> None:
    texts = ["x" * size for size in (1, 7, 3, 10, 2, 2)]
    assert judged(server, tmp_path / "kept", *map(completion, texts)) == [1, 7, 3, 10, 2, 2]
    lines = [json.loads(line) for line in (tmp_path / "kept" / "liked.jsonl").read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == [1, 2, 3, 7, 10]
    assert all("Why?" in line["messages"][0]["content"] and line["answer"].startswith("Hm.") for line in lines)
    assert KEY not in (tmp_path / "kept" / "liked.jsonl").read_text()
    assert all(asked["max_tokens"] == 512 and asked["temperature"] == 0 for asked in server.asked)


def test_what_was_answered_before_a_kill_is_not_paid_for_again(server: Judge, tmp_path: Path) -> None:
    texts = [completion("x" * size) for size in range(1, 6)]
    whole = judged(server, tmp_path, *texts)
    lines = (tmp_path / "liked.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "liked.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:9])  # torn within a line
    server.asked.clear()
    assert judged(server, tmp_path, *texts) == whole
    assert len(server.asked) == 1 + 2, "the trial, and what was missing"


@pytest.mark.parametrize(
    ("preferred", "expected"), [("mine", 1), ("theirs", 0), ("first", 0.5), ("equal", 0.5), ("mine when first", 0.75)]
)
def test_compared_with_the_reference_in_both_orders(
    server: Judge, tmp_path: Path, preferred: str, expected: float
) -> None:
    def says(question: str) -> str:
        mine_first = question.index("mine") < question.index("theirs") if "mine" in question else True
        better = {"mine": "AB"[not mine_first], "theirs": "AB"[mine_first], "first": "A", "equal": "equal"}
        better["mine when first"] = "A" if mine_first else "equal"
        return f"Answer A is longer.\n**Better:** {better[preferred]}"

    server.says = says
    assert judged(server, tmp_path, completion("mine", "theirs"), compare=True) == [expected]
    assert len(server.asked) == 4


def test_a_template_of_ones_own(server: Judge, tmp_path: Path) -> None:
    server.says = lambda question: "Rating: 2" if question == "Why? x {is} y, 0 to 5" else "Rating: 5"
    own = {"template": "{prompt} {completion} {is} {reference}, {least} to {largest}", "least": 0, "largest": 5}
    with pytest.raises(ValidationError, match="`template` has completion, is, "):
        judged(server, tmp_path, **own)
    own["template"] = "{prompt} {completion} {{is}} {reference}, {least} to {largest}".replace("{{is}}", "{IS}")
    server.says = lambda question: "Rating: 2" if question == "Why? x {IS} y, 0 to 5" else "Rating: 5"
    assert judged(server, tmp_path, completion("x", "y"), completion("x", "z"), **own) == [2, 5]


def test_a_judge_that_answers_prose_is_told_so_and_then_named_with_the_completion(
    server: Judge, tmp_path: Path
) -> None:
    server.says = lambda question: "Rating: 4" if "Write that line alone" in question else "It is very good."
    assert judged(server, tmp_path, completion("x")) == [4]
    server.says = lambda question: "Rating: 4" if "What is 1 + 2?" in question else "Rating: 11, it is so good."
    with pytest.raises(DataError, match=r"completion 0: the reward liked: critic-1 at .* answers with prose, 3 times "):
        judged(server, tmp_path, completion("y"))


def test_a_judge_of_prose_is_found_before_there_is_anything_to_judge(server: Judge, tmp_path: Path) -> None:
    server.says = lambda question: "It is very good."
    with pytest.raises(
        DataError, match=r"the reward liked: critic-1 .*expected a line \"Rating: \" and a number from 1"
    ):
        judged(server, tmp_path)
    assert not (tmp_path / "liked.jsonl").exists()


@pytest.mark.parametrize(
    ("config", "error", "expected"),
    [
        ({"url": SERVER["url"]}, TransientError, "asking the judge at http://127.0.0.1:9/v1: the connection failed"),
        ({"key_variable": "NO_SUCH_KEY"}, RecipeError, "has no NO_SUCH_KEY, which `key_variable` names"),
        ({"key_variable": None}, ServerError, "answered 401"),
        ({"served_model": "critic-2"}, ServerError, "answered 404: .*not with Bearer \\*\\*\\*"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_found_before_there_is_anything_to_judge(
    server: Judge, tmp_path: Path, config: dict[str, Any], error: type[LifecycleError], expected: str
) -> None:
    with pytest.raises(error, match=expected) as caught:
        judged(server, tmp_path, **config)
    assert KEY not in str(caught.value)


def test_a_busy_judge_is_asked_again(server: Judge, tmp_path: Path) -> None:
    server.statuses = [503, 429, 500]
    assert judged(server, tmp_path, completion("x"), completion("xx")) == [1, 2]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": None}])
def test_a_judge_that_counts_no_tokens_judges_all_the_same(
    server: Judge, tmp_path: Path, usage: dict[str, Any] | None
) -> None:
    server.usage = usage
    assert judged(server, tmp_path, completion("xx")) == [2]
    assert json.loads((tmp_path / "liked.jsonl").read_text())["tokens"] == {"prompt": 0, "completion": 0}


def chat(content: str, usage: str = '{"prompt_tokens": 1, "completion_tokens": 1}') -> bytes:
    return f'{{"choices": [{{"message": {{"content": {json.dumps(content)}}}}}], "usage": {usage}}}'.encode()


@pytest.mark.parametrize(
    ("sent", "error", "message"),
    [
        (head() + b"x" * (4 * 2**20), ServerError, "answered with more than"),
        (whole(gzip.compress(bytes(50 * 2**20)), Content_Encoding="gzip"), ServerError, "answered with more than"),
        (whole(b"no gzip", Content_Encoding="gzip"), ServerError, "broken gzip"),
        (whole(chat("Rating: 4", '{"prompt_tokens": Infinity}')), ServerError, "something else than JSON"),
        (whole(chat("Rating: 4", '{"prompt_tokens": 1e999}')), ServerError, r"usage\.prompt_tokens"),
        (whole(chat("Rating: 4", '{"prompt_tokens": -1}')), ServerError, r"usage\.prompt_tokens"),
        (whole(b"[]"), ServerError, "JSON of another form"),
        (whole(b"{}"), ServerError, "'choices': Field required"),
        (whole(b'{"choices": []}'), ServerError, "'choices': List should have at least 1 item"),
        (whole(b"<html>"), ServerError, "something else than JSON .*: '<html>'"),
        (whole(b"", "307 Moved", Location="http://127.0.0.1:9/v1"), ServerError, "answered 307, a redirect to"),
        (b"\xff" * 999, TransientError, "the connection failed"),
        (whole(b"", "503 Busy", Retry_After="²"), TransientError, "the server answered 503"),
        (whole(b"", "503 Busy", Retry_After="9" * 400), TransientError, "the server answered 503"),
    ],
)
def test_a_judge_that_lies_is_named_before_there_is_anything_to_judge(
    server: Judge, tmp_path: Path, sent: bytes, error: type[LifecycleError], message: str
) -> None:
    with lying_server(lambda send, _: send(sent)) as liar, pytest.raises(error, match=message) as caught:
        judged(replace(server, url=f"{liar.url}/v1"), tmp_path, completion("x"))
    assert f"the judge at {liar.url}/v1" in str(caught.value)


def test_a_judge_that_dribbles_is_given_up_in_time(server: Judge, tmp_path: Path) -> None:
    def answer(send: Callable[[bytes], None], _: bytes) -> None:
        send(head())
        while True:
            send(b" ")
            time.sleep(0.01)

    with lying_server(answer) as liar, pytest.raises(TransientError, match=r"no whole answer within 0\.1 s"):
        judged(replace(server, url=f"{liar.url}/v1"), tmp_path, completion("x"), timeout_s=0.1)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Better: A", 1),
        ("Good.\n**Better:** B", 0),
        ("**Better: Equal**", 0.5),
        ("> better: b", 0),
        ('"Better: A".', 1),
        ("Better: Answer B", 0),
        ("Better:\n\n**A**", 1),
        ("Better: B. A is wrong.", 0),
        ("Better: A (slightly)", 1),
        ("Better: A\nNo, on second thought:\nBetter: B", 0),
        ("So my verdict is Better: A.", 1),
        ("更好的是 Better：B", 0),
        ("Answer B is better. A is wrong.", None),
        ("Answer B is better - A is wrong.", None),
        ("Answer B is better (A is wrong).", None),
        ("B is better\nA is worse", None),
        ("Which answer is better: A or B? Hard to say.", None),
        ("Better: A or B", None),
        ("Better: a matter of taste", None),
        ("Better: A/B", None),
        ("", None),
    ],
)
def test_the_verdict_of_a_comparison_is_the_line_that_was_asked_for(
    server: Judge, tmp_path: Path, answer: str, score: float | None
) -> None:
    config = JudgeReward.model_validate({"type": "judge", **SERVER, "compare": True})
    with JudgeClient.opened(config, tmp_path / "kept") as judge:
        assert judge.read_number(answer) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Rating: 7", 7),
        ("**Rating:** -5", -5),
        ("Rating: −5", -5),
        ("Rating (-9 to 9): 8", 8),
        ("Rating: 7.5/10", 7.5),
        ("Rating: 3\nRating: 4", 4),
        ("It has my highest rating. 3 reasons:", None),
        ("Rating: 11", None),
        ("Rating: " + "9" * 400, None),
    ],
)
def test_the_rating_is_the_number_behind_its_colon(
    server: Judge, tmp_path: Path, answer: str, score: float | None
) -> None:
    config = JudgeReward.model_validate({"type": "judge", **SERVER, "least": -10})
    with JudgeClient.opened(config, tmp_path / "kept") as judge:
        assert judge.read_number(answer) == score


def test_more_requests_than_the_recipe_says_are_refused_before_the_first(server: Judge, tmp_path: Path) -> None:
    texts = [completion("x" * size) for size in range(1, 6)]
    with pytest.raises(DataError, match=r"judging 5 completions takes 5 requests .* `max_requests` is 5: raise it"):
        judged(server, tmp_path, *texts, max_requests=5)
    assert len(server.asked) == 1, "the trial"
    assert judged(server, tmp_path, *texts, max_requests=6) == [1, 2, 3, 4, 5]
    server.says = lambda question: "Rating: 4" if "What is 1 + 2?" in question else "It is very good."
    with pytest.raises(DataError, match="was asked `max_requests` times, 2; raise it"):
        judged(server, tmp_path / "new", completion("x"), max_requests=2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://user:pass@x/v1"}, "url"),
        ({"least": 1, "largest": 1}, "`least` is 1; expected less than"),
        ({"template": "How good is {prompt}?"}, "`template` has prompt in braces; expected completion"),
        ({"template": "{completion}", "compare": True}, "expected first, second"),
    ],
)
def test_what_a_recipe_cannot_mean(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        JudgeReward.model_validate({"type": "judge", **SERVER, **config})


def test_a_right_answer_is_needed_where_it_is_compared_with() -> None:
    judge = JudgeReward.model_validate({"type": "judge", **SERVER, "compare": True})
    assert judge.row_problem(None, {}) == "has no right answer"
    assert judge.row_problem("3", {}) is None
    assert JudgeReward.model_validate({"type": "judge", **SERVER}).row_problem(None, {}) is None
