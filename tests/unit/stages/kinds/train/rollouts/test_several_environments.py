"""Several environments in one run: prompts by share, turns sampled together, rewards and metrics of each its own.

The server is a script of a model that calls the calculator for a product, and guesses a number in the game.
"""

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from pyarrow import parquet
from pydantic import ValidationError
from transformers import AutoTokenizer

from flows.recipe.recipe import load_stages
from stages.core.contract import StageContext, StageInput
from stages.core.errors import RecipeError
from stages.hubs.builtin import qwen3_tools
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.train.check import rollout_problems
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.rollouts.documents import checked_prompts, turn_readers
from stages.kinds.train.rollouts.metrics import RoundSamples, round_metrics
from stages.kinds.train.rollouts.rounds import Group, Round, RoundPlan, Sampler
from stages.kinds.train.rollouts.server import RolloutServer
from stages.models.facts import ModelFacts
from stages.rewards.judging import judging
from stages.rewards.reward import RewardContext
from stages.rollouts.asking import Answer, Request, request_seed
from stages.rollouts.environments.environment import shared_seeds
from stages.rollouts.environments.episodes import Episodes
from stages.rollouts.episode_table import round_files, shown_episodes
from tests.train_stage import make_config

GAME = """
class Environment:
    def reset(self, row, seed):
        self.number = row["number"]
        return "Guess a digit."

    def step(self, action):
        return "No, another one.", float(action["text"] == self.number), action["text"] == self.number
"""
RIGHT = {"right": {"type": "exact_match"}}
CALCULATOR = {"tools": ["calculator"], "max_turns": 2}


@dataclass
class Server:
    """Server that answers requests for turns by a script, from the prompt and the seed."""

    tokenizer: Any
    asked: list[list[Request]] = field(default_factory=list)

    def ask(self, requests: Iterable[tuple[int, Request]], keep: Callable[[int, Request, Answer], None]) -> None:
        numbered = list(requests)
        self.asked.append([request for _, request in numbered])
        for number, request in numbered:
            prompt, draw = self.tokenizer.decode(request["prompt"]), request["seed"] % 4
            if "digit" in prompt:
                text = str(draw)
            elif given := re.findall(r"<tool_response>\n(.*)\n</tool_response>", prompt):
                text = given[-1] if draw else "0"
            else:
                call = {"name": "calculator", "arguments": {"expression": re.findall(r"is (.*)\?", prompt)[-1]}}
                text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            ids = self.tokenizer.encode(f"{text}<|im_end|>")
            choice = {"text": text, "finish_reason": "stop", "token_ids": ids}
            logprobs = {"logprobs": {"token_logprobs": [-0.5] * len(ids)}}
            keep(number, request, Answer.model_validate({"choices": [{"index": 0, **choice, **logprobs}]}))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    found = {name: folder / name for name in ("base", "problems", "games")}
    (found["base"] / "model").mkdir(parents=True)
    qwen3_tools.make(found["base"] / "model")
    products = [{"prompt": f"What is {n} * 12?", "answer": str(n * 12)} for n in range(11, 21)]
    games = [{"prompt": f"Game {n}.", "number": str(n % 4)} for n in range(7)]
    for name, rows in (("problems", products), ("games", games)):
        (found[name] / "data").mkdir(parents=True)
        (found[name] / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "game.py").write_text(GAME)
    return found


def several(inputs: dict[str, Path], data: dict[str, Any] | None = None, **options: Any) -> TrainConfig:
    """Return a training with twice as many problems as games; `data` and `options` replace fields."""
    game = {"python": str(inputs["base"].parent / "game.py"), "max_turns": 3}
    environments = {
        "sums": {"environment": CALCULATOR, "weight": 2.0},
        "game": {"environment": game, "dataset": "games", "rewards": []},
    }
    block = {"num_generations": 4, "max_completion_length": 40, "environments": environments, "rewards": RIGHT}
    own = {"dataset": "problems", "sequence_length": 256, **(data or {})}
    return make_config("grpo", global_batch_size=24, data=own, grpo={**block, **options})


@dataclass(frozen=True)
class Playing:
    """Sampler of a training's rounds, with its server and options."""

    sampler: Sampler
    server: Server
    context: StageContext


