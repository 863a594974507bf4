"""Trainings on rows with pictures begin with the loss that Transformers computes, and a reference's of ln 2."""

import json
import math

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from stages.data.media.images import decode_picture
from stages.data.messages import in_parts
from stages.kinds.train import run as training
from tests.train_stage import make_config, make_context
from tests.unit.stages.data.media.conftest import config_fields, encoded, noise, write_processor
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


def write_rows(data, *columns):
    rows = []
    for number, name in enumerate(NAMES):
        answers = {column: [{"role": "assistant", "content": f"{column} {number}"}] for column in columns}
        rows.append({"prompt": asked(number), **answers, "images": [name] if name else []})
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_losses(tmp_path, inputs, method):
    batches = {"global_batch_size": 2, "layout": {"micro_batch_size": 1}}
    config = make_config(method, data=DATA, steps=3, learning_rate=3e-4, **batches)
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


def test_supervised_training_begins_with_the_loss_of_transformers(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", "completion")
    losses = first_losses(tmp_path, inputs, "sft")
    assert losses[0] == pytest.approx(loss_of_transformers(inputs, "completion"), abs=2e-6)
    assert losses[-1] < losses[0]
    exported = json.loads((tmp_path / "work" / "model" / "config.json").read_text())
    assert exported["architectures"] == ["Gemma3ForConditionalGeneration"]


def test_preferences_begin_with_ln_2(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", "chosen", "rejected")
    losses = first_losses(tmp_path, inputs, "dpo")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0]
