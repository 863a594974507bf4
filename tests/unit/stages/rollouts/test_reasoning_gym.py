"""Reasoning Gym's tasks as environments: the package's own scores, made and judged in its own process."""

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer

from stages.core.errors import DataError
from stages.data.files import Portion, Row, RowLocation
from stages.data.messages import RowError
from stages.data.tokenizer import DocumentTokenizer
from stages.kinds.evaluate.config import EvaluateConfig
from stages.rollouts.environments.environment import Action, Environment, MakeEnvironment, shared_seeds
from stages.rollouts.environments.episodes import Episodes, TurnReader
from stages.rollouts.environments.reasoning_gym import MADE_FROM, ReasoningGymEnvironment, find_reasoning_gym
from stages.rollouts.environments.registry import AnyEnvironment
from stages.rollouts.options import PromptOptions
from stages.rollouts.prompts import RenderedPrompt, read_prompts
from tests.agent_episodes import make_model
from tests.train_stage import make_config

TASKS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {},
    "chain_sum": {"max_terms": 3},
    "countdown": {},
    "letter_counting": {},
    "spell_backward": {},
}
NUM_EACH, SEED = 40, 7
ORACLE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import reasoning_gym
found = []
for task, options, seed, texts in json.load(sys.stdin):
    rows = reasoning_gym.create_dataset(task, seed=seed, size=len(texts), **options)
    found.append([[row["question"], row["answer"], rows.score_answer(text, row)] for row, text in zip(rows, texts)])
