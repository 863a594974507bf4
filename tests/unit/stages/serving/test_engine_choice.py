"""The engine of a recipe is chosen, and options that it does not support are refused, when the recipe is read."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.planning.checks import check_idle
from flows.recipe.recipe import Recipe, load_recipe
from stages.core.errors import RecipeError
from stages.serving.llama_cpp.engine import LlamaCppProgram
from stages.serving.registry import ENGINES
from tests.serving import write_tasks

BASE = {"kind": "download", "model": "builtin/qwen3-1m"}
DATA = {"kind": "download", "dataset": "builtin/addition"}
GGUF = {
    "kind": "quantize",
    "model": "base",
    "method": "gguf",
    "gguf_type": "q8_0",
    "calibration": {"dataset": "problems"},
}
LORA = {
    "kind": "train",
    "method": "sft",
    "model": "base",
    "data": {"dataset": "problems"},
    "adapter": {},
    "global_batch_size": 1,
    "learning_rate": 1e-3,
}
GRPO = {
    "kind": "train",
    "method": "grpo",
    "model": "base",
    "data": {"dataset": "problems"},
    "global_batch_size": 2,
    "learning_rate": 1e-3,
    "grpo": {
        "num_generations": 2,
        "max_completion_length": 4,
        "rewards": {"right": {"type": "exact_match"}},
        "serving": {"engine": "llama_cpp"},
    },
}


LMDEPLOY = {"engine": "lmdeploy"}


@pytest.fixture
def read(tmp_path: Path):
    write_tasks(tmp_path / "tasks")

    def recipe(**stages: dict[str, Any]) -> Recipe:
        tree = {"stages": {"base": BASE, "problems": DATA, "small": GGUF, **stages}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return load_recipe(tmp_path / "recipe.yaml")

    return recipe


def evaluate(model: str, *tasks: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "evaluate", "model": model, "tasks": [*tasks], "task_folder": "tasks", **fields}


def test_gguf_files_are_served_by_llama_cpp_unless_asked(read, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ENGINES["llama_cpp"]
    monkeypatch.setattr(type(engine), "find_program", lambda _: LlamaCppProgram(Path("python"), "2026.10"))
    recipe = read(
        served={"kind": "serve", "model": "small"},
        leased=evaluate("served", "sums"),
        own=evaluate("small", "sums"),
        plain={"kind": "serve", "model": "base"},
    )

    assert recipe.stages["served"].serving.engine == recipe.stages["own"].serving.engine == "llama_cpp"
    assert recipe.stages["plain"].serving.engine is None
    for name in ("served", "leased", "own"):
        assert recipe.stages[name].resolve_outside(0).items() >= {("llama_cpp_version", "2026.10")}


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (
            {"kind": "serve", "model": "small", "serving": {"engine": "vllm"}},
            "serving.engine: vllm serves safetensors, but small makes gguf; say `engine: llama_cpp`",
        ),
        (
            {"kind": "serve", "model": "base", "serving": {"engine": "llama_cpp"}},
            "serving.engine: llama_cpp serves gguf, but base makes safetensors; make one of it",
        ),
        (evaluate("base", "sums", serving={"engine": "llama_cpp"}), "serving.engine: llama_cpp serves gguf, but base"),
        (
            evaluate("small", "choices"),
            r"tasks: choices compare log-likelihoods of given answers, and llama.cpp returns",
        ),
        (GRPO, "grpo.serving.engine: llama_cpp cannot load new weights while it runs; say `engine: vllm`"),
        (
            {**GRPO, "grpo": {**GRPO["grpo"], "serving": {"engine": "sglang"}}},
            "grpo.serving.engine: sglang cannot load new weights while it runs; say `engine: vllm`",
        ),
        (
            {"kind": "serve", "model": "small", "serving": {"engine": "sglang"}},
            "serving.engine: sglang serves safetensors, but small makes gguf",
        ),
        (
            evaluate("base", "choices", serving=LMDEPLOY),
            "tasks: choices compare log-likelihoods of given answers, and LMD",
        ),
        (
            evaluate("base", "sums", serving=LMDEPLOY, harness="evalscope", generation={"stop": ["Q:"]}),
            "generation.stop: LMDeploy ends no answer at a text of several tokens",
        ),
        (
            {"kind": "evaluate", "model": "base", "tasks": ["t"], "serving": LMDEPLOY, "harness": "judge"},
            "harness: the judge asks by token ids, which LMDeploy does not take for a prompt",
        ),
        (
            {"kind": "generate", "model": "base", "prompts": {"dataset": "problems"}, "serving": LMDEPLOY},
            "model: completions are asked for by token ids, which LMDeploy does not take for a prompt",
        ),
        (
            {"kind": "serve", "model": "base", "serving": {**LMDEPLOY, "dtype": "float32"}},
            "serving.dtype: lmdeploy computes in bfloat16 or float16, not in float32",
        ),
        ({**LORA, "adapter": None, "model": "small"}, "small is quantized, and quantized weights cannot be trained"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(read, stage: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        read(wrong=stage)


def test_tasks_of_a_server_are_those_that_its_engine_can_run(read) -> None:
    served = {"kind": "serve", "model": "small"}

    with pytest.raises(RecipeError, match=r"stages\.asked\.tasks: choices compare"):
        read(served=served, asked=evaluate("served", "sums", "choices"))
    assert "asked" in read(served=served, asked=evaluate("served", "sums", "long")).stages


@pytest.mark.parametrize(("engine", "task"), [("sglang", "choices"), ("lmdeploy", "sums")])
def test_an_engine_may_serve_no_adapters_and_run_the_tasks_that_it_can(read, engine: str, task: str) -> None:
    with pytest.raises(RecipeError, match=rf"serving\.engine: {engine} serves no adapters; merge them first"):
        read(lora=LORA, wrong={"kind": "serve", "model": "lora", "serving": {"engine": engine}})
    assert "asked" in read(asked=evaluate("base", task, serving={"engine": engine})).stages


@pytest.mark.parametrize("option", [{"dtype": "float32"}, {"tensor_parallel_size": 2}, {"enforce_eager": True}])
def test_options_that_an_engine_does_not_have_are_refused(read, option: dict[str, Any]) -> None:
    recipe = read(served={"kind": "serve", "model": "small", "serving": {"max_num_seqs": 2, **option}})

    with pytest.raises(RecipeError, match=rf"stages\.served\.serving\.{next(iter(option))}: .* llama.cpp has no such"):
        check_idle(recipe, ["served"])
