"""A served model's episodes are played, resumed, scored and kept: as scores with error bars, and as training rows.

The server is a script of a model that calls the calculator or guesses, as the seed has it.
"""

import itertools
import json
import re
import shutil
import statistics
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from pydantic import ValidationError
from transformers import AutoTokenizer

from stages.core.contract import StageContext, StageInput
from stages.core.errors import EvaluationError
from stages.data.any_rows import Prompt
from stages.data.files import Portion
from stages.data.formats import RowReader
from stages.data.messages import Conversation
from stages.harnesses.acting.playing import pass_at
from stages.harnesses.harness import GenerationConfig, Results
from stages.harnesses.registry import harness_of
from stages.kinds.evaluate.check import check
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import _write
from stages.kinds.generate.config import GenerateConfig
from stages.kinds.generate.selection import Candidate, choose
from stages.kinds.promote.paired import compare
from stages.rewards.judging import Judgement
from stages.rollouts.acting import PlayedEpisode, play_all
from stages.rollouts.asking import seed_of
from stages.rollouts.prompts import read_prompts
from stages.serving.client import Client
from stages.serving.served_models import ServedModel
from tests.agent_episodes import make_model
from tests.http_server import answering

NUM_QUESTIONS, NUM_SAMPLES = 5, 4
TOOLS = {"tools": ["calculator"], "max_turns": 3}
RIGHT = {"right": {"type": "exact_match"}}


class Server:
    """Server of a model that calls the calculator where the seed is even, and guesses `odd` where it is odd."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.odd = "0"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.asked.append(body)
            prompt = self.tokenizer.decode(body["prompt"])
            if given := re.findall(r"<tool_response>\n(.*)\n</tool_response>", prompt):
                text = given[-1]
            elif body["seed"] % 2:
                text = self.odd
            else:
                expression = re.findall(r"What is (.*)\?", prompt)[-1]
                call = {"name": "calculator", "arguments": {"expression": expression}}
                text = f"Let me see.<tool_call>\n{json.dumps(call)}\n</tool_call>"
            ids = self.tokenizer.encode(f"{text}<|im_end|>")
        log_probabilities = {"token_logprobs": [-0.5] * len(ids)}
        choice = {"text": text, "finish_reason": "stop", "token_ids": ids, "logprobs": log_probabilities}
        return {"choices": [choice], "usage": {"completion_tokens": len(ids)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    state = Server(folder)
    with answering(state.answer) as url:
        state.served = ServedModel(Client(url, "key", "sft"), folder, 256, False)  # type: ignore[attr-defined]
        yield state


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    (tmp_path / "sets").mkdir()
    rows = [{"prompt": f"What is {n + 11} * {n + 20}?", "answer": str((n + 11) * (n + 20))} for n in range(5)]
    (tmp_path / "sets" / "products.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "sets"


def config(questions: Path, temperature: float = 1.0, **episodes: Any) -> EvaluateConfig:
    block = {"environment": TOOLS, "rewards": RIGHT, "num_samples": NUM_SAMPLES, **episodes}
    tree = {"kind": "evaluate", "model": "sft", "harness": "environment", "tasks": ["products"], "serving": {}}
    generation = {"max_tokens": 64, "temperature": temperature}
    return EvaluateConfig.model_validate(
        {**tree, "task_folder": questions, "episodes": block, "generation": generation}
    )


def evaluate(read: EvaluateConfig, server: Any, work: Path, outside: dict[str, Any] | None = None) -> Results:
    work.mkdir(exist_ok=True)
    context = StageContext(work, "evaluate", "0123456789ab", {}, {}, work, outside or {})
    results = harness_of(read.evaluation).evaluate(read.evaluation, context, lambda: server.served)
    _write(work, results)
    return results


def test_pass_at_k_is_the_share_of_draws_with_a_solution() -> None:
    for num_samples, num_solved in ((1, 0), (1, 1), (5, 2), (6, 1), (4, 4)):
        solved = [number < num_solved for number in range(num_samples)]
        for k in range(1, num_samples + 1):
            draws = [any(draw) for draw in itertools.combinations(solved, k)]
            assert pass_at(k, num_samples, num_solved) == pytest.approx(statistics.fmean(draws))


def test_episodes_are_scored_by_question_with_error_bars(server: Any, questions: Path, tmp_path: Path) -> None:
    results = evaluate(config(questions), server, tmp_path / "work")
    table = parquet.read_table(tmp_path / "work" / "episodes.parquet").to_pylist()
    assert len(table) == NUM_QUESTIONS * NUM_SAMPLES and len({row["seed"] for row in table}) == len(table)
    by_question = [table[begin : begin + NUM_SAMPLES] for begin in range(0, len(table), NUM_SAMPLES)]
    for row, own in zip(results.samples["products"], by_question, strict=True):
        shares = [one["seed"] for one in own]
        assert row["right"] == row["pass_at_1"] == statistics.fmean(one["reward_right"] for one in own)
        assert row["pass_at_4"] == float(any(one["reward_right"] for one in own)) and len(shares) == NUM_SAMPLES
        assert [response for (response,) in row["resps"]] == [one["transcript"] for one in own]
    values = [row["right"] for row in results.samples["products"]]
    found = results.scores["results"]["products"]
    assert found["right,none"] == pytest.approx(statistics.fmean(values)) and 0 < found["right,none"] < 1
    assert found["right_stderr,none"] == pytest.approx(statistics.stdev(values) / len(values) ** 0.5)
    for row in table:
        called = row["calls"] == 1
        assert (row["reward_right"], row["end"], row["turns"]) == (float(called), "done", 1 + called)
        assert ("<tool_response>" in row["transcript"]) == called
        assert [one["author"] for one in row["segments"]] == (
            ["model", "environment", "model"] if called else ["model"]
        )
    assert results.metrics["episode_calls"] == statistics.fmean(row["calls"] for row in table)
    paired = compare([tmp_path / "work"], [tmp_path / "work"])
    assert {one.name: one.difference for one in paired} == dict.fromkeys(
        ["products.right", "products.pass_at_1", "products.pass_at_4"], 0.0
    )
    assert {one.num_samples for one in paired} == {NUM_QUESTIONS}


AGENT = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())["row"]
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}).encode()
request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"reward": float(row["answer"][-1:] in text), "metrics": {"letters": len(text)}}))
"""


