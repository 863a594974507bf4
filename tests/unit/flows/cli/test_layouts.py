"""`lifecycle layouts` ranks and explains parallel layouts, and reports mistakes in its options."""

import json
import re
from pathlib import Path

import pytest

from flows.cli.main import main
from flows.compare.layouts import read_layouts
from flows.planning.layout_advice import parse_layout
from stages.core.errors import LayoutError, ModelError, RecipeError
from tests.unit.flows.compare.test_layouts import make_stage

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LAYOUT_FIELDS = {
    *("engine", "dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep"),
    *("micro_batch_size", "recompute", "sequence_parallel"),
}
PREDICTED_FIELDS = {"memory_gib", "step_time_s", "tokens_per_s_per_gpu", "mfu", "fits"}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def layouts(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["layouts", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def test_json_is_a_ranking_with_all_fields(layouts, config):
    code, out, _ = layouts(config, "--gpus", 16, "--gpu", "a100-80gb", "--tokens", 1e9, "--top", 3, "--json")
    answer = json.loads(out)
    assert code == 0 and len(answer["layouts"]) == 3
    assert all(set(row) >= (LAYOUT_FIELDS | PREDICTED_FIELDS) for row in answer["layouts"])
    times_s = [row["step_time_s"] + row["compilation_s_per_step"] for row in answer["layouts"]]
    assert times_s == sorted(times_s) and answer["not_compiled"] is None
    best = answer["layouts"][0]
    compiling_s = 1e9 / 1024 / 4096 * best["compilation_s_per_step"]
    assert best["gpu_hours"] == pytest.approx((1e9 / best["tokens_per_s_per_gpu"] + 16 * compiling_s) / 3600)
    assert sum(best["memory_parts_gib"].values()) == pytest.approx(best["memory_gib"])
    assert answer["why"] and answer["near_misses"]


def test_table_and_reasons_are_printed(layouts, config):
    code, out, _ = layouts(config.parent, "--gpus", 8, "--top", 2)
    assert code == 0
    for words in ("tok/s/GPU", "MFU", "why:", "near misses:", "lacks", "slower:"):
        assert words in out


def test_where_nothing_fits_what_is_missing_and_what_would_fit_is_said(layouts):
    code, out, _ = layouts("Llama-3.1-405B", "--gpus", 1, "--top", 1)
    nearest, would = out.partition("offloading either; nearest is ")[2].splitlines()[:2]
    assert code == 0 and re.search(r"lacks host memory: 6,\d+\.\d of 2,048\.0 GiB", nearest)
    assert would == "would fit: 32 devices to train on (--gpus) or LoRA adapters (--lora-rank 16)"


def test_one_layout_is_explained_by_stage_and_part(layouts, config):
    explain = ("--explain", "tp=4,pp=2,micro_batch_size=2")
    _, out, _ = layouts(config, "--gpus", 8, *explain, "--json")
    answer = json.loads(out)
    assert (answer["layout"]["engine"], answer["layout"]["tp"], answer["layout"]["dp_shard"]) == ("megatron", 4, 1)
    totals = [stage["total"] for stage in answer["stages_memory_gib"]]
    assert len(totals) == 2 and max(totals) == pytest.approx(answer["layout"]["memory_gib"])
    _, out, _ = layouts(config, "--gpus", 8, *explain)
    assert "tensor parallel" in out and "bubble" in out


def test_stages_of_equal_memory_keep_their_numbers(layouts, config):
    _, out, _ = layouts(config, "--gpus", 4, "--global-batch-size", 1, "--explain", "pp=4")
    table = out.partition("memory of a rank")[2].partition("step:")[0].splitlines()[2:]
    assert [line.split()[0] for line in table] == ["0", "1", "2", "3"]
    assert table[1].split()[1:] == table[2].split()[1:]
    assert "warning: layout: 1 micro-batches for pp 4 stages" in out


def test_a_recipe_brings_its_batch_and_its_tokens(layouts, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        """
stages:
  base: {kind: download, model: builtin/qwen3-1m}
  data: {kind: download, dataset: builtin/addition}
  sft:
    {kind: train, method: sft, model: base, data: {dataset: data, sequence_length: 128}, steps: 10, precision: fp32,
     global_batch_size: 8, learning_rate: 1e-3}
"""
    )
    answer = json.loads(layouts(recipe, "--gpus", 2, "--gpu", "cpu", "--json")[1])
    assert (answer["sequence_length"], answer["global_batch_size"], answer["precision"]) == (128, 8, "fp32")
    best = answer["layouts"][0]
    assert best["days"] * 86400 == pytest.approx(10 * best["step_time_s"])


def test_gpus_of_a_server_that_samples_do_not_train(layouts):
    recipe = Path(__file__).parents[4] / "configs" / "quickstart-grpo.yaml"
    answer = json.loads(layouts(recipe, "--stage", "grpo", "--gpus", 5, "--json")[1])
    assert answer["gpus"] == 4
    code, _, problem = layouts(recipe, "--stage", "grpo", "--gpus", 1)
    assert code == 3
    assert "--gpus is 1, of which the server that samples takes 1" in problem


ADAPTED = """
stages:
  base: {kind: download, model: builtin/qwen3-1m}
  data: {kind: download, dataset: builtin/addition}
  sft:
    kind: train
    method: sft
    model: base
    data: {dataset: data, sequence_length: 128}
    global_batch_size: 8
    learning_rate: 1.0e-3
"""


def test_what_a_recipe_says_of_its_adapter_counts(layouts, tmp_path):
    def states_gib(adapter, *options):
        recipe = tmp_path / "r.yaml"
        recipe.write_text(ADAPTED + (f"    adapter: {adapter}\n" if adapter else ""))
        answer = json.loads(layouts(recipe, "--gpus", 1, "--engine", "fsdp", "--json", *options)[1])
        parts = answer["layouts"][0]["memory_parts_gib"]
        return parts["weights"] + parts["gradients"] + parts["optimizer"]

    queries = "rank: 2, target_modules: [q_proj]"
    nf4, bf16 = states_gib(f"{{{queries}, base_precision: nf4}}"), states_gib(f"{{{queries}}}")
    assert 3 * nf4 < bf16 < states_gib("{rank: 2}")
    assert states_gib("{rank: 2}") < states_gib("{rank: 8}") == states_gib("{rank: 2}", "--lora-rank", 8)
    assert states_gib("{rank: 8}") == states_gib(None, "--lora-rank", 8) < states_gib(None) / 2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("--gpus", 0), RecipeError, "--gpus is 0"),
        (("--gpus", 8, "--seq-len", -1), RecipeError, "--seq-len is -1"),
        (("--gpus", 8, "--gpu", "h1000"), RecipeError, "h100-80gb"),
        (("--gpus", 7, "--engine", "fsdp"), LayoutError, "nearest number that has one: 8"),
        (("--gpus", 8, "--explain", "tpp=2"), LayoutError, "did you mean `tp`"),
        (("--gpus", 8, "--explain", "tp=0"), LayoutError, "tp"),
        (("--gpus", 3, "--explain", "tp=3"), LayoutError, "32 attention heads"),
    ],
)
def test_what_cannot_be_meant_is_named(layouts, config, arguments, error, words):
    code, _, err = layouts(config, *arguments)
    assert code == error.exit_code
    assert words in err and "Traceback" not in err


