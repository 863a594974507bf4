"""Servers that cannot start, or whose context is too short for their benchmark, are refused when a plan is made."""

import json
import socket
from pathlib import Path

import pytest

from flows.running.request import RefreshRequest, make_plan
from stages.core.errors import RecipeError

CONFIGS = Path(__file__).parents[4] / "configs"
POSITIONS = 2048
"""Longest text that `builtin/qwen3-1m` can process, in tokens."""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))

    def run(stage="serve", model=None, at_once=False, **fields):
        base = {"kind": "download", "model": f"file://{model}" if model else "builtin/qwen3-1m"}
        kind = {"kind": "serve"} if stage == "serve" else {"kind": "evaluate", "tasks": ["addition"]}
        task_folder = {} if stage == "serve" else {"task_folder": str(CONFIGS / "tasks")}
        tree = {"base": base, stage: {**kind, **task_folder, "model": "base", **fields}}
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({"stages": tree}))
        return make_plan(RefreshRequest(str(path)), may_be_unreachable=at_once)

    return run


@pytest.mark.parametrize("stage", ["serve", "scores"])
def test_steps_of_vllm_on_a_cpu_that_are_shorter_than_a_prompt(plan, stage):
    shorter = {"max-num-batched-tokens": POSITIONS - 1}
    found = "max-num-batched-tokens: found 2047, but prompts may have 2048 tokens"
    with pytest.raises(RecipeError, match=rf"stages\.{stage}\.serving\.arguments\.{found}"):
        plan(stage, at_once=True, serving={"arguments": shorter})
    assert plan(stage, at_once=True, serving={"arguments": shorter, "max_model_len": POSITIONS - 1})
    assert plan(stage, at_once=True, serving={"arguments": {**shorter, "enable-chunked-prefill": True}})


@pytest.mark.parametrize(
    ("stage", "host"),
    [("serve", "203.0.113.1"), ("serve", "2001:db8::1"), ("serve", "no-such-host.invalid"), ("scores", "203.0.113.1")],
)
def test_a_host_of_another_machine(plan, stage, host):
    with pytest.raises(RecipeError, match=rf"stages\.{stage}\.execution\.host: cannot listen on {host}"):
        plan(stage, execution={"host": host})


@pytest.mark.parametrize("host", ["-1", "--uds=/tmp/x", "a b", ""])
def test_a_host_that_is_none(plan, host):
    with pytest.raises(RecipeError, match=r"execution\.host"):
        plan(execution={"host": host})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", socket.gethostname()])
def test_hosts_of_this_machine(plan, host):
    assert plan(execution={"host": host})


def test_the_host_of_a_clusters_node_is_not_this_machines(plan):
    assert plan("scores", execution={"host": "203.0.113.1", "launcher": "slurm"})


@pytest.mark.parametrize("stage", ["serve", "scores"])
def test_more_tokens_than_the_model_has_positions(plan, stage):
    message = rf"stages\.{stage}\.serving\.max_model_len: {POSITIONS + 1}, but the model has {POSITIONS} positions"
    with pytest.raises(RecipeError, match=message):
        plan(stage, serving={"max_model_len": POSITIONS + 1})
    assert plan(stage, serving={"max_model_len": POSITIONS})


def test_more_tokens_are_allowed_where_vllm_is_told_so(plan):
    allowed = {"environment": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}
    assert plan(serving={"max_model_len": POSITIONS + 1}, execution=allowed)


def test_a_benchmark_that_is_longer_than_the_server_or_the_model(plan):
    long = {"input_tokens": POSITIONS, "output_tokens": 13}
    with pytest.raises(RecipeError, match=r"are 2061 together, but the model has 2048 positions"):
        plan(serving={}, benchmark=long)
    with pytest.raises(RecipeError, match=r"are 2061 together, more than serving\.max_model_len, 256"):
        plan(serving={"max_model_len": 256}, benchmark=long)


def test_a_benchmark_of_nothing(plan):
    with pytest.raises(RecipeError, match=r"benchmark\.concurrencies"):
        plan(benchmark={"concurrencies": []})


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 400),
        ({"rope_type": "linear", "factor": None}, 100),
        ({"rope_type": "dynamic", "factor": 2.0}, 200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "llama3", "factor": 8.0}, 100),
        ({"rope_type": "longrope", "factor": 8.0}, 100),
        (None, 100),
    ],
)
def test_rotary_embeddings_stretch_it_as_they_do_in_vllm(plan, tmp_path, rope, positions):
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 100, "rope_scaling": rope}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").touch()
    with pytest.raises(RecipeError, match=f"but the model has {positions} positions"):
        plan(model=model, serving={"max_model_len": positions + 1}, benchmark=None)


