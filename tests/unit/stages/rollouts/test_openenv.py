"""Environments behind a server of the OpenEnv protocol, which may do anything: it ends an episode, and is counted."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer

from stages.core.errors import DataError, TransientError
from stages.data.messages import Conversation, RowError, make_message
from stages.data.tokenizer import DocumentTokenizer
from stages.kinds.train.rollouts.metrics import round_metrics
from stages.kinds.train.rollouts.rounds import Completion, Group, Round
from stages.rollouts.environments.environment import Action, Environment
from stages.rollouts.environments.episodes import Episode, Episodes, EpisodeStart, TurnReader
from stages.rollouts.environments.led import MOST_FAILURES
from stages.rollouts.environments.openenv import OpenEnvEnvironment
from stages.rollouts.environments.registry import AnyEnvironment
from tests.agent_episodes import make_model
from tests.http_server import answering
from tests.openenv_stand_in import ODD, Game, guessing, their_server
from tests.unit.stages.rollouts.test_environments import Scripted

ROW = {"prompt": "A game.", "reset": {"number": 3}}


def environment(url: str, **fields: Any) -> OpenEnvEnvironment:
    tree = {"openenv": url, "action": "guess", "observation": "text", "timeout_s": 5, "num_together": 2, **fields}
    return TypeAdapter(AnyEnvironment).validate_python(tree)


@pytest.fixture(scope="module")
def game() -> Iterator[Game]:
    with guessing() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def play(folder: Path, config: OpenEnvEnvironment, turns: list[str], rows: list[dict[str, Any]]) -> list[Episode]:
    """Play an episode of each row, one at a time, in which the model says `turns` in all."""
    tokenizer, encode = DocumentTokenizer(folder, None, "assistant"), AutoTokenizer.from_pretrained(folder).encode
    question = Conversation([make_message("user", "A game.")])
    reader = TurnReader.proved(tokenizer, encode("<|im_end|>"), config, question)
    model = Scripted([encode(f"{turn}<|im_end|>") for turn in turns])
    starts = [EpisodeStart(question, tokenizer.encode_prompt(question)[1], row, seed) for seed, row in enumerate(rows)]
    with config.opened(Path()) as make:
        return Episodes(config, make, reader, 1000, 64, lambda seed, turn: seed).play(starts, model)


@contextmanager
def begun(config: OpenEnvEnvironment, row: dict[str, Any] | None = None) -> Iterator[Environment]:
    with config.opened(Path()) as make:
        episode = make()
        episode.reset(row or ROW, 5)
        yield episode
        episode.close()


def test_an_episode_is_a_session_of_the_server(game: Game, folder: Path) -> None:
    won, lost = play(folder, environment(game.url, num_together=1, max_turns=2), ["7", "3", "1", "2"], [ROW, ROW])
    assert [message["content"] for message in won.start.prompt.messages] == ["A game.\n\nGuess a digit."]
    assert [(one.reward, one.end, one.num_turns) for one in (won, lost)] == [(1.0, "done", 2), (0.0, "turns", 2)]
    assert [message["content"] for message in won.messages] == ["7", "No, another one.", "3"]
    assert won.metrics["environment_failed"] == lost.metrics["environment_failed"] == 0
    assert game.num_sessions == 0


@pytest.mark.parametrize("guess", [*ODD, "gone"])
def test_what_a_server_does_wrong_ends_the_episode_and_is_counted(game: Game, guess: str) -> None:
    config = environment(game.url)
    with begun(config) as episode:
        assert episode.step(Action("7")).messages == (make_message("user", "No, another one."),)
        step = episode.step(Action(guess))
        assert (step.reward, step.messages) == (0.0, ())
        assert str(step.failure).startswith(f"the environment's server {game.url} ")
        assert episode.metrics == {"environment_failed": 1.0}
    with begun(config) as episode:
        assert episode.step(Action("3")).done, "the next episode goes on"


def test_a_server_that_hangs_is_waited_for_no_longer_than_its_limit(game: Game, folder: Path) -> None:
    began_s = time.monotonic()
    # which holds for each answer, also for those that come on a busy machine
    (episode,) = play(folder, environment(game.url, timeout_s=3), ["hang"], [ROW])
    assert (episode.end, episode.metrics["environment_failed"], Completion.of(episode).rewards) == ("failed", 1.0, {})
    assert time.monotonic() - began_s < 30


def test_a_server_that_always_fails_ends_the_stage(game: Game) -> None:
    with environment(game.url).opened(Path()) as make:
        for number in range(1, MOST_FAILURES + 1):
            episode = make()
            episode.reset(ROW, 5)
            if number < MOST_FAILURES:
                episode.step(Action("an error"))
            else:
                with pytest.raises(
                    DataError, match=r"failed 20 episodes in a row, .* EXECUTION_ERROR: the game is broken"
                ):
                    episode.step(Action("an error"))
            episode.close()


def test_an_action_that_is_none_is_answered_by_the_reason(game: Game) -> None:
    with begun(environment(game.url, action=None, observation=None)) as episode:
        for turn, reason in (
            ("3", "expected a JSON object with the action's fields"),
            ('{"guess": ', "it is no JSON"),
            ('{"gues": "3"}', "['guess']: Field required"),
        ):
            step = episode.step(Action(turn))
            assert reason in str(step.messages[0]["content"]) and step.num_failed == 1 and not step.done
        step = episode.step(Action('{"guess": "7"}'))
        assert json.loads(str(step.messages[0]["content"])) == {"text": "No, another one."}
        assert episode.step(Action('{"guess": "3"}')).done


def test_episodes_of_a_prompt_begin_in_one_world(game: Game) -> None:
    game.resets.clear()
    with environment(game.url).opened(Path()) as make:
        for seed, row in enumerate(
            ({"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}, {"reset": {"seed": 7, "level": 2}})
        ):
            episode = make()
            episode.reset(row, seed)
            episode.close()
    first, again, other, chosen = game.resets
    assert first == again != other and 0 <= first["seed"] < 2**31
    assert chosen == {"seed": 7, "level": 2}
    with pytest.raises(RowError, match="as `reset`; expected an object"):
        environment(game.url).check_row({"reset": 7})


def test_a_server_with_room_for_one_session_is_asked_one_after_another(folder: Path) -> None:
    with guessing(1) as small:
        played = play(folder, environment(small.url, num_together=1), ["3"] * 6, [ROW] * 6)
        assert [one.reward for one in played] == [1.0] * 6
        with pytest.raises(DataError, match="has no room for another session; lower num_together to what it allows"):
            play(folder, environment(small.url, timeout_s=3), ["3", "3"], [ROW, ROW])


def test_an_address_without_such_a_server_is_refused_before_anything_slow_starts() -> None:
    (error,) = environment("http://127.0.0.1:9", timeout_s=2).opening_problems()
    assert isinstance(error, TransientError)
    assert str(error).startswith("the environment's server http://127.0.0.1:9 was not reached: ")
    with answering(lambda _: {}) as url:
        (error,) = environment(url, timeout_s=2).opening_problems()
    assert isinstance(error, DataError) and f"{url} is no server of OpenEnv" in str(error)
    for bad in ("127.0.0.1:8000", "http://me:secret@host", "ftp://host", "http://host/x?y=1", "http:///x"):
        with pytest.raises(ValidationError):
            environment(bad)


def test_an_episode_that_the_environment_failed_is_no_signal() -> None:
    def completion(reward: float, end: str) -> Completion:
        return Completion([1], [-0.5], "x", False, reward=reward, end=end)

    assert Group(0, [completion(1.0, "done"), completion(0.0, "done"), completion(0.0, "failed")]).has_signal
    assert not Group(0, [completion(1.0, "done"), completion(1.0, "done"), completion(0.0, "failed")]).has_signal
    some = [Group(0, [completion(1.0, "done"), completion(0.5, "done"), completion(0.0, "failed")])]
    metrics = round_metrics(Round(1, some, {}))
    assert (metrics["reward"], metrics["reward_spread"]) == (0.75, 0.25), "it is in no mean either"
    assert round_metrics(Round(1, [Group(0, [completion(0.0, "failed")])], {}))["reward"] == 0.0


@pytest.mark.nightly
def test_the_server_of_openenv_itself_is_understood(folder: Path) -> None:
    """`make test` has the same game by a stand-in that speaks the protocol, and misbehaves in more ways."""
    with their_server(2) as url:
        config = environment(url, max_turns=2, num_together=1)
        played = play(folder, config, ["7", "3", "1", "2"], [ROW, ROW])
        assert [(one.reward, one.end, one.num_turns) for one in played] == [(1.0, "done", 2), (0.0, "turns", 2)]
        for guess, has_failed in (("raise", True), ("large", True), ("hang", True), ("nan", False)):
            with begun(environment(url, timeout_s=2)) as episode:
                step = episode.step(Action(guess))
                # what is NaN there comes as null: no reward
                assert (bool(step.failure), step.reward) == (has_failed, 0.0), guess
        with begun(environment(url, action=None, observation=None)) as episode:
            refused = episode.step(Action('{"gues": "3"}')).messages[0]["content"]
            assert "['guess']: Field required" in str(refused)
            assert json.loads(str(episode.step(Action('{"guess": "7"}')).messages[0]["content"])) == {
                "text": "No, another one.",
                "count": 1,
            }
    with their_server(1) as url:
        assert [one.reward for one in play(folder, environment(url, num_together=1), ["3"] * 4, [ROW] * 4)] == [1.0] * 4
        with pytest.raises(DataError, match="has no room for another session"):
            play(folder, environment(url, timeout_s=1), ["3", "3"], [ROW, ROW])
