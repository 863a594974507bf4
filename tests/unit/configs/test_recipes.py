"""Every recipe under configs/ loads and plans offline; those for GPUs use exactly the GPUs that they are meant for."""

import importlib.util
import re
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from flows.planning.model_shape import published_shape
from flows.planning.plan import plan
from flows.recipe.recipe import load_recipe
from flows.store.record import Index
from stages.data.formats import RowReader
from stages.data.messages import Conversation
from stages.data.templates import ChatTemplate
from stages.models.linear_layers import Projection
from stages.parallel.engines.registry import RULES
from stages.planner.memory import memory
from stages.serving.vllm.servability import AttentionHeads, check_servable

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
GPUS = {
    "qwen3-0.6b-one-gpu": 1,
    "llama-3.1-8b-8gpu": 8,
    "qwen2.5-vl-7b-lora-one-gpu": 1,
    "gemma-3-4b-lora-one-gpu": 1,
    "qwen3-vl-8b-8gpu": 8,
}
MODELS = {
    "qwen3-0.6b-one-gpu": {"hidden": 1024, "inner": 3072, "queries": 16, "keys": 8, "head": 128},
    "llama-3.1-8b-8gpu": {"hidden": 4096, "inner": 14336, "queries": 32, "keys": 8, "head": 128},
    "qwen3-vl-8b-8gpu": {"hidden": 4096, "inner": 12288, "queries": 32, "keys": 8, "head": 128},
}
"""Sizes of published models, as in their config.json on the Hugging Face hub."""


