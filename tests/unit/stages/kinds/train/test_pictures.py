"""Trainings on rows with pictures begin with the loss that Transformers computes, and a reference's of ln 2."""

import json
import math
import shutil
from itertools import groupby
from threading import current_thread

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForImageTextToText, AutoProcessor

from stages.core.errors import DataError, ModelError
from stages.data.media.folder import MediaFolder
from stages.data.media.images import decode_picture
from stages.data.messages import in_parts
from stages.engines.export import weight_shapes
from stages.hubs.builtin import qwen3_vl
from stages.kinds.train import run as training
from stages.kinds.train.check_model import InputModels
from stages.kinds.train.checks import media_errors
from stages.models.facts import ModelFacts
from stages.models.processor import MediaProcessor
from tests.train_stage import make_config, make_context
from tests.unit.stages.data.media.conftest import config_fields, encoded, noise, write_processor
from tests.zoo import pictures
from tests.zoo.models import tiny_model

NAMES = ("a.png", "b.png", "a.png", None)
"""Pictures of the rows; the last one has none."""
DATA = {"dataset": "rows", "sequence_length": 128}


@pytest.fixture
def inputs(tmp_path):
    model, data = tmp_path / "base" / "model", tmp_path / "rows" / "data"
    for folder in (model, data):
        folder.mkdir(parents=True)
    write_processor(model)
    causal_lm = tiny_model("gemma3", **config_fields(model))
    with torch.no_grad():  # which begins with zeros, so that no picture would change anything
        causal_lm.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.3)
    causal_lm.save_pretrained(model)
    for seed, name in enumerate(("a.png", "b.png")):
        (data / name).write_bytes(encoded(noise((40, 24 + 8 * seed), seed)))
    return {"base": tmp_path / "base", "rows": tmp_path / "rows"}


def asked(number):
    content = f"<image>what {number}?" if NAMES[number] else f"what {number}?"
    return [{"role": "user", "content": content}]


