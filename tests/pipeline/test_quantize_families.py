"""Every quantization method packs all layers of every architecture, and the model stays close to the original."""

import itertools
import json
import math
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.core.contract import StageContext
from stages.core.errors import LifecycleError, ModelError, RecipeError
from stages.kinds.quantize.config import ROUTERS, QuantizeConfig
from stages.kinds.quantize.divergence import measure_divergence
from stages.kinds.quantize.layers import build_without_weights, check_quantizable, quantized_layers
from stages.kinds.quantize.llm_compressor import quantize
from stages.kinds.quantize.registry import QuantizationJob
from stages.kinds.quantize.run import run
from stages.serving.engine import Quantization
from tests.pipeline.test_quantize import counting_rows, save_model
from tests.zoo.models import tiny_model
from tests.zoo.proofs import result, save_family

METHODS = {"awq": "int4", "gptq": "int4", "int8": "int8", "fp8": "fp8"}
DENSE = ("llama", "qwen3", "olmo2", "glm4", "gemma3_text", "phi3", "cohere")
MIXTURES = ("qwen3_moe", "mixtral", "phimoe", "glm4_moe")
KL_BOUNDS = {"awq": 0.05, "gptq": 0.05, "int8": 0.002, "fp8": 0.02}
"""Largest KL divergence of a quantized model from its original with random weights, in nats per token."""
EVERYTHING_BUT = ("embed_tokens", "lm_head", ".gate.weight", ".router.weight")
"""Substrings of the names of weight matrices that quantization does not change."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Provide a function that returns the folder of a tiny model of an architecture, made at the first call."""
    root, made = tmp_path_factory.mktemp("families"), set()

    def folder(family):
        if family not in made:
            save_model(tiny_model(family), root / family / "model")
            made.add(family)
        return root / family / "model"

    return folder


def make_quantization(method, ignore=("lm_head",)):
    return Quantization(method, METHODS[method], 32, method in ("awq", "gptq"), (*ignore, *ROUTERS), 1)


def quantize_family(source, target, method, ignore=("lm_head",)):
    """Quantize a model without vLLM's check; return the KL divergence in nats per token."""
    quantization, rows = make_quantization(method, ignore), counting_rows(24)
    check_quantizable(build_without_weights(source, trust_remote_code=False), quantization, ignore)
    options = {"seed": 0, "trust_remote_code": False, "report": lambda *_: None}
    assert not quantize(QuantizationJob(source, target, quantization, rows[:16], **options))
    everything = [[True] * len(row) for row in rows[16:]]
    divergence = measure_divergence(
        source, target, rows[16:], everything, trust_remote_code=False, report=lambda *_: None
    )
    return divergence.metrics()["kl_nats_per_token"]


def matrices(folder):
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        return {key: weights.get_slice(key).get_dtype() for key in weights.keys() if weights.get_slice(key).get_shape()}  # noqa: SIM118


def quantizable_in_files(source):
    """Return the names of the matrices that must be quantized, found from the model's weight file alone."""
    with safe_open(source / "model.safetensors", framework="np") as weights:
        found = {key for key in weights.keys() if len(weights.get_slice(key).get_shape()) == 2}  # noqa: SIM118
    return {key.removesuffix(".weight") for key in found if not any(name in key for name in EVERYTHING_BUT)}


BY_DAY = {
    "awq": {*DENSE, *MIXTURES},
    "gptq": {"qwen3", "mixtral"},
    "int8": {"phi3"},
    "fp8": {"olmo2", "phimoe"},
}
"""Architectures that `make test` quantizes: all with AWQ, whose scaling differs most; other methods take turns."""
PAIRS = [*itertools.product(DENSE, METHODS), *itertools.product(MIXTURES, METHODS.keys() - {"int8"})]
"""Tested pairs of architecture and quantization method. MoE with int8 is left out: Transformers cannot read it."""
QUANTIZED = [
    pytest.param(family, method, marks=() if family in BY_DAY[method] else pytest.mark.nightly)
    for family, method in sorted(PAIRS)
]


@pytest.mark.parametrize(("family", "method"), QUANTIZED)
def test_every_linear_layer_is_packed_and_little_is_lost(folder_of, tmp_path, family, method):
    source = folder_of(family)
    kl_nats = quantize_family(source, tmp_path / "model", method)
    assert math.isfinite(kl_nats)
    assert 1e-9 < kl_nats < KL_BOUNDS[method]
    written = matrices(tmp_path / "model")
    scaled = {key.removesuffix(".weight_scale") for key in written if key.endswith(".weight_scale")}
    assert scaled == quantizable_in_files(source)
    packed = {"int4": ("weight_packed", "I32"), "int8": ("weight", "I8"), "fp8": ("weight", "F8_E4M3")}[METHODS[method]]
    assert all(written[f"{name}.{packed[0]}"] == packed[1] for name in scaled)
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("method", ["fp8"])
def test_the_stage_does_what_the_table_of_families_shows(tmp_path, method):
    """Two cells of the table: `tests/zoo` tries all of them every night."""
    assert result(method, save_family("qwen3", tmp_path / "qwen3")) == "yes"
    why_not = result(method, save_family("falcon", tmp_path / "falcon"))
    assert "8 of its layers are of the class FalconLinear" in why_not