def stages_of(name, kind):
    recipe = load_recipe(CONFIGS / f"{name}.yaml")
    return {stage: config for stage, config in recipe.stages.items() if config.kind == kind}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_everything_in_it_would_run_on_an_empty_store(path):
    recipe = load_recipe(path)
    outside = {stage: {"revision": "recorded"} for stage in recipe.stages}
    planned = plan(recipe, outside, Index(()))
    assert list(planned.stages) == list(recipe.stages)
    assert {stage.action for stage in planned.stages.values()} == {"run"}
    assert len({stage.version for stage in planned.stages.values()}) == len(planned.stages)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_named_as_its_file_and_finds_the_files_it_names(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem.replace(".", "-")
    named = [file for config in recipe.stages.values() for file in config.outside_paths().values()]
    assert [file for file in named if not file.exists()] == []


@pytest.mark.parametrize("name", GPUS)
def test_training_fills_the_gpus_and_no_more(name):
    for config in stages_of(name, "train").values():
        assert config.processes == config.layout.world_size == GPUS[name]
        assert config.precision == "bf16"


@pytest.mark.parametrize("name", MODELS)
def test_the_quantized_models_can_be_served(name):
    shape = MODELS[name]
    hidden, inner, keys = shape["hidden"], shape["inner"], shape["keys"] * shape["head"]
    queries = shape["queries"] * shape["head"]
    layers = [
        Projection("model.layers.0.self_attn.q_proj", queries, hidden),
        Projection("model.layers.0.self_attn.k_proj", keys, hidden),
        Projection("model.layers.0.self_attn.v_proj", keys, hidden),
        Projection("model.layers.0.self_attn.o_proj", hidden, queries),
        Projection("model.layers.0.mlp.gate_proj", inner, hidden),
        Projection("model.layers.0.mlp.up_proj", inner, hidden),
        Projection("model.layers.0.mlp.down_proj", hidden, inner),
    ]
    for config in stages_of(name, "quantize").values():
        check_servable(layers, AttentionHeads(shape["queries"], shape["keys"]), config.quantization, "cuda")


@pytest.mark.parametrize("name", GPUS)
def test_tasks_are_those_of_lm_eval(name):
    tasks = Path(importlib.util.find_spec("lm_eval").submodule_search_locations[0]) / "tasks"
    for config in stages_of(name, "evaluate").values():
        for task in config.tasks:
            texts = [path.read_text() for path in (tasks / task).rglob("*.yaml")]
            assert any(re.search(rf"^(task|group): {task}$", text, re.MULTILINE) for text in texts), task


def test_the_template_of_turns_marks_what_the_assistant_says_and_where_it_stops():
    path = CONFIGS / "templates/turns.jinja"
    template = ChatTemplate(path.read_text(), {"eos_token": "<END>"}, ["<END>"], path.name)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
    rendered = template.render(Conversation(messages))
    assert rendered.text == (
        "<|system|>\nBe brief.\n<|user|>\n1 + 1?\n<|assistant|>\n2<END>\n<|user|>\nAnd 2 + 2?\n<|assistant|>\n4<END>\n"
    )
    assert [rendered.text[begin:end] for begin, end in rendered.spans] == ["2<END>", "4<END>"]
    assert (
        template.render_text(Conversation(messages[:2]), add_generation_prompt=True)
        == rendered.text[: rendered.text.index("2<END>")]
    )


@pytest.mark.parametrize(("name", "end"), [("chatml-tools", "<|im_end|>"), ("turns-tools", "<END>")])
def test_templates_of_tools_show_definitions_calls_and_answers_and_mark_the_calls(name, end):
    path = CONFIGS / f"templates/{name}.jinja"
    template = ChatTemplate(path.read_text(), {"eos_token": "<END>"}, ["<END>", "<|im_end|>"], path.name)
    tools = [{"name": "add", "description": "Adds <b>.", "parameters": {"type": "object", "properties": {"a": {}}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 and 2 + 2?"},
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"name": "add", "arguments": {"a": [number] * 2}} for number in (1, 2)],
        },
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "2 and 4"},
    ]
    (conversation,) = RowReader("auto", "examples").read({"messages": messages, "tools": tools})
    rendered = template.render(conversation)
    calls = "".join(
        f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": [{number}, {number}]}}}}\n</tool_call>'
        for number in (1, 2)
    )
    assert [rendered.text[begin:end] for begin, end in rendered.spans] == [f"I add.{calls}{end}", f"2 and 4{end}"]
    (served,), _ = render_jinja_template(
        [conversation.messages], list(conversation.tools), chat_template=path.read_text(), eos_token="<END>"
    )
    assert rendered.text == served
    definition = '{"type": "function", "function": {"name": "add", "description": "Adds <b>.", "parameters": '
    assert "Be brief.\n\nFunctions that may be called:\n" + definition in rendered.text
    assert rendered.text.count("Be brief.") == rendered.text.count("Adds <b>.") == 1


SPLIT = {
    "gemma-3-27b-8gpu": ("gemma-3-27b", {"tp": 4, "dp_shard": 2}, 80),
    "gpt-oss-20b-8gpu": ("gpt-oss-20b", {"ep": 8, "dp_shard": 8}, 80),
    "glm-4.5-air-lora-16gpu": ("GLM-4.5-Air", {"ep": 8, "dp_shard": 16}, 80),
    "qwen3.5-27b-64k-16gpu": ("Qwen3.5-27B", {"tp": 4, "dp_shard": 4}, 139.8 / 0.9),  # tight
}
"""Model, degrees and GiB a GPU of recipes that split layers with FSDP2."""


@pytest.mark.parametrize("name", SPLIT)
def test_a_model_that_fsdp_splits_allows_the_layout_and_fits(name):
    model, degrees, gib = SPLIT[name]
    shape = published_shape(model)
    (config,) = stages_of(name, "train").values()
    assert config.layout.model_dump(include=set(degrees)) == degrees
    assert config.processes * config.execution.nodes == config.layout.world_size
    assert list(RULES[config.engine].model_errors(config.layout, shape)) == []
    assert list(RULES[config.engine].layout_warnings(config.layout, config.constraints, shape)) == []
    assert memory(shape, config.engine, config.layout, config.workload).peak_gib < 0.9 * gib
