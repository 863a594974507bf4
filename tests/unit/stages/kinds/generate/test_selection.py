"""Completions of a generate stage are kept or dropped by their rewards, and written as dataset rows."""

from typing import Any

import pytest
from pydantic import ValidationError

from stages.data.any_rows import Prompt
from stages.data.formats import RowReader
from stages.data.messages import Conversation, PlainText
from stages.kinds.generate.config import GenerateConfig
from stages.kinds.generate.selection import Candidate, Choice, choose
from stages.rewards.judging import Judgement
from stages.rollouts.asking import Sample

CHAT = Conversation([{"role": "user", "content": "What is 1 + 2?"}])
PROMPTS = {"dataset": "problems"}
ROW = {"question": "What is 1 + 2?", "answer": "3", "level": 2}


def chosen(*completions: tuple[str, float], document: Any = CHAT, cut: tuple[int, ...] = (), **config: Any) -> Choice:
    tree = {"kind": "generate", "model": "sft", "prompts": PROMPTS, "rewards": {"own": {"type": "exact_match"}}}
    read = GenerateConfig.model_validate({**tree, "num_samples": len(completions), **config})
    candidates = [
        Candidate(
            Sample(prompt=0, sample=number, seed=0, text=text, num_tokens=1, truncated=number in cut),
            Judgement({"own": total}, total),
        )
        for number, (text, total) in enumerate(completions)
    ]
    return choose(Prompt(document, "3", ROW), candidates, read)


def answers(choice: Choice) -> list[str]:
    return [row["completion"][0]["content"] for row in choice.rows]


def test_all() -> None:
    assert answers(chosen(("3", 1), ("4", 0), keep="all")) == ["3", "4"]


def test_the_best_is_the_first_of_those_with_the_largest_reward() -> None:
    choice = chosen(("4", 0), ("3", 1), ("three", 1), keep="best")
    assert answers(choice) == ["3"]
    assert choice.outcomes == (why := "dropped: another of its prompt is better, or as good", "kept", why)


def test_above_a_bound_is_not_at_it() -> None:
    choice = chosen(("a", 0.5), ("b", 0.6), keep={"above": 0.5})
    assert answers(choice) == ["b"]
    assert choice.outcomes == ("dropped: its reward is not above 0.5", "kept")


def test_pairs_are_the_best_and_the_worst() -> None:
    choice = chosen(("5", 0.5), ("3", 1), ("4", 0), keep="pairs")
    (row,) = choice.rows
    assert row["prompt"] == CHAT.messages
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("3", "4")
    assert choice.outcomes == ("dropped: neither the best nor the worst of its prompt", "chosen", "rejected")


@pytest.mark.parametrize(
    ("worst", "min_gap", "num_pairs"), [(1, None, 0), (0.9, None, 1), (0.5, 0.5, 1), (0.6, 0.5, 0)]
)
def test_pairs_without_a_gap_are_no_pairs(worst: float, min_gap: float | None, num_pairs: int) -> None:
    choice = chosen(("3", 1), ("4", worst), keep="pairs", min_gap=min_gap)
    assert len(choice.rows) == num_pairs
    if not num_pairs:
        assert set(choice.outcomes) == {f"dropped: the best and the worst of its prompt are {1 - worst:g} apart"}


def test_rows_are_kept_whole_whose_prompts_are_solved_sometimes() -> None:
    answered = (("3", 1), ("4", 0), ("3", 1))
    choice = chosen(*answered, keep={"solved": [1, 2]})
    assert choice == Choice((ROW,), ("right", "wrong", "right")), "a repeated answer counts, too"
    for bounds in ([0, 1], [3, 3]):
        assert chosen(*answered, keep={"solved": bounds}).rows == ()
    none = chosen(*answered, keep={"solved": [1, 3], "above": 1})
    assert none.outcomes == ("dropped: 0 of 3 are right, not 1 to 3",) * 3
    for bounds in ([2, 1], [1, 4]):
        with pytest.raises(ValidationError, match=r"expected two rising numbers up to 3"):
            chosen(*answered, keep={"solved": bounds})


def test_what_nobody_should_learn_from() -> None:
    choice = chosen(("3", 1), ("3", 1), (" ", 1), ("3 and so o", 1), keep="all", cut=(3,))
    assert answers(choice) == ["3"]
    assert choice.outcomes == (
        "kept",
        "dropped: it is that of sample 0 again",
        "dropped: it is empty",
        "dropped: it was cut off at max_tokens",
    )


@pytest.mark.parametrize("document", [CHAT, PlainText("1 + 2 =", "")])
@pytest.mark.parametrize(("keep", "rows"), [("best", "examples"), ("pairs", "pairs")])
def test_training_reads_the_rows_and_learns_the_answer_alone(document: Any, keep: str, rows: Any) -> None:
    choice = chosen((" 3", 1), (" 4", 0), document=document, keep=keep)
    reader = RowReader("auto", rows)
    first, *_ = reader.read(choice.rows[0])
    assert reader.unread.warning() is None
    if isinstance(first, PlainText):
        assert (first.prompt, first.completion) == ("1 + 2 =", " 3")
    else:
        assert first.messages[first.num_prompt_messages :] == [{"role": "assistant", "content": " 3"}]


def test_earlier_turns_and_tools_go_along_and_are_not_learned() -> None:
    tools = ({"type": "function", "function": {"name": "add", "description": None, "parameters": None}},)
    said = [*CHAT.messages, {"role": "assistant", "content": "3"}, {"role": "user", "content": "And 2 + 2?"}]
    choice = chosen(("4", 1), document=Conversation(said, tools=tools, variables={"thinking": False}), num_samples=1)
    (document,) = RowReader("auto", "examples").read(choice.rows[0])
    assert isinstance(document, Conversation)
    assert (document.num_prompt_messages, document.tools, document.variables) == (3, tools, {"thinking": False})
