"""Contradictions in a quantize stage's config are refused when the recipe is read, with the field's name."""

import pytest
from pydantic import ValidationError

from flows.recipe.recipe import load_recipe
from stages.core.errors import RecipeError
from stages.kinds.quantize.config import QuantizeConfig

RECIPE = """
stages:
  base: {kind: download, model: builtin/qwen3-1m}
  rows: {kind: download, dataset: builtin/addition}
  small: {kind: quantize, model: base, method: awq, calibration: {dataset: rows}}
  again: {kind: quantize, model: MODEL, method: int8, calibration: {dataset: rows}}
"""
TRAINING = """
  tuned:
    {kind: train, method: sft, model: MODEL, data: {dataset: rows}, global_batch_size: 8, learning_rate: 1e-4}
"""


def complaint(**fields) -> str:
    calibration = {"dataset": "rows", **fields.pop("calibration", {})}
    with pytest.raises(ValidationError) as caught:
        QuantizeConfig.model_validate(
            {"kind": "quantize", "model": "base", "method": "awq", "calibration": calibration, **fields}
        )
    return str(caught.value)


@pytest.mark.parametrize("pattern", ["re:(", "re:*", "re:[", r"re:\1", "re:", ""])
def test_a_pattern_that_is_none_is_refused_with_what_is_wrong(pattern):
    message = complaint(ignore=["lm_head", pattern])
    assert "ignore" in message
    assert (f"{pattern} is no regular expression" if len(pattern) > 3 else "an empty name or pattern") in message


@pytest.mark.parametrize("group_size", [1, 7, 33])
def test_groups_that_no_kernel_serves_are_refused(group_size):
    assert f"{group_size} is odd, and no kernel serves odd groups" in complaint(group_size=group_size)


@pytest.mark.parametrize("method", ["int8", "fp8"])
@pytest.mark.parametrize(("field", "value", "found"), [
    ("group_size", 64, "`group_size: 64`"), ("symmetric", True, "`symmetric: true`"),
])  # fmt: skip
def test_an_option_of_another_method_is_refused(method, field, value, found):
    message = complaint(method=method, **{field: value})
    assert f"{found} is an option of awq and gptq, and `method: {method}` has no use for it; remove it" in message
    assert QuantizeConfig.model_fields[field].default != value


def test_what_a_stage_process_is_given_passes_although_it_names_every_field():
    config = QuantizeConfig.model_validate(
        {"kind": "quantize", "model": "base", "method": "fp8", "calibration": {"dataset": "rows"}}
    )
    assert QuantizeConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_rows_that_calibrate_are_not_those_that_judge():
    message = complaint(calibration={"split": "rows", "evaluation_split": "rows"})
    assert "the KL would be measured on calibrated rows" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_length", 1),
        ("split", ""),
        ("split", " "),
        ("split", "."),
        ("evaluation_split", ""),
        ("evaluation_split", "rows\n"),
    ],
)
def test_calibration_rows_can_be_found_and_predict_something(field, value):
    assert f"calibration.{field}" in complaint(calibration={field: value})


def refusal(path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ())
    return str(caught.value)


def test_a_quantized_model_is_not_quantized_again(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    message = refusal(recipe, RECIPE.replace("MODEL", "small"))
    assert "stages.again.model: small is quantized already; expected the model that it is made from, base" in message
    recipe.write_text(RECIPE.replace("MODEL", "base"))
    assert load_recipe(recipe, ()).stages["again"].references()["model"] == "base"


def test_a_quantized_model_is_not_trained(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    message = refusal(recipe, RECIPE.replace("MODEL", "base") + TRAINING.replace("MODEL", "small"))
    assert "stages.tuned.model: small is quantized, and quantized weights cannot be trained" in message
    assert "it is made from, base" in message


def test_a_model_that_sees_is_refused_as_gguf_with_what_takes_it():
    of = {"kind": "quantize", "model": "vlm", "calibration": {"dataset": "rows"}}
    config = QuantizeConfig.model_validate({**of, "method": "gguf", "gguf_type": "q8_0"})
    (problem,) = config.model_problems(lambda: {"model_type": "qwen3_vl", "vision_config": {"depth": 2}})
    assert "no place for the tower" in problem and "awq, gptq, int8, fp8" in problem