print(json.dumps(found))
"""


def environment(task: str = "chain_sum", **fields: Any) -> ReasoningGymEnvironment:
    return TypeAdapter(AnyEnvironment).validate_python({"reasoning_gym": task, **fields})


def score(made: Environment, row: dict[str, Any], text: str) -> float:
    made.reset(row, 0)
    step = made.step(Action(text))
    assert step.done and not step.messages
    return step.reward


Opened = tuple[ReasoningGymEnvironment, MakeEnvironment]


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    """Provide an environment that is open: each opening imports the package, which takes two seconds."""
    config = environment(options=TASKS["chain_sum"], seed=SEED, size=NUM_EACH)
    with config.opened(Path()) as make:
        yield config, make


def check_scores(environments: Sequence[Opened]) -> None:
    """Compare rows and rewards of `NUM_EACH` items of each task with those of the package, asked by itself."""
    drawn, asked = [], []
    for config, make in environments:
        rows = list(config.rows())
        # right, wrong, another row's, in words, and empty
        texts = [
            [row["answer"], f"{row['answer']}1", rows[number - 1]["answer"], f"It is {row['answer']}.", ""][number % 5]
            for number, row in enumerate(rows)
        ]
        made = make()
        scored = [
            [row["prompt"], row["answer"], score(made, row, f" {text}\n")]
            for row, text in zip(rows, texts, strict=True)
        ]
        other = {**rows[0], "prompt": f"{rows[0]['prompt']} Really?"}
        with pytest.raises(DataError, match=f"makes another question at index 0 of the task {config.name} with seed 7"):
            score(made, other, "2")
        drawn += [scored, scored[30:]]  # each row has a seed of its own
        asked += [[config.name, config.options, SEED, texts], [config.name, config.options, SEED + 30, texts[30:]]]
    python, _ = find_reasoning_gym()
    oracle = subprocess.run([python, "-c", ORACLE], input=json.dumps(asked), capture_output=True, text=True, check=True)
    assert drawn == json.loads(oracle.stdout)
    scores = [one for rows in drawn[::2] for _, _, one in rows]
    assert len(scores) == NUM_EACH * len(environments) and 0.0 in scores and 1.0 in scores


def test_rows_and_rewards_are_those_of_the_package_itself(opened: Opened) -> None:
    check_scores([opened])


@pytest.mark.nightly
def test_rows_and_rewards_of_several_tasks_are_the_package_s() -> None:
    """200 items; `make test` has 40 of one task, by the test above."""
    configs = [environment(task, options=options, seed=SEED, size=NUM_EACH) for task, options in TASKS.items()]
    with ExitStack() as stack:
        check_scores([(config, stack.enter_context(config.opened(Path()))) for config in configs])


def test_a_row_says_how_it_is_made(opened: Opened) -> None:
    config, _ = opened
    row = next(config.rows())
    config.check_row(row)
    made_from = row["reasoning_gym"]
    for other in (None, {}, {**made_from, "task": "countdown"}, {**made_from, "index": 40}, {**made_from, "seed": "7"}):
        with pytest.raises(RowError, match="is no row of the task chain_sum"):
            config.check_row({**row, "reasoning_gym": other})


def test_an_evaluation_of_what_is_learned_is_refused() -> None:
    def asked(seed: int, **fields: Any) -> EvaluateConfig:
        made = {"reasoning_gym": "chain_sum", "size": 10, "seed": seed, **fields}
        tree = {"kind": "evaluate", "model": "sft", "harness": "environment", "tasks": ["sums"]}
        return EvaluateConfig.model_validate({**tree, "episodes": {"environment": made}})

    learned = {
        "grpo": make_config(
            "grpo",
            data={"evaluation_fraction": 0.1, "sequence_length": 64},
            global_batch_size=8,
            grpo={
                "max_completion_length": 8,
                "environment": {"reasoning_gym": "chain_sum", "size": 100, "seed": 5},
            },
        )
    }
    (problem,) = shared_seeds(asked(100), learned)
    assert problem.startswith("seed: chain_sum 100 to 109 are rows of grpo as well, which has chain_sum 5 to 104")
    assert "seed: 105" in problem
    assert not [*shared_seeds(asked(105), learned)]
    assert not [*shared_seeds(asked(5, reasoning_gym="countdown"), learned)]


@pytest.mark.parametrize("environment", [None, {"tools": ["calculator"]}])
def test_without_a_dataset_rows_come_from_an_environment_that_makes_them(environment: dict[str, Any] | None) -> None:
    options = {"rewards": {"right": {"type": "exact_match"}}, "environment": environment}
    with pytest.raises(ValidationError, match="`data` names no data; say `dataset: STAGE`"):
        make_config("grpo", data={"sequence_length": 64}, global_batch_size=8, grpo=options)


def test_equal_questions_are_held_out_together() -> None:
    made = [{"prompt": str(number % 10), "reasoning_gym": {"index": number}} for number in range(200)]
    rows = [Row(RowLocation("made", number), row) for number, row in enumerate(made)]
    training, held_out = (
        {row.content["prompt"] for row in Portion(name, "train", 0.5).select(rows, "prompt")}
        for name in ("training", "evaluation")
    )
    assert training and held_out and not training & held_out


def check_refusal(task: str, options: dict[str, Any], message: str) -> None:
    ((field, problem),) = environment(task, options=options).problems()
    assert field == "reasoning_gym"
    assert re.search(message, problem) and "\n" not in problem


def test_an_unknown_task_is_refused_with_those_near_to_it() -> None:
    check_refusal("chain_sums", {}, r"^Reasoning Gym has no task 'chain_sums'; near are chain_sum, .* \(10\d in all\)$")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sum", {"max_term": 2}, "has no option 'max_term' of the task chain_sum; near are max_terms"),
        ("chain_sum", {"max_terms": 0}, r'refuses the options \{"max_terms": 0\} of the task chain_sum'),
        ("composite", {}, "has the task composite, which mixes others"),
    ],
)
def test_options_that_a_task_does_not_take_are_refused(task: str, options: dict[str, Any], message: str) -> None:
    """`make test` covers such a refusal by the test above."""
    check_refusal(task, options, message)


@pytest.mark.parametrize("fraction", [None, 0.25])
def test_rows_are_prompts_with_their_answers(tmp_path: Path, opened: Opened, fraction: float | None) -> None:
    make_model(tmp_path)
    made, make = opened
    asked = {}
    for name in ("training", "evaluation") if fraction else ("training",):
        portion = Portion(name, "train", fraction)
        options = PromptOptions(portion, None, None, "reference", None, None, {}, environment=made)
        asked[name] = read_prompts(None, options, tmp_path)
    rows = sorted((one.prompt.row for part in asked.values() for one in part), key=lambda row: row[MADE_FROM]["index"])
    assert rows == list(made.rows()), "each row is in one part"
    for one in (one for part in asked.values() for one in part):
        assert one.prompt.reference == one.prompt.row["answer"] and one.prompt.row["prompt"] in one.text
    if fraction:
        of_training, of_evaluation = ({one.prompt.row["prompt"] for one in part} for part in asked.values())
        assert of_evaluation and not of_training & of_evaluation
    check_episodes(made, make, tmp_path, asked["training"][:3])


@dataclass(frozen=True)
class Turn:
    """Turn as a server samples one."""

    token_ids: list[int]
    text: str
    truncated: bool

    @property
    def log_probabilities(self) -> list[float]:
        return [-0.5] * len(self.token_ids)


def check_episodes(
    made: ReasoningGymEnvironment, make: MakeEnvironment, folder: Path, prompts: Sequence[RenderedPrompt]
) -> None:
    """Play a right, a wrong and a cut answer, which are episodes of one turn."""
    tokenizer = DocumentTokenizer(folder, None, "assistant")
    encode = AutoTokenizer.from_pretrained(folder).encode
    reader = TurnReader.proved(tokenizer, encode("<|im_end|>"), made, prompts[0].episode(0).prompt)

    def sample(_: object) -> list[Turn]:
        right, wrong, cut = (str(one.prompt.reference) for one in prompts)
        return [
            Turn(encode(f"{right}<|im_end|>"), right, truncated=False),
            Turn(encode(f"{wrong}1<|im_end|>"), f"{wrong}1", truncated=False),
            Turn(encode(cut), cut, truncated=True),
        ]

    episodes = Episodes(made, make, reader, 128, 8, lambda seed, turn: seed + turn)
    played = episodes.play([one.episode(0) for one in prompts], sample)
    assert [one.end for one in played] == ["done", "done", "tokens"]
    assert played[0].reward == 1.0 and played[1].reward < 1.0 and played[2].reward == 0.0
    assert all(one.num_turns == 1 and len(one.segments) == 1 for one in played)
