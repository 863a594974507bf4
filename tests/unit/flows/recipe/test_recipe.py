"""All errors of a recipe are reported at once, before any stage starts; a valid recipe becomes a sorted DAG."""

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator, Draft202012Validator

from flows.recipe.editors import editor_schema
from flows.recipe.recipe import Recipe, json_schema, load_recipe
from flows.recipe.text import without_secrets
from stages.core.errors import RecipeError

CONFIGS = Path(__file__).parents[4] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"

RECIPE = """
name: small
stages:
  tuned:
    kind: train
    method: sft
    model: base
    data: {dataset: problems}
    global_batch_size: 8
    learning_rate: 1e-4
  base: {kind: download, model: builtin/qwen3-1m}
  problems: {kind: download, dataset: builtin/addition}
  quantized:
    kind: quantize
    model: tuned
    method: awq
    calibration: {dataset: problems}
  served: {kind: serve, model: quantized}
  scores: {kind: evaluate, model: served, tasks: [addition], task_folder: tasks}
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str = RECIPE, *overrides: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)

    return load


@pytest.fixture
def problems(load):
    def problems(text: str = RECIPE, *overrides: str) -> str:
        with pytest.raises(RecipeError) as caught:
            load(text, *overrides)
        return str(caught.value)

    return problems


def test_stages_come_in_topological_order(load):
    recipe = load()
    assert list(recipe.stages) == ["base", "problems", "tuned", "quantized", "served", "scores"]
    assert recipe.upstream_of("quantized") == ("tuned", "problems")
    assert recipe.ancestors_of("quantized") == ("base", "problems", "tuned")
    assert recipe.dependents_of("tuned") == ("quantized", "served", "scores")


def test_a_recipe_says_what_becomes_of_runs_that_collide(load, problems):
    assert load(RECIPE).on_collision == "queue"
    assert load(RECIPE, "on_collision=skip").on_collision == "skip"
    assert 'on_collision: found "wait", expected queue or skip' in problems(RECIPE, "on_collision=wait")


def test_the_quickstart_loads():
    assert {"base", "sft", "dpo", "awq", "serve"} <= set(load_recipe(QUICKSTART).stages)


def test_numbers_in_scientific_notation_are_numbers(load):
    assert load().stages["tuned"].learning_rate == 1e-4
    assert load(RECIPE, "stages.tuned.learning_rate=2E-5").stages["tuned"].learning_rate == 2e-5


def test_outside_paths_start_at_the_recipe_folder(load, tmp_path):
    text = RECIPE.replace("builtin/qwen3-1m", "file://models/../mine")
    assert load().stages["scores"].task_folder == tmp_path / "tasks"
    assert load(text).stages["base"].model == f"file://{tmp_path}/mine"


def test_a_name_of_a_person_s_own_may_hold_a_dot_and_its_paths_still_start_at_the_recipe_folder(load, tmp_path):
    names = ["own.v1", "own", "a/b c", "", "ä"]
    listed = ", ".join(f'"{name}": {{tasks: [addition], task_folder: tasks}}' for name in names)
    clean = f"  clean: {{kind: curate, datasets: [problems], decontaminate: {{benchmarks: {{{listed}}}}}}}\n"
    benchmarks = load(RECIPE + clean).stages["clean"].decontaminate.benchmarks
    assert {name: one.task_folder for name, one in benchmarks.items()} == dict.fromkeys(names, tmp_path / "tasks")


def test_a_file_source_without_a_path_is_not_the_folder_of_the_recipe(load):
    with pytest.raises(RecipeError, match="file:// needs a path"):
        load(RECIPE.replace("builtin/qwen3-1m", "file://"))


def test_an_override_changes_one_place_of_an_aliased_value(load):
    text = RECIPE.replace("tasks: [addition]", "tasks: &t [addition]") + (
        "  more: {kind: evaluate, model: served, tasks: *t}\n"
    )
    recipe = load(text, "stages.scores.tasks=[subtraction]", "stages.scores.execution.timeout_s=60")
    assert recipe.stages["scores"].tasks == ("subtraction",)
    assert recipe.stages["more"].tasks == ("addition",)
    assert recipe.stages["scores"].execution.timeout_s == 60


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("learning_rate:", "learning_rte:", "stages.tuned.learning_rte: unknown field (value 0.0001); did you mean"),
        ("{dataset: problems}", "{dataset: problems, pckng: true}", "stages.tuned.data.pckng: unknown field"),
        ("learning_rate: 1e-4", "learning_rate: fast", 'stages.tuned.learning_rate: found "fast", expected'),
        ("global_batch_size: 8", 'global_batch_size: "8"', 'stages.tuned.global_batch_size: found "8", expected'),
        ("global_batch_size: 8", "global_batch_size: true", "stages.tuned.global_batch_size: found true, expected"),
        ("learning_rate: 1e-4", "learning_rate: .inf", "stages.tuned.learning_rate: found Infinity, expected a finite"),
        ("    global_batch_size: 8\n", "", "stages.tuned.global_batch_size: missing"),
        ("method: awq", "method: awp", "stages.quantized.method: found \"awp\", expected 'awq', 'gptq'"),
        ("method: awq", "method: awp", "did you mean `awq`?"),
        (
            "{kind: serve, model: quantized}",
            "{kind: serve, model: quantized, speculative: ngrams}",
            "1 problem:\n  stages.served.speculative: found \"ngrams\", expected 'ngram' or 'mtp'; did you mean `n",
        ),
        (
            "{kind: serve, model: quantized}",
            "{kind: serve, model: quantized, speculative: {draft: 1}}",
            "has 1 problem:\n  stages.served.speculative.draft: found 1, expected a valid string",
        ),
        ("kind: quantize", "kind: quantise", "stages.quantized.kind: found `quantise`, which is no kind of stage"),
        ("kind: quantize", "kind: quantise", "did you mean `quantize`?"),
        ("    kind: quantize\n", "", "stages.quantized.kind: missing; there are: download, train"),
        ("model: base", "model: bas", "stages.tuned.model: there is no stage `bas`; did you mean `base`?"),
        ("model: base", "model: problems", "stages.tuned.model: refers to problems, which produces a dataset;"),
        (
            "method: sft\n    model: base",
            "method: sft\n    adapter: {}\n    model: base",
            "refers to tuned, which produces an adapter; expected a model; a stage of `kind: merge` makes",
        ),
        ("model: served, tasks", "model: problems, tasks", "produces a dataset; expected a model or adapter or server"),
        ("dataset: problems}\n    global", "dataset: base}\n    global", "stages.tuned.data.dataset: refers to base"),
        (
            "{kind: serve, model: quantized}",
            "{kind: merge, model: base, adapter: tuned}",
            "tuned has no `adapter:` block",
        ),
        ("model: base", "model: quantized", "tuned → quantized → tuned"),
        ("model: base", "model: tuned", "tuned → tuned"),
        ("model: served,", "model: served, serving: {dtype: auto},", "stages.scores.serving: served is a server"),
        ("name: small", "nme: small", "nme: unknown field; did you mean `name`?"),
        ("name: small", "name: Grande Ñ", "name: found"),
        ("  base: {", "  Base Model: {", "stages.Base Model: the name of a stage consists of"),
        ("    method: sft\n", "    method: sft\n    method: sft\n", "the key `method` is already in line 6"),
        ("    global_batch_size: 8", "    global_batch_size: 8\n    layout: {dp_shard: 3}", "not divisible"),
        (
            "    global_batch_size: 8",
            "    global_batch_size: 8\n    layout: {dp_shard: 2}\n    execution: {processes: 4}",
            "layout: dp_replicate 1 × dp_shard 2 = 2 processes, but execution starts 4",
        ),
        (
            "    kind: quantize\n",
            "    kind: quantize\n    execution: {nodes: 2}\n",
            "the local launcher has one node only",
        ),
        ("data: {dataset: problems}", "data: {dataset: problems", "line 9: not valid YAML"),
    ],
)
def test_each_problem_is_explained_where_it_is(problems, before, after, expected):
    assert before in RECIPE
    assert expected in problems(RECIPE.replace(before, after, 1))


@pytest.mark.parametrize("number", [".nan", ".inf"])
def test_what_is_no_number_is_named_once(problems, number):
    assert problems(RECIPE.replace("learning_rate: 1e-4", f"learning_rate: {number}")).count("finite number") == 1


def test_all_problems_are_told_at_once(problems):
    text = RECIPE.replace("model: base", "model: bas").replace("method: awq", "method: awp").replace("1e-4", "-1")
    said = problems(text)
    assert "3 problems" in said
    assert all(path in said for path in ("stages.tuned.model", "stages.quantized.method", "stages.tuned.learning_rate"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.tuned.learning_rte=1", "stages.tuned.learning_rte: unknown field (value 1); did you mean"),
        ("stages.tuned.learning_rate=fast", 'stages.tuned.learning_rate: found "fast"'),
        ("stages.tunde.learning_rate=1", "there is no stage `tunde`; did you mean `tuned`?"),
        ("stages.tuned.learning_rate.x=1", "`stages.tuned.learning_rate` is 0.0001, which has no field `x`"),
        ("stages.tuned.learning_rate", "expected PATH=VALUE"),
        ("stages..x=1", "expected PATH=VALUE"),
        ("stages.scores.tasks=[", "not valid YAML"),
        ("version=1", "version: unknown field"),
    ],
)
def test_a_bad_override_is_explained(problems, override, expected):
    assert expected in problems(RECIPE, override)


@pytest.mark.parametrize("text", ["", "- a\n", "stages: {}\n", "stages: [a]\n", "name: x\n", "a: &a [*a]\n", "\x00"])
def test_what_is_no_recipe_is_refused(problems, text):
    assert "recipe.yaml" in problems(text)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*none\.yaml"):
        load_recipe(tmp_path / "none.yaml")


def test_the_schema_knows_every_field_of_every_kind():
    text = json.dumps(json_schema())
    assert all(word in text for word in ("learning_rate", "group_size", "task_folder", "trust_remote_code", "dp_shard"))
    assert json_schema()["properties"]["stages"]["additionalProperties"]["discriminator"]["propertyName"] == "kind"


def test_the_schema_for_editors_is_draft_07_and_takes_what_the_other_takes():
    schema = editor_schema()
    Draft7Validator.check_schema(schema)
    assert Draft7Validator(Draft7Validator.META_SCHEMA).is_valid(schema)
    text = json.dumps(schema)
    assert schema["$id"] and not any(word in text for word in ("$defs", "prefixItems", "discriminator"))
    validators = Draft7Validator(schema), Draft202012Validator(json_schema())
    recipes = {path: yaml.safe_load(path.read_text()) for path in [*CONFIGS.glob("*.yaml")]}
    for path, recipe in recipes.items():
        assert [error.message for one in validators for error in one.iter_errors(recipe)] == [], path
    described = schema["definitions"]["ServeConfig"]["properties"]["serving"]
    assert described["allOf"] == [{"$ref": "#/definitions/ServingConfig"}] and "default" in described
    kept = schema["definitions"]["Solved"]["properties"]["solved"]["items"]
    assert len(kept) == 2 and all(one["type"] == "integer" for one in kept)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "trian"},
        {"kind": "train", "stepz": 5},
        {"kind": "train", "method": "sft", "steps": "many"},
        {"kind": "train", "layout": {"tp": 0}},
        {"kind": "serve", "serving": {"engine": 5}},
        {"kind": "download", "execution": {"retries": -1}},
        {"kind": "generate", "keep": {"solved": [1, 7, 9]}},
        {"kind": "generate", "keep": {"solved": [1, "all"]}},
    ],
    ids=lambda stage: str(stage)[:40],
)
def test_both_schemas_refuse_a_wrong_stage(wrong):
    recipe = yaml.safe_load(QUICKSTART.read_text())
    sound = next((stage for stage in recipe["stages"].values() if stage["kind"] == wrong["kind"]), {})
    for validator in (Draft7Validator(editor_schema()), Draft202012Validator(json_schema())):
        assert not validator.is_valid({"stages": {"one": {**sound, **wrong}}})
        assert not validator.is_valid({**recipe, "stage": {}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.split=''", "stages.tuned.data.split: "),
        ("data.evaluation_split=''", "stages.tuned.data.evaluation_split: "),
        ("data.evaluation_split=train", "stages.tuned.data: `evaluation_split` is `train`, like `split`"),
        (
            "data.format=preference",
            "`data.format: preference` has no rows for `method: sft`; expected auto or",
        ),
    ],
)
def test_data_that_cannot_be_meant_are_refused(problems, override, message):
    assert message in problems(RECIPE, f"stages.tuned.{override}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.format=text",
            "`data.format: text` has no rows for `method: dpo`; expected auto or sharegpt_preference or "
            "messages_preference or alpaca_preference or preference or ",
        ),
        ("data.train_on=all", "`train_on: all` does not go with `method: dpo`"),
    ],
)
def test_a_method_that_compares_answers_takes_pairs_only(problems, override, message):
    assert message in problems(RECIPE.replace("method: sft", "method: dpo"), f"stages.tuned.{override}")


@pytest.mark.parametrize("date", ["2026-02-03", '"2026-02-03"'])
def test_a_date_is_read_as_people_write_it(tmp_path, date):
    path = tmp_path / "small.yaml"
    path.write_text(
        RECIPE.replace("data: {dataset: problems}", f"data: {{dataset: problems, template_date: {date}}}", 1)
    )
    assert f"{load_recipe(path).stages['tuned'].data.template_date:%d %B %Y}" == "03 February 2026"


def test_a_day_that_no_calendar_has_is_refused(problems):
    text = RECIPE.replace("data: {dataset: problems}", "data: {dataset: problems, template_date: 2026-02-31}", 1)
    assert "stages.tuned.data.template_date: " in problems(text)


ADAPTERS = """
  sft: {kind: train, method: sft, model: base, data: {dataset: problems}, global_batch_size: 8, learning_rate: 1e-4}
  left: {kind: train, method: sft, model: sft, adapter: {}, data: {dataset: problems}, global_batch_size: 8,
    learning_rate: 1e-4}
  right: {kind: train, method: sft, model: sft, adapter: {}, data: {dataset: problems}, global_batch_size: 8,
    learning_rate: 1e-4}
  dora: {kind: train, method: sft, model: sft, adapter: {use_dora: true}, data: {dataset: problems},
    global_batch_size: 8, learning_rate: 1e-4}
  other: {kind: train, method: sft, model: tuned, adapter: {}, data: {dataset: problems}, global_batch_size: 8,
    learning_rate: 1e-4}
