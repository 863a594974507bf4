"""The check before training finds layers of the base model that cannot be quantized."""

import json

import pytest

from stages.core.contract import StageInput
from stages.kinds.quantize.check import check
from tests.pipeline.test_quantize import save_model
from tests.zoo.models import tiny_model


@pytest.fixture
def problems_of(tmp_path):
    (tmp_path / "rows/data").mkdir(parents=True)
    rows = [json.dumps({"text": "n1 n2 n3 n4"})] * 400
    (tmp_path / "rows/data/train.jsonl").write_text("\n".join(rows))

    def problems(family, edit=None, **fields):
        save_model(tiny_model(family), tmp_path / family / "model")
        if edit:
            path = tmp_path / family / "model/config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
        config = {"kind": "quantize", "model": "m", "method": "fp8", "calibration": {"dataset": "d"}, **fields}
        stage_input = StageInput(
            name="q", kind="quantize", version="0" * 12, config=config, cache=tmp_path,
            inputs={"m": tmp_path / family, "d": tmp_path / "rows"},
        )  # fmt: skip
        return [(field, str(error)) for field, error in check(stage_input)]

    return problems


def test_a_model_that_can_be_quantized_has_none(problems_of):
    assert problems_of("llama") == []


def test_layers_that_no_quantizer_packs_are_found_before_any_training(problems_of):
    ((field, message),) = problems_of("gpt2")
    assert field == "model"
    assert "GPT2LMHeadModel cannot be quantized: 8 of its layers (transformer.h.0.attn.c_attn" in message


def test_a_download_that_is_quantized_is_found_before_any_training(problems_of):
    ((field, message),) = problems_of("llama", edit={"quantization_config": {"quant_method": "gptq"}})
    assert field == "model"
    assert "is quantized already (gptq)" in message


@pytest.mark.parametrize(("fields", "found"), [
    ({"ignore": ["lm_head", "re:.*w1$"]}, "re:.*w1$ matches no module of LlamaForCausalLM"),
    ({"ignore": ["re:.*"]}, "`ignore` matches all"),
    ({"method": "gptq", "group_size": 128}, "is no multiple of group_size 128"),
    ({"tensor_parallel_size": 3}, "cannot be divided between 3 ranks"),
])  # fmt: skip
def test_what_the_recipe_says_is_held_against_the_model(problems_of, fields, found):
    ((field, message),) = problems_of("llama", **fields)
    assert field == "model"
    assert found in message