def test_a_failed_assertion_of_a_library_is_about_the_model_and_no_traceback(tmp_path):
    said = result("gptq", save_family("gemma4", tmp_path / "gemma4"))
    assert said == "quantizing Gemma4ForConditionalGeneration with gptq failed: AssertionError: No statistics available"


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_towers_for_images_stay_as_they_are_and_servers_know(folder_of, tmp_path, family):
    """GPTQ has no statistics of a tower, which rows of text do not pass."""
    source = folder_of(family)
    quantize_family(source, tmp_path / "model", "gptq" if family == "gemma3" else "fp8")
    written = load_file(tmp_path / "model/model.safetensors")
    before = {
        name: weight for name, weight in load_file(source / "model.safetensors").items() if "language" not in name
    }
    towers = {name: weight for name, weight in before.items() if weight.ndim == 2 and "lm_head" not in name}
    assert len(towers) >= 14
    for name, weight in towers.items():
        assert torch.equal(written[name], weight.bfloat16()), name
    ignored = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]["ignore"]
    linear = {name for name in towers if name.endswith(".weight") and not re.search("embed|position", name)}
    assert {name.removesuffix(".weight") for name in linear} <= {*ignored}


@pytest.mark.parametrize("family", ["gpt2", "falcon"])
@pytest.mark.parametrize("method", METHODS)
def test_layers_that_no_quantizer_packs_are_refused_before_a_row_is_read(folder_of, tmp_path, family, method):
    source = folder_of(family)
    config = QuantizeConfig.model_validate(
        {"kind": "quantize", "model": "m", "method": method, "calibration": {"dataset": "d"},
         **({"group_size": 32} if METHODS[method] == "int4" else {})}
    )  # fmt: skip
    context = StageContext(
        tmp_path, "q", "0" * 12, {"m": source.parent, "d": tmp_path / "none"}, leases={}, cache=tmp_path
    )
    with pytest.raises(ModelError) as caught:
        run(config, context)
    assert {"gpt2": "8 of its layers", "falcon": "8 of its layers"}[family] in str(caught.value)
    assert {"gpt2": "Conv1D", "falcon": "FalconLinear"}[family] in str(caught.value)


def refusal(source, method, ignore):
    with pytest.raises(LifecycleError) as caught:
        check_quantizable(
            build_without_weights(source, trust_remote_code=False), make_quantization(method, ignore), ignore
        )
    return caught.value


def test_experts_that_files_hold_merged_are_refused_and_the_rest_can_be_quantized(folder_of, tmp_path):
    error = refusal(folder_of("gpt_oss"), "gptq", ("lm_head",))
    assert isinstance(error, ModelError)
    assert "model.layers.0.mlp.experts, model.layers.1.mlp.experts" in str(error)
    ignore = ("lm_head", r"re:.*\.experts\.")
    assert ignore[1] in str(error)
    assert 0 < quantize_family(folder_of("gpt_oss"), tmp_path / "model", "gptq", ignore) < KL_BOUNDS["gptq"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_left_out_only_where_transformers_reads_them_then(folder_of, tmp_path, family):
    ignore = ("lm_head", r"re:.*\.experts\.")
    error = refusal(folder_of(family), "awq", ignore)
    assert isinstance(error, RecipeError)
    assert "beside layers of awq Transformers reads no unquantized experts; choose method fp8" in str(error)
    assert 0 < quantize_family(folder_of(family), tmp_path / "model", "fp8", ignore) < KL_BOUNDS["fp8"]
    ignored = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]["ignore"]
    stored = "block_sparse_moe.experts.3.w2" if family == "mixtral" else "mlp.experts.3.down_proj"
    assert f"model.layers.1.{stored}" in ignored


def test_a_pattern_that_matches_nothing_is_a_slip(folder_of):
    error = refusal(folder_of("llama"), "fp8", ("lm_head", r"re:.*\.w1$"))
    assert isinstance(error, RecipeError)
    assert r"re:.*\.w1$ matches no module of LlamaForCausalLM" in str(error)
    assert "nothing to quantize" in str(refusal(folder_of("llama"), "fp8", ("re:.*",)))


def test_an_output_layer_that_is_the_embedding_is_not_quantized_alone(folder_of):
    assert "lm_head has the weights of the embedding" in str(refusal(folder_of("gemma3_text"), "fp8", ()))


def test_a_layer_is_ignored_by_its_name_in_files_as_by_that_in_memory(folder_of):
    model = build_without_weights(folder_of("mixtral"), trust_remote_code=False)
    for pattern in (r"re:.*block_sparse_moe\.experts\.0\.w1$", r"re:.*mlp\.experts\.0\.gate_proj$"):
        layers = quantized_layers(model, make_quantization("fp8", ("lm_head", pattern)))
        assert len(layers) == 2 * (4 + 4 * 3) - 2
        assert "model.layers.1.block_sparse_moe.experts.0.w1" not in {layer.name for layer in layers.values()}


def test_awq_without_anything_to_scale_is_refused(folder_of, tmp_path):
    """AWQ refuses Nemotron, which has nothing to scale: its norms add one to weights, its activation is squared."""
    with pytest.raises(ModelError, match="NemotronForCausalLM has no two layers that may be scaled"):
        quantize_family(folder_of("nemotron"), tmp_path / "model", "awq")


def test_weights_that_transformers_would_make_up_are_found(folder_of, tmp_path):
    quantize_family(folder_of("llama"), tmp_path / "model", "fp8")
    model = AutoModelForCausalLM.from_pretrained(folder_of("llama"), dtype=torch.float32)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path / "incomplete", state_dict=weights)
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        measure_divergence(
            folder_of("llama"), tmp_path / "incomplete", [[1, 2, 3]], [[True] * 3],
            trust_remote_code=False, report=lambda *_: None,
        )  # fmt: skip