"""


def test_the_base_of_a_served_adapter_is_found_and_stood_on(load):
    recipe = load(
        f"{RECIPE}{ADAPTERS}"
        "  one: {kind: serve, model: left, adapters: [right]}\n"
        "  two: {kind: serve, model: sft, adapters: [left, right]}\n"
        "  alone: {kind: evaluate, model: left, tasks: [addition], task_folder: tasks}\n"
        "  asked: {kind: evaluate, model: two, adapter: right, tasks: [addition], task_folder: tasks}\n"
    )
    assert recipe.upstream_of("one") == ("left", "right", "sft")
    assert recipe.stages["one"].served_adapters == ("left", "right")
    assert recipe.upstream_of("two") == ("sft", "left", "right")
    assert recipe.stages["two"].served_adapters == ("left", "right")
    assert recipe.upstream_of("alone") == ("left", "sft")
    assert recipe.upstream_of("asked") == ("two", "right")
    assert "base" not in recipe.stages["two"].references()


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("{kind: serve, model: sft, adapters: [left, left]}", "adapters.1: left is served already"),
        ("{kind: serve, model: left, adapters: [left]}", "adapters.0: left is served already"),
        ("{kind: serve, model: left, adapters: [other]}", "adapters.0: other was trained on tuned, not on sft"),
        ("{kind: serve, model: quantized, adapters: [left]}", "left was trained on sft, not on quantized"),
        ("{kind: serve, model: left, base: tuned}", "base: is tuned, but that of left is sft"),
        ("{kind: serve, model: sft, base: sft}", "base: is sft, which is no adapter; remove it"),
        ("{kind: evaluate, tasks: [a], model: served, adapter: left}", "adapter: is left, but served serves quantized"),
        ("{kind: evaluate, tasks: [a], model: sft, adapter: left}", "sft is no server; say `model: left`"),
        ("{kind: serve, model: dora}", "dora trains an adapter with use_dora, served merged only"),
        ("{kind: serve, model: sft, adapters: [left, dora]}", "dora trains an adapter with use_dora"),
        ("{kind: evaluate, tasks: [a], model: dora}", "dora trains an adapter with use_dora"),
        ("{kind: evaluate, tasks: [a], model: served, base: sft}", "served is a server and has its own; remove it"),
    ],
)
def test_adapters_that_one_server_cannot_have_are_refused(problems, stage, expected):
    found = problems(f"{RECIPE}{ADAPTERS}  last: {stage}\n")
    assert "stages.last." in found
    assert expected in found


KEPT = """\
# né: what is here, stays  # as it is
name: kept
stages:
  base:
    kind: download
    model: "hf://Qwen/Qwen3-0.6B"
    execution:
      environment: &mine {HF_TOKEN: abc1, UNNAMED: "two words", 'N': "\\x61bc"}
  rows:
    kind: download
    dataset: modelscope://datasets/a/b
    execution:
      environment:
        <<: *mine
        FOLDED: >-
          of several
          lines
        MORE: "5"   # a comment
