"""Documents with pictures train as plain Transformers trains each alone; quick families here, all of them nightly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.model import load_model
from stages.engines.fsdp.parts import freeze_parts
from stages.engines.recorded import RecordedBatch, record_log_probabilities
from stages.engines.settings import AdamSettings, EngineSettings, MediaSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.parts import parts_of
from stages.parallel.layout import Layout
from tests.unit.stages.kinds.merge import test_merge
from tests.zoo.models import tiny_model
from tests.zoo.pictures import Documents, load_seeing, log_probabilities, save_family
from tests.zoo.proofs import one_process
from tests.zoo.proofs import save_family as save_text_family
from tests.zoo.test_pictures import ADMITTED, adapted_parts, admission, pictures


def engine_settings(**fields: Any) -> EngineSettings:
    return EngineSettings(Layout(), "fp32", AdamSettings(1e-2), **fields)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2_5_vl", "packed"), ("gemma3", "packed"), ("gemma4", "packed"), ("llama4", "rows"), ("qwen3_5", "packed")],
)
def test_a_step_and_its_export_equal_transformers(family: str, layout: str, tmp_path: Path) -> None:
    assert pictures(save_family(family, tmp_path)) == layout


def test_a_model_without_processor_cannot_be_trained_on_pictures(tmp_path: Path) -> None:
    folder = save_text_family("qwen3", tmp_path)
    with pytest.raises(ModelError, match=r"rows have pictures, and the model in .* has no processor"):
        load_model(folder, reads_weights=True, trust_remote_code=False, sees=["image"])


@pytest.mark.parametrize("family", ["mistral3", "kimi_k25", "paligemma"])
def test_a_family_is_admitted_by_the_probe_or_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admission(family, tmp_path, monkeypatch).startswith(ADMITTED[family])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "llava_next"])
def test_every_parameter_is_in_one_part_and_mergers_are_projectors(family: str) -> None:
    model = tiny_model(family)
    parts = parts_of(model)
    names = [name for part in parts.values() for name in part]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [part for part, named in parts.items() if not named] == ["audio_tower"]
    mergers = [name for name in names if "merger" in name or "projector" in name]
    assert mergers and {*mergers} <= parts["projector"].keys()
    freeze_parts(model, MediaSettings(("vision_tower", "language_model")))
    assert {name for name, one in model.named_parameters() if one.requires_grad} == parts["projector"].keys()


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ModelError, match="nothing would learn"):
        freeze_parts(tiny_model("gemma3"), MediaSettings(("vision_tower", "projector", "language_model")))


def test_parts_learn_at_their_own_rates_as_groups_of_torch_do(tmp_path: Path) -> None:
    documents = Documents(save_family("qwen2_5_vl", tmp_path))
    batch, rate, ratios = documents.batch(), 1e-2, {"vision_tower": 0.1, "projector": 0.5}
    media = MediaSettings(learning_rate_ratios=ratios)  # type: ignore[arg-type]
    with one_process():
        engine = FsdpEngine(ModelFacts(tmp_path), engine_settings(media=media), torch.device("cpu"))
        for _ in range(2):
            engine.train_step([batch], SftLoss(), rate, None)
        found = dict(engine.whole_weights(torch.float32))
        engine.close()
        untrained = MediaSettings(("projector",), {"projector": 0.5})
        with pytest.raises(ModelError, match="`part_learning_rates` names projector, of which nothing learns"):
            FsdpEngine(ModelFacts(tmp_path), engine_settings(media=untrained), torch.device("cpu"))
    model = load_seeing(tmp_path)
    groups = [{"params": named.values(), "lr": rate * ratios.get(part, 1.0)} for part, named in parts_of(model).items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        (-log_probabilities(model, documents, batch).sum() / batch.signal.has_target.sum()).backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "expected")
    expected, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "expected", tmp_path))
    difference, moved = (
        torch.stack([(one[name] - expected[name]).norm() for name in expected]).norm() for one in (found, start)
    )
    assert difference < 1e-3 * moved


def test_an_adapter_goes_on_the_language_model_is_loaded_by_peft_and_merged(tmp_path: Path) -> None:
    base, trained = tmp_path / test_merge.BASE, tmp_path / "trained"
    documents = Documents(save_family("qwen2_5_vl", base / "model"))
    batch, options = documents.batch(), AdapterConfig(rank=2)
    with one_process():
        settings = engine_settings(adapter=options, media=MediaSettings())
        engine = FsdpEngine(ModelFacts(base / "model"), settings, torch.device("cpu"))
        before = engine.predictions(batch)[0]
        for _ in range(2):  # A has no gradient in the first step, as B is 0
            engine.train_step([batch], SftLoss(), 1e-2, None)
        after = engine.predictions(batch)[0]
        assert engine.export(trained / "adapter", torch.float32) == []
        record_log_probabilities(engine, RecordedBatch(batch, pictures=documents.pictures), trained)
        engine.close()
    adapted = PeftModel.from_pretrained(load_seeing(base / "model"), str(trained / "adapter")).eval()
    assert (after - before).abs().max() > 1e-2
    with torch.no_grad():
        torch.testing.assert_close(after, log_probabilities(adapted, documents, batch), atol=5e-6, rtol=0)
    with safe_open(trained / "adapter" / "adapter_model.safetensors", "pt") as file:
        # the base's files call them `model.layers`
        assert all(".language_model.layers." in name for name in file.keys())  # noqa: SIM118
    test_merge.note_base(trained)
    metrics = test_merge.merge({"base": base, "one": trained}, work := tmp_path / "merged", adapter="one").metrics
    assert metrics["max_abs_logprob_difference"] < 1e-5
    merged = Documents(work / "model")  # by the processor that came with it
    with torch.no_grad():
        found = log_probabilities(load_seeing(work / "model"), merged, batch)
    torch.testing.assert_close(after, found, atol=5e-6, rtol=0)


def test_an_adapter_of_a_tower_is_loaded_by_peft_and_merged(tmp_path: Path) -> None:
    targets = ".*(language_model|vision_tower).*q_proj"
    assert adapted_parts(save_family("gemma3", tmp_path), targets) == {"language_model", "vision_tower"}
