"""Conflicts between a model's config and a train stage are found before anything slow starts."""

import json
from pathlib import Path

import pytest

from stages.core.contract import StageContext
from stages.core.errors import ModelError
from stages.kinds.train.check import mixture_problems
from stages.kinds.train.check_model import check_lengths, check_model
from stages.models.facts import ModelFacts
from tests.train_stage import make_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 13,
    "max_position_embeddings": 64,
}


def write(folder: Path, **fields: object) -> tuple[Path, StageContext]:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return folder, StageContext(folder, "sft", "0" * 12, {}, {}, folder)


def warnings(context: StageContext) -> list[str]:
    path = context.work / "events.jsonl"
    return [json.loads(line)["message"] for line in path.read_text().splitlines()] if path.is_file() else []


def test_code_of_the_model_that_is_not_run_is_said(tmp_path: Path) -> None:
    folder, context = write(tmp_path, auto_map={"AutoModelForCausalLM": "mine.Model"})
    check_model(make_config(trust_remote_code=True), context, ModelFacts(folder))
    assert warnings(context) == []
    check_model(make_config(), context, ModelFacts(folder))
    assert "(auto_map), which are not run" in warnings(context)[0]


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    folder, context = write(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match=r"quantized already \(awq\)"):
        check_model(make_config(), context, ModelFacts(folder))


def test_routers_are_asked_for_of_mixtures_only(tmp_path: Path) -> None:
    said = "`moe` is for mixtures of experts"
    folder, context = write(tmp_path)
    config = make_config(engine="megatron", moe={"freeze_router": True})
    assert not list(mixture_problems(make_config(), folder))
    [(field, error)] = mixture_problems(config, folder)
    assert field == "moe" and said in str(error)
    with pytest.raises(ModelError, match=said):
        check_model(config, context, ModelFacts(folder))


def test_documents_beyond_the_positions_are_said_or_refused(tmp_path: Path) -> None:
    folder, context = write(tmp_path)
    check_lengths(64, context, ModelFacts(folder))
    assert warnings(context) == []
    check_lengths(65, context, ModelFacts(folder))
    assert "longest document has 65 tokens, and the model's config says 64 positions" in warnings(context)[0]
    folder, context = write(tmp_path, model_type="gpt2")
    with pytest.raises(ModelError, match=r"65 tokens.*64 positions, which are a table; lower data\.sequence_length"):
        check_lengths(65, context, ModelFacts(folder))
