"""Measurements of a training: padding, tokens per second without it, and what the exported model predicts."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages.core.contract import StageResult
from stages.kinds.train.exported import check_exported
from stages.kinds.train.run import run
from tests.train_stage import logged, make_artifacts, make_config, make_context

ROWS = [*({"text": f"1 + {number} = 2"} for number in range(3)), {"text": "1 + 1 = 2" * 5}]


CONFIG = make_config(
    data={"dataset": "problems", "format": "text", "sequence_length": 64, "packing": False},
    steps=3,
    layout={"micro_batch_size": 4},
    execution={"measure_matmul_rate": False},
    export_dtype="float32",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StageResult]:
    """Provide the results of three training steps without packing, on four rows of which one is much longer."""
    folder = tmp_path_factory.mktemp("measured")
    artifacts = make_artifacts(folder)
    (artifacts["problems"] / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder / "work", run(CONFIG, make_context(folder / "work", artifacts, CONFIG))


def test_padding_without_packing_is_what_the_batches_had(trained: tuple[Path, StageResult]) -> None:
    work, result = trained
    last = logged(work)[-1]
    padding = result.metrics["padding_fraction"]
    assert padding == pytest.approx(1 - last["real_tokens_per_s"] / last["tokens_per_s"])
    tokenizer = AutoTokenizer.from_pretrained(work.parent / "base" / "model")
    lengths = [len(tokenizer(row["text"]).input_ids) + 1 for row in ROWS]  # and the end of the text
    assert sum(lengths) == result.metrics["num_tokens"]
    assert padding == pytest.approx(1 - sum(lengths) / (len(lengths) * max(lengths)))


def test_the_rate_that_people_are_shown_is_of_real_tokens(trained: tuple[Path, StageResult]) -> None:
    work, result = trained
    assert next(iter(result.metrics)) == "real_tokens_per_s"
    assert "tokens_per_s" in result.metrics
    messages = [json.loads(line).get("message", "") for line in (work / "events.jsonl").read_text().splitlines()]
    rates = [
        float(one.split(", ")[1].removesuffix(" tokens/s").replace(",", "")) for one in messages if " tokens/s" in one
    ]
    real = [row["real_tokens_per_s"] for row in logged(work)]
    assert rates and all(any(abs(rate - one) <= 1 for one in real) for rate in rates)


def test_an_export_with_other_weights_than_were_trained_is_refused(
    trained: tuple[Path, StageResult], tmp_path: Path
) -> None:
    work, result = trained
    assert 0 <= result.metrics["export_difference"] < 1e-5
    start = work.parent / "base" / "model"
    weights = load_file(work / "model" / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.0.mlp.down_proj.weight"))
    for damage, message in (
        (weights, ""),
        ({**weights, name: weights[name].roll(1, 0)}, "nats a token from those of the model at the end of training"),
        ({**weights, **load_file(start / "model.safetensors")}, "equals the one that training started from"),
    ):
        shutil.copytree(work, tmp_path / "work", dirs_exist_ok=True)
        context = make_context(tmp_path / "work", {}, CONFIG)
        save_file(damage, context.work / "model" / "model.safetensors", {"format": "pt"})
        check_exported(CONFIG, context, start, "float32")
        assert message in " ".join(map(str, context.findings)) and bool(context.findings) == bool(message)
