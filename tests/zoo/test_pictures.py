"""Documents with pictures train in every family that sees as plain Transformers trains each alone, and are exported."""

import tempfile
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from stages.adapters.config import AdapterConfig
from stages.adapters.effect import changing, merged_weight
from stages.adapters.files import read_adapter
from stages.core.contract import StageContext
from stages.core.errors import ModelError
from stages.data.media.expansion import expanded
from stages.data.media_reference import MediaReference
from stages.data.messages import Conversation
from stages.data.templates import Rendered
from stages.data.tokenizer import DocumentTokenizer
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.model import load_model
from stages.engines.fsdp.parts import parts_of
from stages.engines.recorded import RecordedBatch, record_log_probabilities
from stages.engines.settings import AdamSettings, EngineSettings, MediaSettings
from stages.kinds.merge.config import MergeConfig
from stages.kinds.merge.merging import merge
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.known_configs import CONFIGS
from stages.models.known_vision import SEEING
from stages.models.loading import model_without_weights
from stages.models.media import SoundSize, VideoSize
from stages.models.walked import shape_of
from stages.parallel.layout import Layout
from tests.parity.pictures_program import Drawn
from tests.zoo.pictures import (
    Documents,
    hearing_error,
    load_seeing,
    log_probabilities,
    save_family,
    save_hearing,
    tower_error,
)
from tests.zoo.proofs import LEARNING_RATE, one_process
from tests.zoo.table import WORKS, recorded

LARGEST_OF_PICTURES = 5e-6
"""Largest difference, in nats or relative, on documents with pictures, whose log-probabilities are large."""
MOST_FLOPS_ERROR = 0.04
ADMITTED = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v", "kimi_k25", "llava", "llava_next"),
        "packed",
    ),
    **dict.fromkeys(("llava_onevision", "internvl", "idefics3", "smolvlm", "mistral3"), "packed"),
    **dict.fromkeys(("gemma3", "gemma4"), "packed"),  # whose tokens of a picture see each other
    **dict.fromkeys(("qwen3_5", "lfm2_vl"), "packed"),  # whose layers carry something along
    "llama4": "rows",
    "paligemma": "the processor in",
}
"""Way in which documents of each family are trained, found by the probe, or the beginning of the refusal."""
SEE = [family for family, cells in recorded().items() if cells["pictures"] in WORKS]
"""Families that train on pictures, as the table of families shows."""


def admission(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the probe of a family's architecture says, with drawn pictures: `packed`, `rows` or why neither."""
    if family == "smolvlm":  # which spells out numbers of frames, of videos alone, by a package that we do without
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    save_family(family, folder)
    try:
        model = load_model(folder, reads_weights=False, trust_remote_code=False, sees=["image"])
    except ModelError as error:
        return str(error)
    return model.verdict.tags["documents"]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ADMITTED)
def test_a_family_is_admitted_by_the_probe_or_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admission(family, tmp_path, monkeypatch).startswith(ADMITTED[family])


@pytest.mark.nightly
@pytest.mark.parametrize("family", SEE)
def test_what_a_processor_writes_for_pictures_is_never_learned(family: str, tmp_path: Path) -> None:
    documents = Documents(save_family(family, tmp_path))
    tokenizer = DocumentTokenizer(tmp_path, None, "all")
    for text, ids, pictures in zip(documents.texts, documents.ids, documents.pictures, strict=True):
        media = tuple(MediaReference("image", "a.png", "0" * 64, *one.size) for one in pictures)
        whole = Rendered(text, ((0, len(text)),))  # of which every token would be learned
        (found,) = tokenizer.encode([expanded(whole, Conversation([], media=media), documents.processor)])
        assert found.ids.tolist() == ids.tolist()
        around = documents.processor._tokens(text.replace(documents.processor._placeholder["image"], " "))
        assert found.ids[found.loss].tolist() == around[1:]  # nothing predicts the first
        assert bool(media) != found.loss[1:].all()