def test_a_config_that_lacks_something_is_refused_by_name(layouts, config):
    config.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != "vocab_size"}))
    code, _, err = layouts(config, "--gpus", 8)
    assert code == ModelError.exit_code and "vocab_size is missing" in err


def test_text_that_is_no_config_is_refused(layouts, config):
    config.write_text("{")
    assert layouts(config, "--gpus", 8)[0] == ModelError.exit_code


def test_without_a_model_the_usage_is_shown(layouts):
    assert layouts()[0] == 2


@pytest.mark.parametrize(
    "line", ["tp=4", "tp=2 pp=2", "dp_shard=4", "recompute=full dp_replicate=4", "tp=2,cp=2,sequence_parallel=true"]
)
def test_a_line_means_the_same_layout_as_in_a_comparison(line):
    stage = make_stage(data={"dataset": "problems", "sequence_length": 512})
    ((config,), _) = read_layouts([line], stage)
    assert parse_layout(line, 4) == (config.engine, config.layout)


def test_the_engine_is_that_of_the_line_or_of_its_fields():
    assert parse_layout("megatron dp_replicate=8", 8)[0] == "megatron"
    assert parse_layout("tp=2 pp=2 dp_shard=2", 8)[0] == "megatron"
    assert parse_layout("dp_shard=8 tp=1", 8)[0] == "fsdp"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [("tp=4", "write dp_shard=2, or --gpus 4"), ("recompute=full", "write dp_shard=8"), ("tp=3", "change one of")],
)
def test_a_layout_that_does_not_use_all_gpus_is_told_what_to_write(line, remedy):
    with pytest.raises(LayoutError, match=f"processes, for 8 GPUs; {remedy}"):
        parse_layout(line, 8)


def test_a_model_that_no_engine_trains_is_refused_by_what_it_has(layouts):
    code, _, err = layouts("deepseekv3", "--gpus", "64")
    assert code == ModelError.exit_code
    assert "no engine here trains latent attention" in err and "predict_table.py" in err
