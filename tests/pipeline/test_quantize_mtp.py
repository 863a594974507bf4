"""Layers of multi-token prediction, which Transformers does not load, are in a quantized model bit for bit."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.core.contract import StageContext
from stages.core.errors import ModelError
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.layers import build_without_weights, check_nothing_lost
from stages.kinds.quantize.registry import METHODS, MethodEntry
from stages.kinds.quantize.run import run
from stages.kinds.quantize.written import problems_of_carried
from stages.models.carried_weights import changed_or_lost
from stages.models.facts import ModelFacts
from stages.models.model_folder import check_model_folder
from stages.models.weight_files import WEIGHTS_INDEX, read_tensors, weight_paths
from tests.mtp_models import MTP_LAYER, WEIGHTS, save_with_mtp
from tests.pipeline.test_quantize import VOCABULARY, counting_rows
from tests.pipeline.test_quantize_families import quantize_family

DAY = {("glm4_moe", "awq"), ("deepseek_v3", "fp8"), ("qwen3_5_text", "gptq"), ("qwen3_5_text", "int8")}
"""Pairs of `make test`; the others are quantized every night. Transformers reads no experts in int8."""
PAIRS = [
    pytest.param(family, method, marks=() if (family, method) in DAY else pytest.mark.nightly)
    for family, method in itertools.product(MTP_LAYER, ("awq", "gptq", "int8", "fp8"))
    if method != "int8" or family == "qwen3_5_text"
]


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_layers_that_no_quantizer_loads_are_copied_bit_for_bit(tmp_path, family, method):
    source, written = tmp_path / "source", tmp_path / "written"
    mtp = save_with_mtp(family, source)
    # A CPU without AMX serves no experts, which the stage would say; what is written is the same.
    quantize_family(source, written, method)
    assert changed_or_lost(source, written, mtp.keys()) == []

    check_model_folder(ModelFacts(written))  # files and index agree
    types = {tensor.name: tensor.dtype for path in weight_paths(written) for tensor in read_tensors(path)}
    assert {types[name] for name in mtp} == {"BF16"}
    scaled = {name.removesuffix(".weight_scale") for name in types if name.endswith(".weight_scale")}
    assert scaled
    assert not [name for name in scaled if name.startswith((MTP_LAYER[family], "mtp."))]
    # A server quantizes what is not named here, and would look for scales that do not exist.
    ignored = set(json.loads((written / "config.json").read_text())["quantization_config"]["ignore"])
    assert ignored >= {name.removesuffix(".weight") for name, weight in mtp.items() if weight.ndim == 2}


def quantize(job):
    """Write the model without its MTP layer, as llm-compressor's save does."""
    shutil.copytree(job.source, job.target)
    weights = load_file(job.target / WEIGHTS)
    kept = {name: weight for name, weight in weights.items() if not name.startswith("mtp.")}
    save_file(kept, job.target / WEIGHTS, {"format": "pt"})
    return []


def test_a_quantizer_that_loses_such_layers_fails_the_stage(tmp_path, monkeypatch):
    mtp = save_with_mtp("qwen3_5_text", tmp_path / "source/model")
    (tmp_path / "rows/data").mkdir(parents=True)
    texts = [json.dumps({"text": " ".join(VOCABULARY[token] for token in row)}) for row in counting_rows(8)]
    (tmp_path / "rows/data/train.jsonl").write_text("\n".join(texts))
    calibration = {"dataset": "d", "num_samples": 4, "num_evaluation_samples": 4}
    config = QuantizeConfig(kind="quantize", model="m", method="fp8", calibration=calibration)
    inputs = {"m": tmp_path / "source", "d": tmp_path / "rows"}
    context = StageContext(tmp_path / "work", "q", "0" * 12, inputs, leases={}, cache=tmp_path / "cache")
    context.work.mkdir()

    monkeypatch.setitem(METHODS, "fp8", MethodEntry("fp8", __name__))
    run(config, context)
    (finding,) = context.findings
    assert isinstance(finding, ModelError)
    assert f"lost or changed {len(mtp)} of {len(mtp)} weights" in str(finding)
    assert "mtp.fc.weight" in str(finding)


def test_one_changed_bit_is_found(tmp_path):
    mtp = save_with_mtp("qwen3_5_text", tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "written")
    assert not list(problems_of_carried(tmp_path / "source", tmp_path / "written", mtp.keys()))
    weights = load_file(tmp_path / "written" / WEIGHTS)
    weights["mtp.fc.weight"].view(torch.int16)[0, 0] ^= 1
    save_file(weights, tmp_path / "written" / WEIGHTS, {"format": "pt"})
    (problem,) = problems_of_carried(tmp_path / "source", tmp_path / "written", mtp.keys())
    assert f"lost or changed 1 of {len(mtp)} weights" in str(problem)


def test_mtp_layers_that_no_one_would_copy_are_refused_by_name(tmp_path):
    """Under other names Transformers and we take them for nothing known; files that no index lists are never read."""
    mtp = save_with_mtp("qwen3_5_text", tmp_path)
    model, weights = build_without_weights(tmp_path, trust_remote_code=False), load_file(tmp_path / WEIGHTS)
    check_nothing_lost(model, tmp_path)
    own = {name: weight for name, weight in weights.items() if name not in mtp}
    apart = {name: weights[name] for name in mtp}

    renamed = {name.replace("mtp.", "nextn."): weight for name, weight in apart.items()}
    save_file({**own, **renamed}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"holds {len(mtp)} weights that .* does not have .*nextn\.fc\.weight"):
        check_nothing_lost(model, tmp_path)

    save_file(own, tmp_path / WEIGHTS, {"format": "pt"})
    save_file(apart, tmp_path / "mtp.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{len(mtp)} weights of multi-token prediction in mtp\.safetensors"):
        check_nothing_lost(model, tmp_path)

    files = {**dict.fromkeys(own, WEIGHTS), **dict.fromkeys(apart, "mtp.safetensors")}
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    check_nothing_lost(model, tmp_path)
