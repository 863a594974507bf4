"""A model that cannot be quantized, or not be served afterwards, is rejected before any slow import."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.core.contract import StageInput

RUN = """
import sys
from pathlib import Path
from stages.__main__ import run_stage
from stages.core.errors import LifecycleError
try:
    run_stage(Path(sys.argv[1]))
except LifecycleError as error:
    print(type(error).__name__, error)
print("imported:", *sorted({"llmcompressor", "torch", "transformers"} & sys.modules.keys()))
"""


@pytest.fixture
def model(tmp_path):
    """Provide a one-layer model whose `down_proj` has 96 inputs, no multiple of the usual group sizes."""
    folder = tmp_path / "model/model"
    folder.mkdir(parents=True)
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
              "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64),
              "mlp.down_proj": (64, 96)}  # fmt: skip
    layers = {f"model.layers.0.{name}.weight": np.ones(shape, np.float16) for name, shape in shapes.items()}
    save_file({"model.embed_tokens.weight": np.ones((32, 64), np.float16), **layers}, folder / "model.safetensors")
    write_config(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_config(folder, **fields):
    config = {"model_type": "qwen3", "num_attention_heads": 2, "num_key_value_heads": 1, **fields}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def run(tmp_path, model):
    """Provide a function that runs the quantize stage on `model`, and returns its error as `CLASS MESSAGE`."""

    def start(**fields):
        work = tmp_path / "work"
        work.mkdir()
        config = {"kind": "quantize", "model": "m", "method": "awq", "group_size": 32, "calibration": {"dataset": "d"}}
        stage_input = StageInput(
            name="awq", kind="quantize", version="0" * 12, config={**config, **fields}, cache=tmp_path / "cache",
            inputs={"m": model.parent, "d": tmp_path / "rows"},
        )  # fmt: skip
        (work / "config.json").write_text(stage_input.model_dump_json())
        done = subprocess.run([sys.executable, "-c", RUN, work], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.endswith("imported:\n"), done.stdout
        return done.stdout

    return start


def test_a_layer_that_could_not_be_served_is_named(run, fault):
    fault.name, fault.stage = "a layer that vLLM could not serve", "quantize"
    with fault.timed("detected"):
        said = run(group_size=64)
    assert said.startswith("RecipeError awq with group_size 64 would give a model that vLLM cannot serve")
    assert "model.layers.0.mlp.down_proj: a rank's input of 96 is no multiple of group_size 64" in said
    assert "set group_size: 32" in said


def test_ranks_among_which_it_cannot_be_split_are_named(run):
    said = run(method="int8", group_size=128, tensor_parallel_size=3)
    assert "2 query and 1 key heads cannot be divided between 3 ranks" in said


def test_a_quantized_model_is_not_quantized_again(run, model):
    write_config(model, quantization_config={"quant_method": "compressed-tensors"})
    said = run()
    assert said.startswith("ModelError")
    assert "is quantized already (compressed-tensors)" in said


def test_a_recipe_that_ignores_everything_is_told_so(run):
    assert "`ignore` matches all 7 linear layers of the model" in run(ignore=["re:.*"])


def test_a_truncated_model_is_found(run, model, fault):
    fault.name, fault.stage = "weights cut off", "quantize"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with fault.timed("detected"):
        said = run()
    assert said.startswith("ModelError")
    assert "model.safetensors is damaged or incomplete" in said