@pytest.fixture
def playing(inputs: dict[str, Path], tmp_path: Path) -> Iterator[Playing]:
    config, model = several(inputs), ModelFacts(inputs["base"] / "model")
    assert config.rollouts
    prompts = checked_prompts(config, inputs, model)
    with ExitStack() as stack:
        players = {
            name: Episodes(
                environment, stack.enter_context(environment.opened(tmp_path / name)), reader, 256, 40, request_seed
            )
            for name, (environment, reader) in turn_readers(config, model, prompts).items()
        }
        judge = stack.enter_context(judging(config.rollouts.rewards, RewardContext(inputs, tmp_path, print)))
        plan = RoundPlan((7, 10), 6, config.rollouts, config.seed, (1.0, 2.0))
        server = Server(AutoTokenizer.from_pretrained(model.folder))
        sampler = Sampler(cast(RolloutServer, server), judge, prompts, config.rollouts, plan, (), players)
        yield Playing(sampler, server, StageContext(tmp_path, "grpo", "0" * 12, inputs, {}, tmp_path))


def environments(groups: Iterable[Group]) -> Counter[str]:
    return Counter(group.completions[0].environment for group in groups)


def test_each_environment_has_its_share_of_every_round_and_a_resumed_run_the_same(playing: Playing) -> None:
    plan, prompts = playing.sampler.plan, playing.sampler.prompts
    drawn = [[prompts[number] for number in plan.prompts(first)] for first in range(1, 8)]
    for asked in drawn:
        assert abs(sum(one.environment == "game" for one in asked) - 2) <= 1
    assert sum(one.environment == "game" for asked in drawn for one in asked) == len(drawn) * 6 // 3
    games = [one.prompt.row["number"] for asked in drawn for one in asked if one.environment == "game"]
    assert Counter(games[:7]) == Counter(str(n % 4) for n in range(7)), "each of its rows once before one is repeated"
    sampled, again = (playing.sampler.sample(3) for _ in range(2))
    assert replace(sampled, measured={}) == replace(again, measured={})
    assert len({one.seed for one in sampled.completions}) == 24


def test_turns_are_sampled_together_and_each_environment_is_judged_by_its_own_rewards(playing: Playing) -> None:
    sampled = playing.sampler.sample(1)
    assert len(playing.server.asked[0]) == 24, "the first turns of both"
    assert len(playing.server.asked) == max(one.episode["turns"] for one in sampled.completions) == 3
    assert environments(sampled.groups) == {"sums": 4, "game": 2}
    for group in sampled.groups:
        asked = playing.sampler.prompts[group.prompt]
        assert {one.environment for one in group.completions} == {asked.environment}
        for one in group.completions:
            if one.environment == "game":
                won = str(asked.prompt.row["number"]) == one.text
                assert (one.rewards, one.reward) == ({"environment": float(won)}, float(won))
                assert one.end == ("done" if won else "turns")
            else:
                right = one.text == asked.prompt.reference
                assert (one.rewards, one.reward, one.end) == ({"right": float(right)}, float(right), "done")
                assert one.episode["calls"] == 1


def test_metrics_and_the_table_of_episodes_are_by_environment(playing: Playing, tmp_path: Path) -> None:
    sampled = playing.sampler.sample(1)
    sampled.write(tmp_path / "round.json")
    sampled = Round.read(tmp_path / "round.json")
    metrics = round_metrics(sampled)
    RoundSamples(playing.context, playing.sampler.prompts).write(sampled)
    (file,) = round_files(tmp_path).values()
    rows = parquet.read_table(file).to_pylist()
    assert metrics["reward"] == statistics.fmean(row["total"] for row in rows)
    for name, count in (("sums", 16), ("game", 8)):
        own = [row for row in rows if row["environment"] == name]
        assert len(own) == count and metrics[f"episode_share.{name}"] == count / 24
        for metric, column in (
            ("reward", "total"),
            ("episode_turns", "turns"),
            ("episode_out_of_turns", "out_of_turns"),
        ):
            assert metrics[f"{metric}.{name}"] == statistics.fmean(row[column] for row in own)
    assert {row["reward_right"] is None for row in rows if row["environment"] == "game"} == {True}
    assert metrics["reward_right"] == metrics["reward_right.sums"] and "reward_right.game" not in metrics
    assert metrics["reward_environment"] == metrics["reward_environment.game"]
    shown = next(one for one in shown_episodes(tmp_path, 24) if one.place.endswith(" in game"))
    assert set(shown.rewards) == {"environment", "total"}
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {line["environment"] for line in lines} == {"sums", "game"}


