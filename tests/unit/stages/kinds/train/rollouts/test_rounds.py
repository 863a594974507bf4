"""The prompts of a sampling round depend on seed and training step alone; a saved round is read back exactly.

Completions are asked for and checked by one function, for every method that samples.
"""

import ast
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stages.core.errors import ServerError
from stages.kinds.train.methods.grpo import GrpoConfig
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.kinds.train.rollouts import ahead
from stages.kinds.train.rollouts.ahead import SamplingThread
from stages.kinds.train.rollouts.rounds import (
    Completion,
    Group,
    PromptRequest,
    Round,
    RoundPlan,
    sample_completions,
)
from stages.kinds.train.rollouts.server import RolloutServer
from stages.rollouts.asking import Answer, Request, request_seed

ROOT = Path(__file__).parents[6]
PATIENCE_S = 60.0


def plan(num_prompts: int = 20, seed: int = 0, **options: object) -> RoundPlan:
    return RoundPlan((num_prompts,), 6, GrpoConfig.model_validate(options), seed)


def test_an_epoch_asks_every_prompt_once_and_a_resumed_run_the_same_again() -> None:
    one = plan(num_prompts=18, steps_per_generation=2, num_iterations=3)
    assert one.steps_per_round == 6
    rounds = [one.prompts(first_step) for first_step in (1, 7, 13)]
    assert sorted(prompt for asked in rounds for prompt in asked) == list(range(18))
    assert plan(num_prompts=18, steps_per_generation=2, num_iterations=3).prompts(7) == rounds[1]
    assert plan(num_prompts=18, seed=1, steps_per_generation=2, num_iterations=3).prompts(7) != rounds[1]