def write_rows(data, *columns, **more):
    """Write rows of prompts with these columns of answers. more: other columns, each as the values of all rows."""
    rows = []
    for number, name in enumerate(NAMES):
        answers = {column: [{"role": "assistant", "content": f"{column} {number}"}] for column in columns}
        others = {column: values[number] for column, values in more.items()}
        rows.append({"prompt": asked(number), **answers, **others, "images": [name] if name else []})
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_losses(tmp_path, inputs, method, **fields):
    batches = {"global_batch_size": 2, "layout": {"micro_batch_size": 1}}
    config = make_config(method, **{"data": DATA, "steps": 3, "learning_rate": 3e-4, **batches, **fields})
    training.run(config, make_context(tmp_path / "work", inputs, config))
    lines = map(json.loads, (tmp_path / "work" / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"]["loss"] if "metrics" in line else line["loss"] for line in lines if "loss" in str(line)]


def loss_of_transformers(inputs, column):
    """Return the mean negative log-likelihood of the answers' tokens, each row alone."""
    folder, data = inputs["base"] / "model", inputs["rows"] / "data"
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    total, num_tokens = 0.0, 0
    for number, name in enumerate(NAMES):
        (question,) = asked(number)
        words = question["content"].removeprefix("<image>")
        parts = [*([{"type": "image"}] if name else []), {"type": "text", "text": words}]
        messages = [{"role": "user", "content": parts}]
        answered = [*messages, in_parts({"role": "assistant", "content": f"{column} {number}"})]
        options = {"images": [[decode_picture((data / name).read_bytes())]]} if name else {}
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
        texts = (prompt, processor.apply_chat_template(answered))
        before, whole = (processor(text=[text], return_tensors="pt", **options) for text in texts)
        first = before["input_ids"].shape[1]
        end = whole["input_ids"].shape[1] - 1  # the line's end after the turn is not learned
        with torch.no_grad():
            logits = model(**whole).logits[0].log_softmax(-1)
        learned = whole["input_ids"][0, first:end]
        total -= float(logits[first - 1 : end - 1].gather(1, learned[:, None]).sum())
        num_tokens += len(learned)
    return total / num_tokens


def test_supervised_training_begins_with_the_loss_of_transformers(tmp_path, inputs, monkeypatch):
    """Its pictures are decoded ahead, by another thread than the one that trains."""
    decoded_by, load = [], MediaFolder.load
    monkeypatch.setattr(MediaFolder, "load", lambda *given: decoded_by.append(current_thread().name) or load(*given))
    write_rows(inputs["rows"] / "data", "completion")
    losses = first_losses(tmp_path, inputs, "sft")
    ahead, of_the_record = (name for name, _ in groupby(decoded_by))
    assert (ahead, of_the_record) == ("batches_0", "MainThread")
    assert losses[0] == pytest.approx(loss_of_transformers(inputs, "completion"), abs=2e-6)
    assert losses[-1] < losses[0]
    exported = json.loads((tmp_path / "work" / "model" / "config.json").read_text())
    assert exported["architectures"] == ["Gemma3ForConditionalGeneration"]


def test_preferences_begin_with_ln_2(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", "chosen", "rejected")
    losses = first_losses(tmp_path, inputs, "dpo")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0]


def test_labelled_answers_begin_with_a_half(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", "completion", label=[True, False, True, False])
    losses = first_losses(tmp_path, inputs, "kto")
    assert losses[0] == pytest.approx(0.5, abs=1e-6)


def test_parts_that_do_not_learn_get_neither_frozen_nor_a_rate(tmp_path, inputs):
    (inputs["rows"] / "data" / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for fields in ({"freeze": ["projector"]}, {"part_learning_rates": {"projector": 1e-4}}):
        with pytest.raises(DataError, match=rf"`{next(iter(fields))}` names parts of a model that sees or hears"):
            first_losses(tmp_path, inputs, "sft", **fields)
        with pytest.raises(ValidationError, match=rf"`{next(iter(fields))}` .* `adapter`, whose base is frozen"):
            make_config(adapter={"rank": 2}, **fields)
    with pytest.raises(ValidationError, match="both name projector, which is frozen"):
        make_config(freeze=["projector"], part_learning_rates={"projector": 1e-4})
    with pytest.raises(ValidationError, match="is the fraction by which a step shrinks each weight"):
        make_config(weight_decay=0.1, part_learning_rates={"projector": 20.0})


@pytest.fixture
def teacher(tmp_path, inputs):
    """Provide the artifact of a teacher, the model with other weights, beside the inputs."""
    shutil.copytree(inputs["base"], tmp_path / "teacher")
    causal_lm = AutoModelForImageTextToText.from_pretrained(inputs["base"] / "model", dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    causal_lm.save_pretrained(tmp_path / "teacher" / "model")
    return tmp_path / "teacher"


def test_a_teacher_sees_the_pictures_too(tmp_path, inputs, teacher):
    write_rows(inputs["rows"] / "data", "completion")
    inputs["teacher"] = teacher
    first, _, last = first_losses(tmp_path, inputs, "distill", teacher="teacher")
    assert last < first
    # as teacher of itself, which would give other probabilities without the pictures
    assert first_losses(tmp_path / "itself", inputs, "distill", teacher="base", steps=1)[0] < 1e-6 < first


def test_a_teacher_that_sees_otherwise_and_a_teacher_on_a_server_are_refused(tmp_path, inputs, teacher):
    write_rows(inputs["rows"] / "data", "completion")
    inputs["teacher"] = teacher
    path = teacher / "model" / "processor_config.json"
    described = json.loads(path.read_text())
    described["image_processor"]["image_mean"] = [0.4, 0.5, 0.5]
    path.write_text(json.dumps(described))
    with pytest.raises(ModelError, match=r"takes a picture of the size \(64, 40\) in another way than the one in"):
        first_losses(tmp_path, inputs, "distill", teacher="teacher")
    path.unlink()
    with pytest.raises(ModelError, match=r"rows have pictures, and the model in .* cannot read them"):
        first_losses(tmp_path, inputs, "distill", teacher="teacher")
    server = {"teacher_server": {"url": "http://127.0.0.1:9/v1", "served_model": "x"}}
    problems = "; ".join(media_errors(make_config("distill", data=DATA, distill=server)))
    assert "`distill.teacher_server` does not go with data with media, since it is asked" in problems


def test_a_resumed_training_ends_with_the_bits_of_an_uninterrupted_one_and_frozen_parts_with_their_own(
    tmp_path, inputs
):
    write_rows(inputs["rows"] / "data", "completion")
    fields = {"freeze": ["vision_tower"], "steps": 4, "warmup_steps": 2, "execution": {"checkpoint_every_steps": 2}}
    first_losses(tmp_path, inputs, "sft", **fields)
    whole, resumed = tmp_path / "work", tmp_path / "resumed"
    checkpoints = resumed / "work" / "scratch" / "checkpoints"
    shutil.copytree(whole / "scratch", checkpoints.parent)
    shutil.rmtree(checkpoints / "step-4")
    first_losses(resumed, inputs, "sft", **fields)
    weights = [
        load_file(folder / "model" / "model.safetensors") for folder in (inputs["base"], whole, resumed / "work")
    ]
    for name, (start, trained, again) in {name: [one[name] for one in weights] for name in weights[0]}.items():
        assert torch.equal(trained, again), name
        assert torch.equal(start, trained) == ("vision_tower" in name), name
    stored = FileSystemReader(checkpoints / "step-2").read_metadata().state_dict_metadata
    assert any("projector" in name for name in stored)
    assert not any("vision_tower" in name for name in stored), "neither weights nor moments of what is frozen"


def test_pictures_are_scaled_as_the_recipe_bounds_them(tmp_path, inputs):
    start = ModelFacts(pictures.save_family("qwen2_5_vl", tmp_path / "qwen" / "model"))
    models, config = InputModels(start), make_config("sft", data=DATA, media={"max_pixels": 64 * 64})
    bounded = models.as_started(config, tmp_path / "room").start
    # patches of 8 × 8 pixels, of which 2 × 2 are a token
    assert [MediaProcessor(one.folder).num_tokens((128, 128)) for one in (start, bounded)] == [64, 16]
    assert weight_shapes(bounded.folder) == weight_shapes(start.folder)
    with pytest.raises(ModelError, match=r"Gemma3ImageProcessor of .* does not scale pictures to a number of pixels"):
        InputModels(ModelFacts(inputs["base"] / "model")).as_started(config, tmp_path / "room")


def test_pictures_grow_to_no_more_pixels_than_are_read():
    with pytest.raises(ValueError, match=r"`min_pixels: 1000000000` is more than 33,554,432, which no picture"):
        make_config("sft", media={"min_pixels": 10**9, "max_pixels": 10**9})


def test_a_teacher_with_other_bounds_sees_what_the_model_that_learns_sees(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", "completion")
    inputs["base"] = tmp_path / "qwen"
    (tmp_path / "qwen" / "model").mkdir(parents=True)
    qwen3_vl.make(tmp_path / "qwen" / "model")
    bounds = {"min_pixels": 128 * 128, "max_pixels": 160 * 160}
    # As teacher of itself, without the bounds: of equal weights, the divergence is that of what they see.
    losses = first_losses(tmp_path, inputs, "distill", teacher="base", steps=1, media=bounds)
    assert losses[0] < 1e-6
    assert [MediaProcessor(tmp_path / one / "model").num_tokens((40, 40)) for one in ("qwen", "work")] == [4, 64]