def test_a_program_scores_two_models_whose_episodes_are_paired(server: Any, questions: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    program = {"program": "python agent.py", "files": [tmp_path / "agent.py"], "metrics": ["letters"]}
    read = config(questions, environment=program, rewards={}, num_samples=2)
    works, rows = [tmp_path / name for name in ("first", "second")], []
    for number, work in enumerate(works):
        server.odd = ("0", "02")[number]
        results = evaluate(read, server, work)
        rows.append(parquet.read_table(work / "episodes.parquet").to_pylist())
        solved = [one["reward_environment"] for one in rows[-1]]
        either = [max(pair) for pair in zip(solved[::2], solved[1::2], strict=True)]
        found = results.scores["results"]["products"]
        assert found["environment,none"] == found["pass_at_1,none"] == statistics.fmean(solved)
        assert found["pass_at_2,none"] == statistics.fmean(either)
        assert results.metrics["episode_program_letters"] == statistics.fmean(len(one["text"]) for one in rows[-1])
    assert [one["seed"] for one in rows[0]] == [one["seed"] for one in rows[1]]
    means = [statistics.fmean(one["reward_environment"] for one in own) for own in rows]
    differences = {one.name: one.difference for one in compare([works[1]], [works[0]])}
    assert differences["products.environment"] == pytest.approx(means[1] - means[0]) and means[1] != means[0]


def test_a_resumed_evaluation_asks_for_missing_episodes_only(server: Any, questions: Path, tmp_path: Path) -> None:
    whole = evaluate(config(questions), server, tmp_path / "work")
    num_asked = len(server.asked)
    (kept,) = (tmp_path / "work" / "scratch").glob("episodes-*.jsonl")
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:-2]) + lines[-2][:50])
    again = evaluate(config(questions), server, tmp_path / "work")
    assert again.samples == whole.samples and again.scores == whole.scores
    bounds = {tuple(body[name] for name in ("top_k", "min_p", "repetition_penalty")) for body in server.asked}
    assert bounds == {(0, 0.0, 1.0)}, "and not those of the model's generation config"
    assert 2 <= len(server.asked) - num_asked <= 4, "two episodes, of one turn or two"