@pytest.mark.nightly
@pytest.mark.parametrize("family", SEE)
def test_the_planner_counts_a_picture_as_torch_does(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    errors = [abs(tower_error(tmp_path, size)) for size in ((40, 40), (48, 90), (100, 70))]
    assert max(errors) <= MOST_FLOPS_ERROR


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_vl", "glm46v"])
def test_the_planner_counts_a_video_as_torch_does(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    errors = [abs(tower_error(tmp_path, size)) for size in (VideoSize(64, 40, 30, 3.0), VideoSize(48, 90, 12, 2.0))]
    assert max(errors) <= MOST_FLOPS_ERROR


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2_audio", "gemma4"])
def test_the_planner_counts_a_sound_as_torch_does(family: str, tmp_path: Path) -> None:
    save_hearing(family, tmp_path)
    errors = [abs(hearing_error(tmp_path, SoundSize(length, 16000))) for length in (16000, 30000, 9000)]
    assert max(errors) <= MOST_FLOPS_ERROR


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_is_measured(name: str) -> None:
    shape = shape_of(ModelFacts(CONFIGS[name].config))
    beside_text = shape.towers[0].other_parameters if shape.towers else shape.other_parameters
    num_parameters = shape.num_parameters - shape.other_parameters + beside_text
    assert num_parameters == pytest.approx(CONFIGS[name].parameters, rel=0.005)
    assert (name in SEEING) == (shape.towers != () and shape.towers[0].usual_patches > 1000)


@pytest.mark.nightly
@pytest.mark.parametrize("family", SEE)
def test_an_adapter_is_loaded_by_peft_and_merged(family: str, tmp_path: Path) -> None:
    targets = ".*language_model.*[qv]_proj" if family == "llama4" else "all-linear"  # whose routers are refused by name
    assert adapted_parts(save_family(family, tmp_path), targets) == {"language_model"}


@pytest.mark.nightly
@pytest.mark.parametrize("frozen", [("vision_tower",), ("vision_tower", "projector"), ("language_model",)])
@pytest.mark.parametrize("family", SEE)
def test_frozen_parts_stay_to_the_bit_and_all_others_learn(
    family: str, frozen: tuple[str, ...], tmp_path: Path
) -> None:
    """Every parameter is in one part; a part that learns changes wherever plain Transformers finds a gradient."""
    folder = save_family(family, tmp_path / "base")
    documents = Documents(folder)
    batch, reference = documents.batch(), load_seeing(folder)
    (-log_probabilities(reference, documents, batch).sum()).backward()
    parts = {part: weights for part, weights in parts_of(reference).items() if weights}
    named = [name for one in parts.values() for name in one]
    assert sorted(named) == sorted(name for name, _ in reference.named_parameters())
    media = MediaSettings(tuple(part for part in parts if part in frozen))
    with one_process():
        settings = EngineSettings(Layout(), "fp32", AdamSettings(0.0), media=media)
        engine = FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
        for _ in range(2):
            engine.train_step([batch], SftLoss(), LEARNING_RATE, None)
        engine.export(tmp_path / "trained", torch.float32)
        engine.close()
    after = dict(load_seeing(tmp_path / "trained").named_parameters())
    for part, before in parts.items():
        changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
        learns = {name for name, one in before.items() if one.grad is not None and one.grad.norm() > 1e-6}
        # Gemma 3's projector begins at 0, so that its tower learns from the second step on.
        is_trained = part not in frozen and part != "audio_tower"  # there are no sounds
        assert changed and learns <= changed if is_trained else not changed


@pytest.mark.nightly
@pytest.mark.parametrize("family", SEE)
def test_recomputed_and_offloaded_trainings_have_the_same_losses(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    batch = Documents(folder).batch()
    saved = [{}, *({"recompute": how} for how in ("selective", "full", "offload")), {"cpu_offload": True}]
    found = []
    for layout in saved:
        settings = EngineSettings(Layout(**layout), "fp32", AdamSettings(LEARNING_RATE), media=MediaSettings())
        with one_process():
            engine = FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
            steps = [engine.train_step([batch], SftLoss(), LEARNING_RATE, None) for _ in range(2)]
            engine.close()
        found.append([number for step in steps for number in (step.loss, step.grad_norm)])
    assert found == [pytest.approx(found[0], rel=1e-6)] * len(saved)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])  # positions in pictures; tokens that see each other
def test_compiled_layers_beside_a_tower_have_the_same_losses(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    batch = Documents(folder).batch()
    found = []
    for compiles in (False, True):
        layout = Layout(compile=compiles, recompute="full")
        settings = EngineSettings(layout, "fp32", AdamSettings(LEARNING_RATE), media=MediaSettings())
        with one_process():
            engine = FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
            steps = [engine.train_step([batch], SftLoss(), LEARNING_RATE, None) for _ in range(2)]
            engine.close()
        found.append([number for step in steps for number in (step.loss, step.grad_norm)])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("combination", ["linear", "ties"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])  # whose files call weights otherwise
def test_mixed_adapters_are_merged_as_peft_does(family: str, combination: str, tmp_path: Path) -> None:
    """Adapters of the language part and of all parts are mixed; pictures in recorded documents tell of the towers."""
    inputs = {name: tmp_path / name for name in ("base", "language", "whole")}
    folder = save_family(family, inputs["base"] / "model")
    documents = Documents(folder)
    for name, targets in (("language", r".*language_model.*[qv]_proj"), ("whole", r".*[qv]_proj|.*qkv")):
        settings = EngineSettings(
            Layout(), "fp32", AdamSettings(1e-2), adapter=AdapterConfig(rank=2, target_modules=targets),
            media=MediaSettings(),
        )  # fmt: skip
        with one_process():
            engine = FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
            for _ in range(2):
                engine.train_step([documents.batch()], SftLoss(), 1e-2, None)
            engine.export(inputs[name] / "adapter", torch.float32)
            recorded = RecordedBatch(documents.batch(), pictures=documents.pictures)
            record_log_probabilities(engine, recorded, inputs[name])
            engine.close()
    density = {"density": 0.5} if combination == "ties" else {}
    fields = {"model": "base", "adapters": ["language", "whole"], "combination": combination, **density}
    config = MergeConfig.model_validate({"kind": "merge", "max_difference": 1e-5, **fields})
    (tmp_path / "work").mkdir()
    context = StageContext(tmp_path / "work", "merged", "0" * 12, inputs, {}, tmp_path / "work")
    merge(config, context)
    assert not context.findings
    mixed = PeftModel.from_pretrained(load_seeing(folder), str(inputs["language"] / "adapter"), "language")
    mixed.load_adapter(str(inputs["whole"] / "adapter"), "whole")
    mixed.add_weighted_adapter(["language", "whole"], [1.0, 1.0], "mixed", combination, **density)
    mixed.set_adapter("mixed")
    merged = load_seeing(tmp_path / "work" / "model")
    with torch.no_grad():
        found, expected = (log_probabilities(one, documents, documents.batch()) for one in (merged, mixed.eval()))
    torch.testing.assert_close(found, expected, atol=LARGEST_OF_PICTURES, rtol=0)
    before, after = (dict(parts_of(one)["vision_tower"]) for one in (load_seeing(folder), merged))
    assert any(not torch.equal(weight, after[name]) for name, weight in before.items())


def pictures(folder: Path) -> str:
    """Train one step on documents with pictures and export: losses and the exported model are Transformers' own.

    Returns how documents are laid out, `packed` or `rows`.
    """
    documents = Documents(folder)
    batch = documents.batch()
    reference = load_seeing(folder)
    expected = log_probabilities(reference, documents, batch)
    loss = -expected.sum() / batch.signal.has_target.sum()
    loss.backward()
    gradients = [one.grad for one in reference.parameters() if one.grad is not None]
    norm = torch.stack([one.norm() for one in gradients]).norm().item()
    with one_process(), tempfile.TemporaryDirectory() as name:
        settings = EngineSettings(Layout(), "fp32", AdamSettings(LEARNING_RATE), media=MediaSettings())
        engine = FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
        before = engine.predictions(batch)[0]
        steps = [engine.train_step([batch], SftLoss(), LEARNING_RATE, None) for _ in range(2)]
        after = engine.predictions(batch)[0]
        engine.export(Path(name), torch.float32)
        with torch.no_grad():
            exported = log_probabilities(load_seeing(Path(name)), Documents(Path(name)), batch)
        layout = engine.tags["documents"]
        engine.close()
    differences = {
        "the loss": abs(steps[0].loss - loss.item()),
        "the gradient's norm": abs(steps[0].grad_norm / norm - 1),
        "log-probabilities": (before - expected).abs().max().item(),
        "the exported model's log-probabilities": (after - exported).abs().max().item(),
    }
    wrong = [f"{what} by {number:.1g}" for what, number in differences.items() if not number <= LARGEST_OF_PICTURES]
    if not (after - before).abs().max() > 1e-2:
        return "nothing was learned"
    return f"differs in {', '.join(wrong)}" if wrong else layout


def adapted_parts(folder: Path, targets: str) -> set[str]:
    """Train an adapter on documents with pictures; PEFT over the base, and the merged model, give the same.

    Returns the parts of the model that it adapts.
    """
    documents, target = Documents(folder), folder / "adapter"
    batch, options = documents.batch(), AdapterConfig(rank=2, target_modules=targets)
    with one_process():
        settings = EngineSettings(Layout(), "fp32", AdamSettings(1e-2), adapter=options, media=MediaSettings())
        engine = FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
        before = engine.predictions(batch)[0]
        for _ in range(2):  # A has no gradient in the first step, as B is 0
            engine.train_step([batch], SftLoss(), 1e-2, None)
        after = engine.predictions(batch)[0]
        assert engine.export(target, torch.float32) == []
        engine.close()
    assert (after - before).abs().max() > 1e-2
    with torch.no_grad():
        found = log_probabilities(PeftModel.from_pretrained(load_seeing(folder), str(target)).eval(), documents, batch)
    torch.testing.assert_close(after, found, atol=LARGEST_OF_PICTURES, rtol=0)
    adapter, base = read_adapter(target), model_without_weights(folder, head="pictures")
    changes, weights = changing(adapter, base), load_file(folder / "model.safetensors")
    assert changes.keys() <= weights.keys()
    merged = {name: merged_weight(changes, name, weight) for name, weight in weights.items()}
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        found = log_probabilities(load_seeing(folder), documents, batch)
    torch.testing.assert_close(after, found, atol=LARGEST_OF_PICTURES, rtol=0)
    return {part for part, named in parts_of(base).items() if named.keys() & adapter.weights}


@pytest.mark.nightly
def test_documents_with_pictures_and_sounds_are_packed_as_transformers_reads_each_alone(tmp_path: Path) -> None:
    """Gemma 4's tokens of a picture see each other both ways, those of a sound do not."""
    save_hearing("gemma4", tmp_path)
    documents = Drawn(tmp_path, [[SoundSize(8000, 16000)], [(64, 40), SoundSize(6000, 8000)], []])
    batch = documents.batch((0, 1, 2))
    options = {"dtype": torch.float32, "attn_implementation": {"text_config": "eager"}}
    reference = AutoModelForMultimodalLM.from_pretrained(tmp_path, **options).eval()  # eager towers misread their masks
    with one_process(), torch.no_grad():
        settings = EngineSettings(
            Layout(), "fp32", AdamSettings(LEARNING_RATE), media=MediaSettings(kinds=("image", "audio"))
        )
        engine = FsdpEngine(ModelFacts(tmp_path), settings, torch.device("cpu"))
        found = engine.predictions(batch)[0]
        engine.close()
        given = [documents.inputs(number) for number in range(3)]
        logits = torch.cat([reference(**one, use_cache=False).logits for one in given], dim=1)
    targets = batch.signal.targets.clamp(min=0)[..., None]
    expected = logits.log_softmax(-1).gather(2, targets).squeeze(2) * batch.signal.has_target
    torch.testing.assert_close(found, expected, atol=LARGEST_OF_PICTURES, rtol=0)
