"""A training that resumes keeps the completions that earlier attempts recorded."""

import json
from pathlib import Path

from flows.running.workspace import KEPT
from stages.core.contract import StageContext
from stages.data.any_rows import Prompt
from stages.data.files import RowLocation
from stages.data.messages import PlainText
from stages.kinds.train.rollouts.metrics import COMPLETIONS_FILE, RoundSamples
from stages.kinds.train.rollouts.rounds import Completion, Group, Round
from stages.rollouts.prompts import RenderedPrompt

PROMPT = RenderedPrompt(RowLocation("rows.jsonl", 3), Prompt(PlainText("1 + 1 =", ""), "2", {}), "1 + 1 =", [5, 6])


def write(work: Path, first_step: int) -> None:
    """Record the sampled completions of one round, as a training does that resumes at `first_step`."""
    context = StageContext(work, "trained", "0" * 12, {}, {}, work / "cache")
    completions = [
        Completion([7], [-0.1], text, False, {"right": worth}, worth) for text, worth in (("2", 1.0), ("3", 0.0))
    ]
    RoundSamples(context, [PROMPT]).write(Round(first_step, [Group(0, completions)], {}))


def shown(work: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["text"]) for row in map(json.loads, (work / COMPLETIONS_FILE).read_text().splitlines())]


def test_what_an_earlier_attempt_showed_is_there_in_the_next(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with (tmp_path / "scratch" / COMPLETIONS_FILE).open("a") as stream:
        stream.write('{"step": 9, "te')  # torn by a kill
    (tmp_path / COMPLETIONS_FILE).unlink()  # as the flow does between attempts
    assert COMPLETIONS_FILE not in KEPT
    write(tmp_path, 5)
    assert shown(tmp_path) == [(1, "2"), (1, "3"), (5, "2"), (5, "3")]
    (tmp_path / "scratch" / COMPLETIONS_FILE).unlink()  # as when the artifact is committed
    assert len(shown(tmp_path)) == 4


def test_a_round_that_is_sampled_again_after_a_kill_is_shown_once(tmp_path: Path) -> None:
    for first_step in (1, 5, 9):  # a kill after the checkpoint of step 4
        write(tmp_path, first_step)
    write(tmp_path, 5)
    assert [step for step, _ in shown(tmp_path)] == [1, 1, 5, 5]
