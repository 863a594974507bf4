"""A real vLLM that serves a base model and its adapters, each under its own name, answers as PEFT does.

Most tests ask one server. What vLLM itself gets wrong with adapters is provoked here; each such test fails without the
remedy that `stages/serving/vllm/adapters.py` names.
"""

import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from stages.core.contract import StageContext, StageResult
from stages.core.errors import ServerError
from stages.data.config import DataConfig
from stages.data.look import NullReporter
from stages.data.prepare import prepare
from stages.kinds.download.config import DownloadConfig
from stages.kinds.download.run import run as run_download
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.promote.run import run as run_promotion
from stages.kinds.promote.verdict import CHAMPION_FILE, VERDICT_FILE, ComparedChampion, Verdict
from stages.models.facts import ModelFacts
from stages.models.recorded import RECORD, Predicted
from stages.serving.agreement import compare_with_records
from stages.serving.client import Client
from stages.serving.engine import LaunchSpec
from tests.served_adapters import DOCUMENTS, adapted, greedy, load, log_probabilities, make_adapter, write_record
from tests.serving import (
    API_KEY,
    SERVING,
    make_model,
    run_to_the_end,
    served_processes,
    stage_process,
    wait_for,
    write_tasks,
    write_work,
)

NUM_TOKENS = 12
NAMES = ("sft", "wide", "narrow")
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name + call.function.arguments | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CONFIG = {"model": "sft", "adapters": ["wide", "narrow"], "serving": SERVING, "benchmark": None}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    base = root / "sft" / "model"
    make_model(base)
    (base / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    write_record(load(base), root / "sft")
    record_tool_prompt(root / "sft", root / "rows")
    make_adapter(base, root / "wide", rank=12)  # no size of vLLM's
    make_adapter(base, root / "elsewhere", "q_proj", "v_proj", rank=3, seed=1)
    adopt(root / "elsewhere" / "adapter", root / "sft", root / "narrow")
    write_tasks(root / "tasks")
    return root


def record_tool_prompt(artifact: Path, folder: Path) -> None:
    """Add a training prompt with tools to a model's record; its JSON has unsorted keys and no `function` wrapper."""
    call = {"name": "f", "arguments": {"b": 1, "a": "<"}}
    messages = [
        {"role": "user", "content": "f?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    row = {"messages": messages, "tools": [{"parameters": {"b": {}, "a": {}}, "name": "f"}]}
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    prepared = prepare(
        folder,
        DataConfig(dataset="rows", sequence_length=256),
        ModelFacts(artifact / "model"),
        rows="examples",
        cache=folder / "cache",
        report=NullReporter(),
        bad_rows_file=folder / "bad_rows.jsonl",
    )
    content = json.loads((artifact / RECORD).read_text())
    content["tool_prompts"] = [one.model_dump() for one in prepared.training.about.tool_prompts]
    (artifact / RECORD).write_text(json.dumps(content))


def adopt(folder: Path, base: Path, work: Path) -> None:
    """Import an adapter that was trained elsewhere into the work folder of a download stage."""
    config = DownloadConfig(kind="download", adapter=f"file://{folder}", base="sft")
    work.mkdir()
    run_download(
        config, StageContext(work, "narrow", "0" * 12, {"sft": base}, {}, work.parent, config.resolve_outside())
    )


@pytest.fixture(scope="module")
def result(root: Path) -> Iterator[StageResult]:
    """Provide the result of a serve stage whose server is running."""
    work = write_work(root / "serve", "serve", CONFIG, {name: root / name for name in NAMES})
    with stage_process(work) as process:
        wait_for(lambda: (work / "result.json").exists() or process.poll() is not None, what="the lease")
        assert process.poll() is None, (work / "log.txt").read_text()[-3000:]
        yield StageResult.model_validate_json((work / "result.json").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


@pytest.fixture(scope="module")
def client(result: StageResult) -> Client:
    """Provide a client of the served base model; `replace(client, model=…)` makes a client of an adapter."""
    assert result.lease
    return Client(result.lease.url, API_KEY, "sft")


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, Any]:
    """Provide the models of the server as Transformers and PEFT load them, to compare with, by served name."""
    base = root / "sft" / "model"
    return {"sft": load(base), **{name: adapted(base, root / name) for name in NAMES[1:]}}


def answer(client: Client, name: str, tokens: list[int]) -> list[int]:
    choice = replace(client, model=name).complete(tokens, max_tokens=NUM_TOKENS, ignore_eos=True, return_token_ids=True)
    assert choice.token_ids
    return choice.token_ids


def test_each_is_a_model_name_and_answers_as_peft_does(client: Client, references: dict[str, Any]) -> None:
    assert client.model_names() == list(NAMES)
    for name, model in references.items():
        rows = list(DOCUMENTS)
        for served, row in zip(replace(client, model=name).predictions(rows), rows, strict=True):
            assert served.log_probabilities == pytest.approx(log_probabilities(model, row), abs=1e-4)
            assert answer(client, name, row) == greedy(model, row, NUM_TOKENS)
    assert log_probabilities(references["wide"], DOCUMENTS[0]) != pytest.approx(
        log_probabilities(references["sft"], DOCUMENTS[0]), abs=0.1
    )


def test_the_stage_logs_how_far_each_is_from_what_training_recorded(result: StageResult, root: Path) -> None:
    for end in ("", "_wide", "_narrow"):
        assert result.metrics[f"max_abs_logprob_difference{end}"] < 1e-4
        assert result.metrics[f"mean_abs_logprob_difference{end}"] <= result.metrics[f"max_abs_logprob_difference{end}"]
        assert result.metrics[f"kl_from_training_nats_per_token{end}"] < 1e-6
        assert result.metrics[f"same_greedy_fraction{end}"] == 1
    assert "wide differs from what training recorded by" in (root / "serve" / "log.txt").read_text()


def test_a_prompt_with_tools_is_served_as_it_was_learned_or_a_warning_shows_where_it_is_not(
    client: Client, result: StageResult, root: Path, tmp_path: Path
) -> None:
    assert result.metrics["differing_tool_prompts"] == 0
    assert "differing_tool_prompts_wide" not in result.metrics
    spec = LaunchSpec.model_validate_json((root / "serve" / "launch.json").read_bytes())
    shutil.copytree(root / "sft", tmp_path / "sft")
    content = json.loads((tmp_path / "sft" / RECORD).read_text())
    (prompt,) = content["tool_prompts"]
    tokenizer = AutoTokenizer.from_pretrained(root / "sft" / "model")
    learned = tokenizer.decode(prompt["token_ids"])
    assert learned.startswith('{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b"')
    assert learned.endswith("tool: 3assistant: ")
    prompt["token_ids"] = tokenizer.encode(learned.replace('"description": null, ', ""))
    (tmp_path / "sft" / RECORD).write_text(json.dumps(content))
    warnings: list[str] = []
    moved = spec.model_copy(update={"model": tmp_path / "sft" / "model"})
    found = compare_with_records(client, moved, ["sft"], 256, warnings.append)["sft"]
    assert found.metrics()["differing_tool_prompts"] == 1
    assert "learned 'parameters" in warnings[0] and "is asked 'description\": null" in warnings[0], warnings
    compare_with_records(client, moved, ["sft"], 100, warnings.append)
    assert "was not asked how it renders prompts with tools, since they do not fit into its 100 tokens" in warnings[1]


def test_a_request_may_have_tools_where_the_template_writes_calls(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    question = [{"role": "user", "content": "Call f."}]

    assert client.prompt_tokens(question, tools=tools, tool_choice="auto")


def test_log_probabilities_of_prompts_in_one_batch_do_not_end_the_engine(client: Client) -> None:
    with ThreadPoolExecutor(6) as pool:
        for name in NAMES * 2:
            pool.submit(replace(client, model=name).predictions, list(DOCUMENTS)).result()
        many = [pool.submit(replace(client, model=name).predictions, list(DOCUMENTS)) for name in NAMES * 4]
        assert all(one.result() for one in many)
    assert client.is_healthy()


def test_the_base_is_asked_among_requests_to_all_adapters_and_stays_the_base(
    client: Client, references: dict[str, Any]
) -> None:
    wanted = {name: greedy(model, DOCUMENTS[1], NUM_TOKENS) for name, model in references.items()}
    with ThreadPoolExecutor(12) as pool:
        asked = [(name, pool.submit(answer, client, name, DOCUMENTS[1])) for name in NAMES * 8]
        assert [(name, one.result()) for name, one in asked] == [(name, wanted[name]) for name, _ in asked]


def evaluate(root: Path, result: StageResult, work: str, **config: Any) -> StageResult:
    assert result.lease
    stage_config = {
        "tasks": ["sums"],
        "task_folder": str(root / "tasks"),
        "limit": 6,
        "apply_chat_template": True,
        **config,
    }
    inputs = {"serve": root / "serve", **{name: root / name for name in NAMES}}
    lease = {"serve": result.lease.model_dump(mode="json")}
    return run_to_the_end(write_work(root / work, "evaluate", stage_config, inputs, leases=lease))


def samples(root: Path, work: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / work / "samples" / "sums.jsonl").read_text().splitlines()]


def test_an_evaluation_asks_the_adapter_that_it_names(root: Path, result: StageResult, references: Any) -> None:
    """An evaluation gets its answers from the adapter that it names, not from another one on the same server."""
    tokenizer = AutoTokenizer.from_pretrained(root / "sft" / "model")

    def text(name: str, prompt: Any) -> str:
        made = references[name].generate(input_ids=prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        return str(tokenizer.decode(made, skip_special_tokens=True)).split("\n")[0]

    leased = evaluate(root, result, "leased", model="serve", adapter="narrow")
    is_told_apart = False
    for row in samples(root, "leased"):
        messages = [{"role": "user", "content": row["doc"]["question"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
        assert row["resps"][0][0] == text("narrow", prompt)
        is_told_apart |= all(text("narrow", prompt) != text(other, prompt) for other in ("sft", "wide"))
    assert is_told_apart, "the base, or the other adapter, would have passed as well"
    logged = json.loads((root / "leased" / "metrics.jsonl").read_text().splitlines()[0])
    assert logged["max_abs_logprob_difference"] < 1e-4

    alone = evaluate(root, result, "alone", model="narrow", base="sft", serving=SERVING)
    assert alone.metrics == leased.metrics
    assert [row["resps"] for row in samples(root, "alone")] == [row["resps"] for row in samples(root, "leased")]
    assert not served_processes(root / "alone")


def promote(root: Path, work: Path, most: float) -> Verdict:
    """Run the promote stage on an adapter with a bound on its log-probability difference, and return the decision."""
    (root / "narrow" / "result.json").write_text(StageResult().model_dump_json())
    (work / CHAMPION_FILE).write_text(ComparedChampion(champion=None).model_dump_json())
    config = PromoteConfig.model_validate(
        {
            **{"kind": "promote", "name": "sums", "model": "narrow", "evaluations": ["leased"], "server": "serve"},
            "gates": {"max_abs_logprob_difference": most},
        }
    )
    inputs = {name: root / name for name in ("narrow", "leased", "serve")}
    run_promotion(config, StageContext(work, "promote", "0" * 12, inputs, {}, work))
    return Verdict.model_validate_json((work / VERDICT_FILE).read_bytes())


def test_a_promotion_is_bounded_by_what_its_server_gives_and_training_gave(
    root: Path, result: StageResult, tmp_path: Path
) -> None:
    if not (root / "leased").exists():
        evaluate(root, result, "leased", model="serve", adapter="narrow")
    assert promote(root, tmp_path, 1e-4).outcome == "promoted"
    missed = promote(root, tmp_path, 1e-12)
    assert missed.outcome == "not promoted"
    found = result.metrics["max_abs_logprob_difference_narrow"]
    assert missed.missed[0].startswith(f"max_abs_logprob_difference {found:.4g} > 1e-12")


def test_an_adapter_that_does_nothing_is_an_error(client: Client, root: Path, tmp_path: Path) -> None:
    spec = LaunchSpec.model_validate_json((root / "serve" / "launch.json").read_bytes())
    # The record of one, the weights of another: as if the server had taken the base, or left layers out.
    lost = tmp_path / "lost"
    shutil.copytree(root / "wide", lost)
    idle = spec.model_copy(update={"adapters": {"sft-too": lost / "adapter"}})
    with pytest.raises(ServerError, match="does not list sft-too; it has sft, wide, narrow"):
        compare_with_records(client, idle, ["sft-too"], 256, pytest.fail)

    class Base(Client):
        """Client that always asks the base model, as if the served adapters had no effect."""

        def predictions(self, rows: list[list[int]]) -> list[Predicted]:
            return Client(self.url, self.api_key, "sft").predictions(rows)

    with pytest.raises(ServerError, match="the adapter wide does nothing where it is served"):
        compare_with_records(Base(client.url, API_KEY, "wide"), spec, ["wide"], 256, pytest.fail)