@pytest.mark.parametrize("stage", ["serve", "scores"])
@pytest.mark.parametrize(
    ("serving", "found"),
    [
        (
            {"tensor_parallel_size": 3},
            r"tensor_parallel_size: 3 ranks, but the model's 4 attention heads \(2 of keys\)",
        ),
        ({"tensor_parallel_size": 8}, r"tensor_parallel_size: 8 ranks, .* 1 or 2 or 4 can"),
        ({"kv_cache_memory_gib": 1e-4}, r"kv_cache_memory_gib: 0\.0001, but a request of 2048 tokens, .* 0\.00195 GiB"),
    ],
)
def test_ranks_and_memory_that_do_not_suit_the_model(plan, stage, serving, found):
    with pytest.raises(RecipeError, match=rf"stages\.{stage}\.serving\.{found}"):
        plan(stage, serving=serving)


def test_ranks_and_memory_that_suffice(plan):
    assert plan(serving={"tensor_parallel_size": 4, "kv_cache_memory_gib": 0.001, "max_model_len": 256})


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """Provide a function that installs a vLLM whose interpreter is a shell script, for plans to ask its parser."""
    environment = tmp_path / "environment"
    package = environment / "lib" / "python3.12" / "site-packages" / "vllm-0.32.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    (environment / "bin").mkdir()
    monkeypatch.setenv("LIFECYCLE_VLLM", str(environment / "bin" / "vllm"))

    def install(script):
        for name in ("vllm", "python"):
            (environment / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (environment / "bin" / name).chmod(0o755)

    return install


def test_a_plan_does_not_wait_for_the_parser_of_arguments(plan, vllm):
    """A plan that may not wait notes unchecked options, and has the parser's answer once another plan has asked.

    `test_arguments.py` asks the real parser, which takes eight seconds of processor time.
    """
    problem = "block-siz: vLLM has no such option; did you mean block-size?"
    vllm(f"cat > /dev/null; echo '{json.dumps([problem])}'")
    serving = {"arguments": {"block-siz": 16}}
    note = "stages.serve.serving.arguments: whether vLLM takes them is asked when it runs"
    assert note in plan(serving=serving, at_once=True).notes
    with pytest.raises(RecipeError, match="block-siz: vLLM has no such option; did you mean block-size"):
        plan(serving=serving)
    vllm("exit 1")
    with pytest.raises(RecipeError, match="did you mean block-size"):  # it is known now
        plan(serving=serving, at_once=True)


def test_arguments_that_nobody_could_check_are_named_with_the_reason(plan, vllm):
    """Engine arguments that could not be checked are reported in the plan, with the reason.

    The engine's own parser fails here, as does a build for GPUs that cannot be imported.
    """
    vllm("echo 'ImportError: no libcuda.so.1' >&2; exit 1")
    (note,) = plan(serving={"arguments": {"block-siz": 16}}).notes
    assert note.startswith("stages.serve.serving.arguments: whether vLLM takes them was not checked: its parser does n")
    assert "ImportError: no libcuda.so.1" in note


@pytest.mark.parametrize("stage", ["serve", "scores"])
def test_arguments_that_would_open_a_door(plan, stage):
    message = rf"stages\.{stage}\.serving\.arguments\.api-key: it would open a door"
    with pytest.raises(RecipeError, match=message):
        plan(stage, serving={"arguments": {"api_key": "sk-1"}})


@pytest.mark.parametrize("stage", ["serve", "scores"])
def test_a_parser_of_calls_that_vllm_lacks_is_named_by_a_plan_at_once(plan, stage):
    expected = rf"^stages\.{stage}\.serving\.tool_call_parser: vLLM has no such parser; did you mean hermes\? It has "
    with pytest.raises(RecipeError, match=expected):
        plan(stage, at_once=True, serving={"tool_call_parser": "hermse"})
    with pytest.raises(RecipeError, match=rf"{stage}\.serving\.arguments\.tool-call-parser: vLLM has no such parser"):
        plan(stage, at_once=True, serving={"arguments": {"tool-call-parser": "hermse"}})
    assert plan(stage, at_once=True, serving={"tool_call_parser": "hermes"})
