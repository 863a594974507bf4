"""A training that resumes keeps the completions and the episodes that earlier attempts recorded."""

import json
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet

from flows.running.workspace import KEPT
from stages.core.contract import StageContext
from stages.data.any_rows import Prompt
from stages.data.files import RowLocation
from stages.data.messages import PlainText
from stages.kinds.train.rollouts.metrics import COMPLETIONS_FILE, RoundSamples
from stages.kinds.train.rollouts.rounds import Completion, Group, Round
from stages.rollouts.episode_table import StoredSegment, round_files, shown_episodes
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


CALLED = Completion(
    [7, 8, 9, 2, 1, 4],
    [-0.1, -0.2, 0.0, 0.0, -0.3, -0.4],
    "4",
    truncated=False,
    rewards={"right": 1.0},
    reward=0.5,
    environment_spans=[(2, 4)],
    episode={"turns": 2.0, "calls": 1.0},
    transcript="call 2 4",
    prompt=[5, 6],
    prompt_text="1 + 1 =",
    seed=2**63 + 1,
    end="done",
)
"""Episode of two turns with the environment's answer between."""


def play(work: Path, first_step: int) -> None:
    context = StageContext(work, "trained", "0" * 12, {}, {}, work / "cache")
    RoundSamples(context, [PROMPT]).write(Round(first_step, [Group(0, [CALLED] * 8)], {}))


def test_a_training_keeps_all_episodes_of_all_its_rounds_whole(tmp_path: Path) -> None:
    for first_step in (1, 5, 9, 13):
        play(tmp_path, first_step)
    shutil.rmtree(tmp_path / "episodes")  # as the flow does between attempts
    play(tmp_path, 9)  # killed after step 8's checkpoint
    assert list(round_files(tmp_path)) == [1, 5, 9]
    shutil.rmtree(tmp_path / "scratch")  # as when the artifact is committed
    rows = [row for file in round_files(tmp_path).values() for row in parquet.read_table(file).to_pylist()]
    assert [(row["step"], row["sample"]) for row in rows] == [(step, n) for step in (1, 5, 9) for n in range(8)]
    for row in rows:
        segments = [StoredSegment.model_validate(one) for one in row["segments"]]
        assert [one.author for one in segments] == ["model", "environment", "model"]
        assert [token for one in segments for token in one.token_ids] == CALLED.token_ids
        assert [one.log_probabilities for one in segments] == [
            pytest.approx([-0.1, -0.2]),
            [],
            pytest.approx([-0.3, -0.4]),
        ]
        assert (row["row"], row["reference"], row["num_tokens"]) == (str(PROMPT.place), "2", 4)
        assert (row["reward_right"], row["total"], row["turns"], row["calls"]) == (1.0, 0.5, 2.0, 1.0)
        assert (row["seed"], row["end"], row["prompt_ids"]) == (CALLED.seed, "done", [5, 6])
    shown = list(shown_episodes(tmp_path, 3))
    assert [(one.step, one.sample) for one in shown] == [(1, 0), (1, 1), (1, 2), (9, 0), (9, 1), (9, 2)]
    assert {(one.prompt, one.transcript) for one in shown} == {("1 + 1 =", "call 2 4")}
    assert shown[0].rewards == {"right": 1.0, "total": 0.5}


def test_answers_without_an_environment_are_no_episodes(tmp_path: Path) -> None:
    write(tmp_path, 1)
    assert round_files(tmp_path) == {} and list(shown_episodes(tmp_path, 3)) == []