def test_evaluations_are_paired_where_all_that_decides_them_is_equal(
    server: Any, questions: Path, tmp_path: Path
) -> None:
    def settings(outside: dict[str, Any], **changed: Any) -> str:
        read = config(questions, num_samples=1).model_copy(update=changed)
        return str(evaluate(read, server, tmp_path / str(len(server.asked)), outside).scores["versions"]["products"])

    game = {"episodes.environment.python": "a", "vllm_version": "1"}
    assert settings(game) == settings({**game, "vllm_version": "2"})
    others = [settings(game), settings({**game, "episodes.environment.python": "b"}), settings(game, seed=1)]
    assert len({*others}) == 3


def test_no_two_tasks_and_no_other_stage_have_the_seeds_of_episodes(
    server: Any, folder: Path, questions: Path, tmp_path: Path
) -> None:
    (questions / "again.jsonl").write_bytes((questions / "products.jsonl").read_bytes())
    read = config(questions).model_copy(update={"tasks": ("products", "again")})
    evaluate(read, server, tmp_path / "work")
    seeds = [
        {row["seed"] for row in parquet.read_table(tmp_path / "work" / f"{task}-episodes.parquet").to_pylist()}
        for task in read.tasks
    ]
    made = generate()
    seeds.append({seed_of(made.sampling_options, *job) for job in itertools.product(range(5), range(NUM_SAMPLES))})
    assert len(set.union(*seeds)) == sum(map(len, seeds)) == 3 * NUM_QUESTIONS * NUM_SAMPLES