"""
SHOWN = """\
# né: what is here, stays  # as it is
name: kept
stages:
  base:
    kind: download
    model: "hf://Qwen/Qwen3-0.6B"
    execution:
      environment: &mine {HF_TOKEN: '***', UNNAMED: '***', 'N': '***'}
  rows:
    kind: download
    dataset: modelscope://datasets/a/b
    execution:
      environment:
        <<: *mine
        FOLDED: '***'
        MORE: '***'   # a comment
"""


def test_the_text_that_is_kept_of_a_recipe_lacks_secrets_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", "what is here")
    file = tmp_path / "kept.yaml"
    file.write_text(KEPT)
    assert load_recipe(file).text == KEPT
    assert without_secrets(KEPT) == SHOWN.replace("what is here", "***")
    acting = "stages: {a: {environment: {tools: [search: texts], max_turns: 2}, execution: {retries: 1}}}"
    assert without_secrets(acting) == acting
    merged = "x: &x {environment: {A: b}}\nstages: {a: {execution: {<<: *x, retries: 1}}}"
    assert without_secrets(merged) == merged.replace("b}", "'***'}")
    assert without_secrets('{"a": "https://me:hunter2@host/x"}') == '{"a": "https://me:***@host/x"}'
    shipped = sorted((Path(__file__).parents[4] / "configs").glob("*.yaml"))
    assert [one.name for one in shipped if without_secrets(one.read_text()) != one.read_text()] == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.quantized.calibration.num_samples=1" + "0" * 30, "quantized.calibration.num_samples: found 1000"),
        ("stages.quantized.seed=9223372036854775808", "seed: found 9223372036854775808, expected at most 922"),
        (
            "stages.scores.limit=1" + "0" * 99,
            "stages.scores.limit: found 1000.*…, expected at most 9223372036854775807",
        ),
        (
            "stages.served.execution.ready_timeout_s=1e300",
            "execution.ready_timeout_s: .* less than or equal to 1000000",
        ),
        ("stages.tuned.execution.timeout_s=1e300", "execution.timeout_s: .* less than or equal to 1000000"),
        ("stages.tuned.execution.hang_timeout_s=1e300", "execution.hang_timeout_s: .* less than or equal to 100000"),
        ("stages.tuned.execution.retries=100000000000", "execution.retries: .* less than or equal to 1000"),
    ],
)
def test_numbers_that_no_program_counts_with(problems, override, message):
    assert re.search(message, problems(RECIPE, override))