def test_the_steps_of_a_round_learn_from_its_parts_in_turn() -> None:
    one = plan(steps_per_generation=2, num_iterations=2)
    assert [one.part(step) for step in range(1, 9)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [one.staleness(step) for step in range(1, 9)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_round_is_sampled_by_weights_that_are_exactly_the_lag_behind() -> None:
    """Whatever an attempt begins with, every round is started once, when the weights of the plan are at hand."""
    assert plan().started_at(4, 9, begins=False) == range(4, 5), "without lag, the round that is learned next"
    for lag, begin in ((1, 1), (2, 1), (2, 7)):
        one = plan(num_iterations=2, asynchronous={"lag": lag})
        starts = {step: list(one.started_at(step, 11, begins=step == begin)) for step in range(begin, 12, 2)}
        assert sorted(first for due in starts.values() for first in due) == list(range(begin, 12, 2))
        assert starts[begin] == list(range(begin, min(begin + 2 * lag, 11) + 1, 2))
        for step in range(begin + 2, 12, 2):
            assert all(one.weights_step(first) == step - 1 == first - 1 - 2 * lag for first in starts[step])
    assert [plan(asynchronous={"lag": 2}).weights_step(first) for first in (1, 2, 3, 4)] == [0, 0, 0, 1]


def test_rounds_are_sampled_in_turn_beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampling thread works while the trainer does; what fails is raised by the wait, what waits is given back."""
    now_s = [0.0]  # a clock of the test's, as a busy machine takes any time between two lines
    monkeypatch.setattr(ahead, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    sampled: list[int] = []
    has_begun, may_go_on, thread = threading.Event(), threading.Event(), SamplingThread()

    def sample(first_step: int) -> None:
        has_begun.set()
        assert may_go_on.wait(PATIENCE_S)
        sampled.append(first_step)
        if first_step == 5:
            raise ServerError("gone")

    def let_go_on() -> None:
        while not thread._is_waited_for._runs:
            time.sleep(0.01)
        now_s[0] += 5.0
        may_go_on.set()

    thread.start(1, partial(sample, 1), sampled.clear)
    thread.start(3, partial(sample, 3), sampled.clear)
    assert has_begun.wait(PATIENCE_S)
    now_s[0] += 2.0
    assert thread.idle_shares() == {"trainer_idle_share": 0.0, "sampler_idle_share": 0.0}, "it has not waited yet"
    now_s[0] += 1.0
    other = threading.Thread(target=let_go_on)
    other.start()
    thread.wait_for(1)
    thread.wait_for(1)  # a round of an earlier attempt needs no wait
    thread.wait_for_all()
    other.join()
    assert sampled == [1, 3]
    assert thread.idle_shares() == {"trainer_idle_share": pytest.approx(5 / 6), "sampler_idle_share": 0.0}
    now_s[0] += 4.0
    assert thread.idle_shares() == {"trainer_idle_share": 0.0, "sampler_idle_share": 1.0}
    thread.start(5, partial(sample, 5), sampled.clear)
    with pytest.raises(ServerError, match="gone"):
        thread.wait_for(5)
    may_go_on.clear()

    def given_back() -> None:
        sampled.append(-9)
        may_go_on.set()  # not before: the round of step 9 would begin

    thread.start(7, partial(sample, 7), sampled.clear)
    thread.start(9, partial(sample, 9), given_back)
    while not thread._rounds[7][0].running():
        time.sleep(0.01)
    thread.close()
    assert sampled == [1, 3, 5, -9, 7]


def test_prompts_that_are_drawn_again_are_others_with_seeds_of_their_own() -> None:
    one = plan()
    assert one.others(1, 1, [3]) == one.others(1, 1, [3])
    assert len({tuple(one.others(step, draw, [4])) for step in (1, 2) for draw in (1, 2)}) == 4
    assert len(one.others(1, 1, [30])) == 30, "more than there are prompts"
    seeds = [request_seed(one.seed, step, draw, place) for step in (1, 2) for draw in (0, 1) for place in range(6)]
    assert len(set(seeds)) == len(seeds)


def test_a_round_comes_back_from_its_file(tmp_path: Path) -> None:
    same = Completion([5, 2], [-0.5, -1e-7], "7", False, {"right": 0.0}, 0.0)
    better = Completion([6], [-3.25], "8\n", True, {"right": 1.0}, 1.0)
    found = Round(7, [Group(3, [same, same]), Group(1, [same, better])], {"generate_s": 0.5})
    found.write(tmp_path / "rollouts" / "step-7.json")
    assert Round.read(tmp_path / "rollouts" / "step-7.json") == found
    assert [group.has_signal for group in found.groups] == [False, True]
    assert found.completions == [same, same, same, better]


@pytest.mark.parametrize("count", [1, 6])
def test_no_prompt_is_drawn_twice_at_once_while_there_are_others(count: int) -> None:
    assert len(set(plan().others(3, 1, [count]))) == count


class Answering:
    """Fake sampling server that answers the last request first, and each request's last completion first."""

    def __init__(self, most_choices: int = 2, **changed: Any) -> None:
        self.requests: list[Request] = []
        self._most_choices = most_choices
        self._changed = changed

    def ask(self, requests: Iterable[tuple[int, Request]], keep: Callable[[int, Request, Answer], None]) -> None:
        for number, request in reversed(list(requests)):
            self.requests.insert(0, request)
            choices = [
                {
                    "index": index,
                    "text": f"{request['prompt']}.{index}",
                    "token_ids": [index, 7],
                    "logprobs": {"token_logprobs": [-0.5, -0.25]},
                    "finish_reason": "length" if index else "stop",
                    **self._changed,
                }
                for index in reversed(range(request["n"]))
            ]
            keep(number, request, Answer.model_validate({"choices": choices[: self._most_choices]}))


def sampled(server: Answering) -> list[list[Completion]]:
    asked = [PromptRequest([1, 2], 11, 4), PromptRequest([3], 12, 5)]
    options = SamplingOptions(temperature=0.5, top_p=0.9, stop=("\n",))
    return sample_completions(cast(RolloutServer, server), options, asked, 2)


def test_completions_come_in_the_order_of_prompts_and_samples() -> None:
    server = Answering()
    first, second = sampled(server)
    assert [one.text for one in (*first, *second)] == ["[1, 2].0", "[1, 2].1", "[3].0", "[3].1"]
    assert first == [
        Completion([0, 7], [-0.5, -0.25], "[1, 2].0", False),
        Completion([1, 7], [-0.5, -0.25], "[1, 2].1", True),
    ]
    fixed = {"n": 2, "temperature": 0.5, "top_p": 0.9, "stop": ["\n"], "logprobs": 0, "return_token_ids": True}
    fixed |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    own = [{"prompt": [1, 2], "seed": 11, "max_tokens": 4}, {"prompt": [3], "seed": 12, "max_tokens": 5}]
    assert server.requests == [{**fixed, **one} for one in own]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"most_choices": 1}, "1 completions, where 2 were asked for"),
        ({"text": None}, "has no text"),
        ({"token_ids": [1]}, "1 tokens and 2 log-probabilities"),
        ({"token_ids": None}, "no tokens and 2 log-probabilities"),
        ({"logprobs": None}, "no log-probabilities"),
    ],
)
def test_an_answer_without_what_a_loss_needs_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        sampled(Answering(**changed))


def test_completions_are_asked_for_in_one_place() -> None:
    """Only `sample_completions` reads what a server sampled, so that every method that samples goes through it."""
    readers = {
        file.name
        for file in (ROOT / "stages" / "kinds" / "train").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("sampled", "finish_reason")
    }
    assert readers == {"rounds.py"}