def test_an_adapter_s_turns_end_as_its_base_says(server: Any, folder: Path, questions: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(folder, adapter, ignore=shutil.ignore_patterns("config.json", "generation_config.json"))
    read = config(questions)
    assert harness_of(read.evaluation).check(read.evaluation, questions, adapter, folder) is None
    server.served = replace(server.served, asked=adapter)
    assert {end for row in evaluate(read, server, tmp_path / "work").samples["products"] for end in row["ends"]} == {
        "done"
    }


def test_what_cannot_be_is_refused_before_anything_is_asked(folder: Path, questions: Path) -> None:
    (problem,) = harness_of(config(questions, 0.0).evaluation).problems(config(questions, 0.0).evaluation)
    assert "generation.temperature: is 0" in problem
    with pytest.raises(ValidationError, match="this environment gives none"):
        config(questions, rewards={})
    for name in ("filter", "pass_at_4", "environment", "doc_hash"):
        with pytest.raises(ValidationError, match=f"`rewards.{name}` has the name of another column"):
            config(questions, rewards={name: {"type": "exact_match"}})
    stopped = replace(config(questions).evaluation, generation=GenerationConfig(stop=("x",), temperature=1.0))
    (problem,) = harness_of(stopped).problems(stopped)
    assert problem == "generation.stop: would end a turn where nothing can follow it in an episode; remove it"
    for fields, expected in (
        ({"stop": ["x"]}, "`stop` would end a turn"),
        ({"apply_chat_template": False}, "`apply_chat_template: false` leaves no turns"),
        ({"rewards": {"environment": {"type": "exact_match"}}}, "`rewards.environment` has the name of"),
    ):
        with pytest.raises(ValidationError, match=expected):
            generate(**fields)
    read = config(questions).evaluation
    harness = harness_of(read)
    assert harness.check(read, questions, folder) is None
    assert [
        harness.may_give(f"products.{name}", read) for name in ("right", "pass_at_1", "pass_at_4", "pass_at_2")
    ] == [*(True, True, True, False)]
    (questions / "products.jsonl").write_text('{"prompt": "What is 1 * 1?"}\n')
    with pytest.raises(EvaluationError, match="has no right answer, which the reward right compares with"):
        harness.check(read, questions, folder)
    missing = {"tools": [{"search": str(questions / "missing")}]}
    own = {"own": {"type": "python", "file": str(questions / "missing.py")}}
    unbuilt = config(questions, environment=missing, rewards=own).model_dump(mode="json")
    inputs = {"sft": questions}
    stage_input = StageInput(name="a", kind="evaluate", version="", config=unbuilt, inputs=inputs, cache=questions)
    found = {field: str(error) for field, error in check(stage_input)}
    assert set(found) == {"episodes.rewards.own", "episodes.environment"}
    assert "has no text to search" in found["episodes.environment"]
    python = config(questions, environment={"tools": ["calculator", "python"]})
    assert python.custom_code() == ("episodes.environment: code in the model's calls, within limits",)


def generate(**fields: Any) -> GenerateConfig:
    tree = {"kind": "generate", "model": "sft", "prompts": {"dataset": "problems"}, "environment": TOOLS}
    return GenerateConfig.model_validate(
        {**tree, "rewards": RIGHT, "num_samples": NUM_SAMPLES, "max_tokens": 64, "keep": "best", **fields}
    )


def test_the_best_episodes_become_rows_that_teach_to_call_tools(
    server: Any, folder: Path, questions: Path, tmp_path: Path
) -> None:
    read = generate()
    options = replace(read.prompt_options, portion=Portion("training", "products"))
    prompts = read_prompts(questions, options, folder)
    assert read.environment
    played = play_all(server.served, prompts, read.environment, read.sampling_options, tmp_path / "kept", print, print)
    for number, asked in enumerate(prompts):
        own = played[number * NUM_SAMPLES : (number + 1) * NUM_SAMPLES]
        rewards = [float(one.text == asked.prompt.reference) for one in own]
        candidates = [
            Candidate(one, Judgement({"right": reward}, reward)) for one, reward in zip(own, rewards, strict=True)
        ]
        (row,) = choose(asked.prompt, candidates, read).rows
        if any(rewards):
            (document,) = RowReader("auto", "examples").read(row)
            assert isinstance(document, Conversation) and document.tools
            _, call, response, answer = document.messages
            assert call["content"] == "Let me see." and call["tool_calls"][0]["function"]["name"] == "calculator"
            assert response["content"] == answer["content"] == asked.prompt.reference
    assert sum(one.metrics["calls"] for one in played) > 0


def test_an_episode_that_was_cut_or_whose_call_failed_is_not_learned(folder: Path) -> None:
    def episode(number: int, **fields: Any) -> PlayedEpisode:
        metrics = {"malformed_calls": 0.0, "failed_calls": 0.0, **fields.pop("metrics", {})}
        tree = {
            "prompt": 0,
            "sample": number,
            "seed": 0,
            "text": "3",
            "num_tokens": 1,
            "truncated": False,
            "end": "done",
            "prompt_text": "1 + 2?",
            "prompt_ids": [1, 2],
        }
        asked = [{"role": "user", "content": "1 + 2?"}]
        whole = {"transcript": f"3 {number}", "reward": None, "asked": asked, "segments": [], "metrics": metrics}
        return PlayedEpisode.model_validate(
            {**tree, **whole, "answer": [{"role": "assistant", "content": "3"}], **fields}
        )

    cut, failed, good = episode(0, truncated=True), episode(1, metrics={"failed_calls": 1.0}), episode(2)
    candidates = [Candidate(one, Judgement({"right": 1.0}, 1.0)) for one in (cut, failed, good)]
    choice = choose(
        Prompt(Conversation([{"role": "user", "content": "1 + 2?"}]), "3", {}), candidates, generate(num_samples=3)
    )
    assert choice.outcomes == ("dropped: it was cut off at max_tokens", "dropped: a call of it failed", "kept")
    assert episode(0, truncated=True, end="turns").flaw == "it was cut off at max_turns"
    assert episode(0, truncated=True, end="seconds").flaw == "it was cut off at max_episode_s"
    empty = [{"role": "assistant", "content": " "}]
    function = {"type": "function", "function": {"name": "f", "arguments": [1]}}
    called = [{"role": "assistant", "content": "", "tool_calls": [function]}, {"role": "tool", "content": "3"}]
    unasked = [{"role": "assistant", "content": "3"}, {"role": "tool", "content": "4"}, *good.answer]
    for answer, reason in (
        (empty, "has an empty `content` in message 2"),
        ([*called, *good.answer], "has a list as `arguments`"),
        (unasked, "has `tool` in message 3"),
    ):
        assert reason in str(episode(0, answer=answer).flaw)