def test_groups_without_signal_are_replaced_by_others_of_their_environment(playing: Playing) -> None:
    options = playing.sampler.options.model_copy(update={"max_draws": 4})
    sampler = replace(playing.sampler, options=options, plan=replace(playing.sampler.plan, options=options))
    redrawn = [sampler.sample(first) for first in range(1, 6)]
    assert max(one.measured["num_draws"] for one in redrawn) > 1
    for first, sampled in enumerate(redrawn, 1):
        planned = Counter(sampler.prompts[number].environment for number in sampler.plan.prompts(first))
        assert environments(sampled.groups) == planned
    assert replace(sampler.sample(2), measured={}) == replace(redrawn[1], measured={})


def test_a_row_and_a_file_that_an_environment_cannot_use_are_named_with_it(inputs: dict[str, Path]) -> None:
    def problems(config: TrainConfig) -> dict[str, str]:
        assert config.rollouts
        tree = config.model_dump(mode="json")
        asked = StageInput(name="a", kind="train", version="", config=tree, inputs=inputs, cache=inputs["base"])
        found = rollout_problems(config, config.rollouts, asked, ModelFacts(inputs["base"] / "model"))
        return {name: str(error) for name, error in found}

    assert problems(several(inputs)) == {}
    unanswered = several(
        inputs,
        environments={"sums": {"environment": CALCULATOR, "dataset": "games"}},
        rewards=RIGHT,
        data={"dataset": None},
    )
    assert re.match(
        r"the environment sums: 7 of 7 rows are no prompts:\n.*has no right answer", problems(unanswered)["data"]
    )
    missing = {"environment": {"tools": [{"search": str(inputs["base"] / "missing")}]}}
    (broken,) = problems(several(inputs, environments={"texts": missing, "sums": {"environment": CALCULATOR}}))
    assert broken == "grpo.environments.texts.environment"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": CALCULATOR}, "has `environment` and `environments`"),
        ({"rewards": {}}, "`grpo.environments.sums.environment` has no rewards"),
        (
            {"environments": {"sums": {"environment": CALCULATOR, "rewards": ["wrong"]}}},
            "names wrong, which is not among",
        ),
        ({"environments": {"sums": {"environment": CALCULATOR, "weight": 0}}}, "greater than 0"),
        ({"scale_rewards": "batch"}, "`scale_rewards: batch` compares rewards of different environments"),
        ({"advantage": "batch_whitened"}, "`advantage: batch_whitened` compares rewards"),
        ({"data": {"dataset": None}}, r"`grpo.environments.sums` has no prompts; say its `dataset: STAGE`"),
        (
            {"environments": {"sums": {"environment": CALCULATOR, "dataset": "games"}}},
            "`data.dataset: problems` is read by no environment",
        ),
        (
            {
                "rewards": {**RIGHT, "other": RIGHT["right"]},
                "environments": {"sums": {"environment": CALCULATOR, "rewards": ["right"]}},
            },
            "`rewards.other` judges no environment",
        ),
    ],
)
def test_environments_that_do_not_go_together_are_refused(
    inputs: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        several(inputs, **options)


def test_stages_that_act_in_one_environment_refuse_several_by_name(tmp_path: Path) -> None:
    environments = {"sums": {"environment": CALCULATOR}}
    generate = {"kind": "generate", "model": "base", "prompts": {"dataset": "problems"}, "environments": environments}
    evaluate = {"kind": "evaluate", "model": "base", "harness": "environment", "tasks": ["sums"]}
    stages = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "problems": {"kind": "download", "dataset": "builtin/addition"},
        "made": {**generate, "serving": {}},
        "scores": {**evaluate, "episodes": {"environments": environments}, "serving": {}},
    }
    with pytest.raises(RecipeError) as refused:
        load_stages("recipe", tmp_path, stages)
    for path in ("made.environments", "scores.episodes.environments"):
        (line,) = (line for line in str(refused.value).splitlines() if f"stages.{path}:" in line)
        assert line.endswith("only GRPO acts in several: say one `environment`, and write a stage for each")


def test_seeds_that_one_of_several_environments_learns_from_are_not_evaluated(inputs: dict[str, Path]) -> None:
    gym = {"environment": {"reasoning_gym": "chain_sum", "size": 100}, "rewards": []}
    learned = several(inputs, environments={"gym": gym, "sums": {"environment": CALCULATOR}})
    parts = learned.acting
    assert {name: part.data.dataset for name, part in parts.items()} == {"gym": None, "sums": "problems"}
    evaluation = {"kind": "evaluate", "model": "sft", "harness": "environment", "tasks": ["sums"]}
    asked = {"environment": {"reasoning_gym": "chain_sum", "seed": 50, "size": 10}}
    (problem,) = shared_seeds(EvaluateConfig.model_validate({**evaluation, "episodes": asked}), {"grpo": learned})
    assert "rows of grpo as well" in problem
