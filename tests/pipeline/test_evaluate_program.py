"""Agent programs with OpenAI's own client evaluate two models that a real vLLM serves."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from stages.core.errors import EvaluationError
from stages.harnesses.scores import read_samples
from stages.kinds.promote.paired import compare
from tests.pipeline.test_agent_program import make_ending_model
from tests.serving import SERVING, run_to_the_end, served_processes, stage_process, write_work

PYTHON = Path(__file__).parents[2] / ".venv-serve" / "bin" / "python"
"""Interpreter that has OpenAI's client, since vLLM needs it."""
AGENT = """
import json, os, sys
import openai

row = json.loads(sys.stdin.readline())["row"]
client, text = openai.OpenAI(), ""
messages = [{"role": "user", "content": row["prompt"]}]
for _ in range(2):
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages).choices[0]
    messages += [answer.message, {"role": "user", "content": "Again."}]
    text += answer.message.content
    if answer.finish_reason == "length":
        break
if row["number"] % 2 and os.path.exists("down"):
    sys.exit("a service that it needs is down")
print(json.dumps({"reward": len(text), "metrics": {"asked": len(messages) // 2}}))
"""
NUM_QUESTIONS, NUM_SAMPLES = 4, 2


@pytest.mark.nightly
def test_agents_score_two_served_models_and_failed_ones_are_asked_again(tmp_path: Path) -> None:
    """`make test` covers programs with a scripted server, in `test_programs.py` and `test_acting.py`."""
    agent, questions = tmp_path / "agent", tmp_path / "questions"
    for folder in (agent, questions):
        folder.mkdir()
    (agent / "agent.py").write_text(AGENT)
    rows = [{"prompt": f"What is {number} * 12?", "number": number} for number in range(NUM_QUESTIONS)]
    (questions / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    program = {"program": f"{PYTHON} agent.py", "files": [str(agent)], "metrics": ["asked"], "num_together": 4}
    config = {
        "model": "sft",
        "serving": SERVING,
        "harness": "environment",
        "tasks": ["sums"],
        "task_folder": str(questions),
        "episodes": {"environment": program, "num_samples": NUM_SAMPLES},
        "generation": {"max_tokens": 16, "temperature": 1.0},
    }

    def work_of(seed: int) -> Path:
        model = tmp_path / f"sft-{seed}"
        if not model.exists():
            make_ending_model(model / "model", seed)
        return write_work(tmp_path / f"scores-{seed}", "evaluate", config, {"sft": model})

    (agent / "down").touch()
    with stage_process(work := work_of(0)) as process:
        assert process.wait(500) == EvaluationError.exit_code
    error = json.loads((work / "error.json").read_text())
    assert error["error"] == "EvaluationError" and "\n" not in error["message"]
    assert "the environment failed in 4 of 8 episodes of sums, whose scores are unknown: at first" in error["message"]
    assert "agent.py ended with exit code 1: a service that it needs is down; fix that" in error["message"]
    (kept,) = (work / "scratch").glob("episodes-*.jsonl")
    first = [json.loads(line) for line in kept.read_text().splitlines()]
    assert sorted((one["prompt"], one["sample"]) for one in first) == [(0, 0), (0, 1), (2, 0), (2, 1)]

    (agent / "down").unlink()
    works = [work_of(seed) for seed in (0, 1)]
    results = [run_to_the_end(work) for work in works]
    tables = [parquet.read_table(work / "episodes.parquet").to_pylist() for work in works]
    even = [row for number, row in enumerate(tables[0]) if number // NUM_SAMPLES % 2 == 0]
    assert [row["transcript"] for row in even] == [one["transcript"] for one in first], "they are not asked again"
    assert [row["seed"] for row in tables[0]] == [row["seed"] for row in tables[1]]
    for work, result, table in zip(works, results, tables, strict=True):
        check(work, table, AutoTokenizer.from_pretrained(work.parent / work.name.replace("scores", "sft") / "model"))
        assert result.metrics["sums.environment"] == statistics.fmean(row["reward_environment"] for row in table)
        assert result.metrics["episode_program_asked"] == result.metrics["episode_turns"]
        assert result.metrics["episode_environment_failed"] == result.metrics["episode_refused_requests"] == 0
        assert not served_processes(work / "scratch" / "server") and not (work / "scratch" / "agents").exists()
    (paired,) = (one for one in compare([works[1]], [works[0]]) if one.name == "sums.environment")
    means = [result.metrics["sums.environment"] for result in results]
    assert (paired.num_samples, paired.difference) == (NUM_QUESTIONS, pytest.approx(means[1] - means[0]))
    assert means[0] != means[1]


def check(work: Path, table: list[dict[str, Any]], tokenizer: Any) -> None:
    """Compare rewards with what the model sampled, and samples with the episodes."""
    assert len(table) == NUM_QUESTIONS * NUM_SAMPLES == len({row["seed"] for row in table})
    for row in table:
        authors = [segment["author"] for segment in row["segments"]]
        assert authors == (["model", "environment", "model"] if row["turns"] == 2 else ["model"])
        sampled = [segment for segment in row["segments"] if segment["author"] == "model"]
        assert all(len(one["token_ids"]) == len(one["log_probabilities"]) for one in sampled)
        assert all(value < 0 for one in sampled for value in one["log_probabilities"])
        text = "".join(tokenizer.decode(one["token_ids"]).removesuffix("<|im_end|>") for one in sampled)
        assert row["reward_environment"] == len(text)
    for number, sample in enumerate(read_samples(work, "sums")):
        own = table[number * NUM_SAMPLES : (number + 1) * NUM_SAMPLES]
        assert [response for (response,) in sample["resps"]] == [row["transcript"] for row in own]
        assert sample["environment"] == statistics.fmean(row["reward_environment"] for row in own)
