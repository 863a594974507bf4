"""`lifecycle show STAGE --samples` shows questions, the model's answers or episodes, and the expected answers."""

import json

import pytest

from flows.cli.show import samples_as_text, samples_of
from stages.core.errors import StoreError
from stages.rollouts.episode_table import EPISODES_FILE, round_file, write_episodes
from tests.episodes import episode

GENERATED = {
    "doc_id": 3,
    "arguments": [["What is 1+1?\n", {"until": ["\n"]}]],
    "resps": [["11\x1b[2J"]],
    "target": "2",
    "metrics": ["exact_match"],
    "exact_match": 0.0,
}
CHOSEN = {
    "doc_id": 4,
    "arguments": {"gen_args_0": {"arg_0": "1+1 is", "arg_1": " 2"}, "gen_args_1": {"arg_0": "1+1 is", "arg_1": " 3"}},
    "resps": [[[-0.5, True]], [[-2.0, False]]],
    "target": 0,
    "metrics": ["acc"],
    "acc": 1.0,
}
RATED = {"doc_id": 5, "question": "Why?", "resps": [["Because."]], "target": None, "rating": 0.5}


@pytest.fixture
def artifact(recipe, make_plan, build):
    return build(make_plan(recipe()))["base"]


@pytest.mark.parametrize(
    ("row", "asked", "answered"),
    [(GENERATED, "What is 1+1?", r"11\x1b[2J"), (CHOSEN, "1+1 is", "-0.5"), (RATED, "Why?", "Because.")],
)
def test_a_sample_of_each_harness_is_shown(artifact, row, asked, answered):
    (artifact.folder / "samples").mkdir()
    (artifact.folder / "samples" / "sums.jsonl").write_text(json.dumps(row) + "\n")
    text = samples_as_text(samples_of(artifact))
    assert asked in text and answered in text and "\x1b" not in text
    assert f"sample {row['doc_id']}" in text


@pytest.mark.parametrize("step", [None, 7])
def test_an_episode_is_shown_with_its_turns_and_rewards(artifact, step):
    file = artifact.folder / EPISODES_FILE if step is None else round_file(artifact.folder, step)
    file.parent.mkdir(exist_ok=True)
    write_episodes(file, [episode(step=step, transcript="called\x1b[2J, and said 4")])
    text = samples_as_text(samples_of(artifact))
    assert f"{file}, sample rows.jsonl:3, episode 1: right 1.0, total 0.5" in text
    assert "What is 2 + 2?" in text and r"called\x1b[2J, and said 4" in text and "\x1b" not in text


def test_what_is_no_evaluation_has_none(artifact):
    with pytest.raises(StoreError, match="name a stage of kind evaluate"):
        list(samples_of(artifact))
