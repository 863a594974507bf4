"""A model served by the real vLLM and evaluated by the real lm-eval answers as Transformers with the same weights."""

import json
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.core.contract import StageResult
from stages.core.process_tree import descendants
from stages.harnesses.lm_eval.tasks import select_tasks
from stages.serving.client import Client
from tests.judge_server import KEY, judge_server, rating
from tests.judge_server import MODEL as JUDGE
from tests.listening import listening_addresses, reachable_from_elsewhere
from tests.searched import commands_with, files_with
from tests.serving import (
    API_KEY,
    SERVING,
    is_port_free,
    make_model,
    run_to_the_end,
    served_processes,
    stage_process,
    wait_for,
    write_tasks,
    write_work,
)

TOKEN_IDS = [40, 72, 73, 84, 5, 20, 16, 17, 63, 33, 90, 12, 4, 4, 51, 66]
ANSWERED = "vllm:request_success_total"
WITH_KEY = {"Authorization": f"Bearer {API_KEY}"}


@dataclass(frozen=True)
class Served:
    """Running server of a serve stage: the stage's work folder and result, and a client."""

    work: Path
    result: StageResult
    client: Client

    @property
    def lease(self) -> dict[str, Any]:
        assert self.result.lease
        return {"serve": self.result.lease.model_dump(mode="json")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serving")
    make_model(root / "sft" / "model")
    write_tasks(root / "tasks")
    return root


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Served]:
    benchmark = {"concurrencies": [1, 4], "requests_per_concurrency": 2, "input_tokens": 16, "output_tokens": 8}
    config = {"model": "sft", "serving": SERVING, "benchmark": benchmark}
    work = write_work(root / "serve", "serve", config, {"sft": root / "sft"})
    with stage_process(work) as process:
        wait_for(lambda: (work / "result.json").exists() or process.poll() is not None, what="the lease")
        assert process.poll() is None, (work / "log.txt").read_text()[-3000:]
        result = StageResult.model_validate_json((work / "result.json").read_text())
        assert result.lease
        yield Served(work, result, Client(result.lease.url, API_KEY, "sft"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    assert is_port_free(result.lease.url)
    assert not served_processes(root)
    assert not list((root / "cache" / "servers").iterdir())


@pytest.fixture(scope="module")
def reference(root: Path) -> Any:
    """Provide the served model as Transformers loads it, and its tokenizer."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(root / "sft" / "model", dtype="float32")
    return model.eval(), AutoTokenizer.from_pretrained(root / "sft" / "model")


def log_probabilities(model: Any, token_ids: list[int]) -> list[float]:
    """Return the model's log-probability of every token but the first, computed with Transformers."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])
    return [float(value) for value in picked[:, 0]]


def evaluation(root: Path, *tasks: str, **config: Any) -> dict[str, Any]:
    return {"tasks": tasks, "task_folder": str(root / "tasks"), "apply_chat_template": True, **config}


def evaluate_leased(root: Path, served: Served, work: str, *tasks: str, **config: Any) -> StageResult:
    stage_config = {"model": "serve", **evaluation(root, *tasks, **config)}
    return run_to_the_end(
        write_work(root / work, "evaluate", stage_config, {"serve": served.work}, leases=served.lease)
    )


def generate(root: Path, served: Served, work: str, **config: Any) -> tuple[StageResult, list[dict[str, Any]]]:
    """Run a generate stage on the running server; return its result and its completions."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {a + 3}?"}],
            "answer": 2 * a + 3,
            "tests": ["assert True"],
        }
        for a in range(12)
    ]
    (root / "problems" / "data").mkdir(parents=True, exist_ok=True)
    (root / "problems" / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"model": "serve", "prompts": {"dataset": "problems"}, **config}
    inputs = {"serve": served.work, "problems": root / "problems"}
    result = run_to_the_end(write_work(root / work, "generate", asked, inputs, leases=served.lease))
    return result, [json.loads(line) for line in (root / work / "completions.jsonl").read_text().splitlines()]


def samples(root: Path, work: str, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / work / "samples" / f"{task}.jsonl").read_text().splitlines()]


def best_choice(row: dict[str, Any]) -> int:
    values = [response[0][0] for response in row["resps"]]
    return values.index(max(values))


def test_served_log_probabilities_are_those_of_transformers(served: Served, reference: Any) -> None:
    assert served.client.log_probabilities(TOKEN_IDS) == pytest.approx(
        log_probabilities(reference[0], TOKEN_IDS), abs=1e-4
    )


def test_the_record_of_a_server_holds_together(served: Served) -> None:
    metrics = served.result.metrics

    assert 0 < metrics["time_to_ready_s"] < 300
    for concurrency in (1, 4):
        between_tokens_s = metrics[f"inter_token_latency_ms_concurrency_{concurrency}"] / 1000
        assert metrics[f"ttft_ms_concurrency_{concurrency}"] > 0
        # Each of the concurrent requests makes at most one token in the time between two.
        assert 0 < metrics[f"output_tokens_per_s_concurrency_{concurrency}"] < 2 * concurrency / between_tokens_s
    assert all((served.work / file).is_file() for file in served.result.files)


def test_the_key_opens_the_server_and_is_written_nowhere(served: Served, root: Path) -> None:
    stranger = Client(served.client.url, "another-key", "sft")

    assert served.client.model_names() == ["sft"]
    with pytest.raises(Exception, match="401"):
        stranger.model_names()
    assert files_with(root, API_KEY) == []
    assert commands_with(API_KEY) == []


def test_the_proxy_is_the_only_door(served: Served, root: Path) -> None:
    stage = served.result.lease.pid
    assert listening_addresses([stage]) == {served.client.url.removeprefix("http://")}
    assert not reachable_from_elsewhere([stage, *descendants(stage)])
    (engine,) = (root / "cache" / "servers").glob("*/engine.sock")
    assert stat.S_IMODE(engine.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/invocations", "/tokenize", "/server_info"])
def test_nothing_is_answered_without_the_key(served: Served, path: str) -> None:
    assert httpx.get(f"{served.client.url}{path}").status_code == 401


def test_metrics_are_a_route_and_what_develops_vllm_is_none(served: Served) -> None:
    key = {"Authorization": f"Bearer {API_KEY}", "Origin": "http://elsewhere"}
    metrics = httpx.get(f"{served.client.url}/metrics", headers=key)
    assert "vllm:num_requests_waiting" in metrics.text
    assert not [name for name in metrics.headers if name.startswith("access-control")]
    for path in ("/invocations", "/tokenize", "/collective_rpc", "/reset_prefix_cache"):
        assert httpx.post(f"{served.client.url}{path}", headers=key, json={}).status_code == 404


def test_generated_answers_and_scores_are_those_of_transformers(root: Path, served: Served, reference: Any) -> None:
    model, tokenizer = reference

    result = evaluate_leased(root, served, "generated", "sums", limit=20)

    rows = samples(root, "generated", "sums")
    for row in rows:
        messages = [{"role": "user", "content": row["doc"]["question"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        prompt = prompt if not hasattr(prompt, "input_ids") else prompt.input_ids
        made = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert row["resps"][0][0] == tokenizer.decode(made, skip_special_tokens=True).split("\n")[0]
    right = [row["resps"][0][0] == row["doc"]["answer"] for row in rows]
    assert len(rows) == 20
    assert result.metrics["sums.exact_match"] == sum(right) / 20
    assert "sums.exact_match_stderr" in result.metrics


def test_greedy_completions_are_those_of_transformers(root: Path, served: Served, reference: Any) -> None:
    model, tokenizer = reference

    result, lines = generate(root, served, "greedy", temperature=0, max_tokens=24, rewards={"any": {"type": "number"}})

    for line in lines:
        prompt = tokenizer(line["prompt"], return_tensors="pt").input_ids
        made = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
        assert line["text"] == tokenizer.decode(made, skip_special_tokens=True)
        assert line["num_tokens"] == len(made)
        assert line["outcome"] == ("dropped: it was cut off at max_tokens" if line["truncated"] else "kept")
    kept = [line for line in lines if line["outcome"] == "kept"]
    learned = [json.loads(row) for row in (root / "greedy" / "data" / "train.jsonl").read_text().splitlines()]
    assert [row["completion"][0]["content"] for row in learned] == [line["text"] for line in kept]
    assert result.metrics["num_rows"] == len(kept) > 0


def test_the_same_seeds_give_the_same_completions(root: Path, served: Served) -> None:
    config = {"num_samples": 3, "max_tokens": 48, "rewards": {"brief": {"type": "length", "max_tokens": 4}}}

    _, first = generate(root, served, "first", **config, execution={"concurrent_requests": 1})
    _, again = generate(root, served, "again", **config, execution={"concurrent_requests": 12})
    _, other = generate(root, served, "other", **config, seed=1)

    assert [line["text"] for line in first] == [line["text"] for line in again]
    assert all(one["text"] != two["text"] for one, two in zip(first, other, strict=True))
    assert len({line["text"] for line in first}) == 36


def test_more_prompts_with_seeds_than_a_step_takes_do_not_end_the_server(served: Served) -> None:
    """vLLM 0.32 on a CPU ends ("CPU Generator does not use offset") where it reads such a prompt in two steps."""
    prompts = [[*TOKEN_IDS, *range(4, 99), *range(4, 99), number] for number in range(4, 44)]
    request = {"model": "sft", "prompt": prompts, "seed": 3, "max_tokens": 2}
    answer = httpx.post(f"{served.client.url}/v1/completions", headers=WITH_KEY, json=request, timeout=120)
    assert len(answer.json()["choices"]) == len(prompts), answer.text


def test_a_judge_programs_and_formulas_score_the_same_completions(
    root: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judge, code and math rewards, in a weighted sum, score the same completions: letters, programs, numbers."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server() as judge:
        rewards = {
            "liked": {
                "type": "judge",
                "url": judge.url,
                "served_model": JUDGE,
                "key_variable": "JUDGE_KEY",
                "weight": 0.5,
            },
            "runs": {"type": "code", "weight": 2.0, "timeout_s": 120},
            "right": {"type": "math", "timeout_s": 120},
        }
        fifth = "vLLM by itself takes four"
        short = {"num_samples": 16, "max_tokens": 2, "stop": [*"$?!;", fifth]}
        result, lines = generate(root, served, "judged", **short, rewards=rewards)
        num_asked = len(judge.asked)

    assert len(lines) == 192
    for line in lines:
        scores, text = line["rewards"], line["text"]
        assert scores["liked"] == rating(text), text
        assert scores["runs"] == runs(text), text
        if text.strip().isdecimal():
            assert scores["right"] == (int(text) == int(line["reference"]))
        elif not any(letter.isdecimal() or letter == "\\" for letter in text):
            assert scores["right"] == -1, text
        assert line["reward"] == pytest.approx(0.5 * scores["liked"] + 2 * scores["runs"] + scores["right"])
    assert {0.0, 1.0} == {line["rewards"]["runs"] for line in lines}, "or nothing is compared"
    assert len({line["rewards"]["right"] for line in lines}) > 1
    for name in rewards:
        mean = sum(line["rewards"][name] for line in lines) / len(lines)
        assert result.metrics[f"reward_{name}"] == pytest.approx(mean)
    assert len({(line["prompt"], line["text"]) for line in lines}) < num_asked <= 193, "with a trial"


def runs(code: str) -> float:
    """Return 1 if the Python code runs without an error, else 0."""
    try:
        exec(compile(code, "a few letters", "exec"), {})
    except Exception:
        return 0.0
    return 1.0


def test_choices_are_scored_by_the_log_probabilities_of_transformers(
    root: Path, served: Served, reference: Any
) -> None:
    model, tokenizer = reference

    result = evaluate_leased(root, served, "chosen", "choices", "long", apply_chat_template=False)

    rows = samples(root, "chosen", "choices")
    for row in rows:
        for (context, continuation), [[value, _]] in zip(row["arguments"], row["resps"], strict=True):
            context_length = len(tokenizer(context.rstrip()).input_ids)
            expected = sum(log_probabilities(model, tokenizer(context + continuation).input_ids)[context_length - 1 :])
            assert value == pytest.approx(expected, abs=1e-3)
    assert "1 of 38 prompts were cut" in (root / "chosen" / "log.txt").read_text()
    right = [best_choice(row) == row["doc"]["answer"] for row in rows]
    assert result.metrics["choices.acc"] == sum(right) / len(right)


def test_a_killed_evaluation_continues_where_it_was(root: Path, served: Served) -> None:
    stage_config = {"model": "serve", **evaluation(root, "sums", execution={"concurrent_requests": 2})}
    work = write_work(root / "killed", "evaluate", stage_config, {"serve": served.work}, leases=served.lease)
    before = served.client.counter(ANSWERED)
    with stage_process(work):
        wait_for(lambda: served.client.counter(ANSWERED) >= before + 40, what="the 40th answer")
    answered = served.client.counter(ANSWERED) - before
    assert answered < 120

    write_work(work, "evaluate", stage_config, {"serve": served.work}, leases=served.lease)
    run_to_the_end(work)

    asked_again = served.client.counter(ANSWERED) - before - answered - 1  # one for the check of the lease
    assert 0 < asked_again <= 120 - answered + 4  # at most what was under way when it was killed
    assert len(samples(root, "killed", "sums")) == 120


@pytest.mark.nightly
def test_without_a_lease_the_same_server_is_started_again(root: Path, served: Served) -> None:
    """An evaluation without a running server's lease starts the serve stage's server, with equal results.

    `make test` covers this by `test_an_evaluation_asks_the_adapter_that_it_names` in `test_serve_adapters.py`.
    """
    stage_config = {"model": "serve", **evaluation(root, "sums", limit=20)}

    alone = run_to_the_end(write_work(root / "alone", "evaluate", stage_config, {"serve": served.work}))

    leased = evaluate_leased(root, served, "leased", "sums", limit=20)
    assert alone.metrics == leased.metrics
    assert [row["resps"] for row in samples(root, "alone", "sums")] == [
        row["resps"] for row in samples(root, "leased", "sums")
    ]
    assert not served_processes(root / "alone")


def test_tasks_that_lm_eval_brings_are_found_by_name() -> None:
    assert select_tasks(("gsm8k", "mmlu"), None).needs_builtin
    with pytest.raises(Exception, match="'gsm9k'; did you mean gsm8k"):
        select_tasks(("gsm9k",), None)
