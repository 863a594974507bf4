"""Continued pre-training gives the losses of a plain Transformers loop on the rows that `group_texts` makes."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.kinds.train.order import DataOrder
from tests.train_stage import logged, make_artifacts, make_config, make_context, run_to_end

NUM_STEPS, BATCH, LENGTH, RATE = 3, 4, 32, 1e-3
TEXTS = {
    "train": [
        f"Number {number} is {'even' if number % 2 == 0 else 'odd'}. " * (number % 7 + 1) for number in range(40)
    ],
    "validation": ["A text that nobody has learned — held out. " * 5, "Another one."],
}


def rows_of(texts, tokenizer):
    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH), len(ids)


def test_losses_are_those_of_plain_transformers(tmp_path):
    artifacts = make_artifacts(tmp_path / "artifacts")
    for split, texts in TEXTS.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (artifacts["problems"] / "data" / f"{split}.jsonl").write_text(lines)
    cut = {"format": "text", "packing": "cut", "sequence_length": LENGTH}
    config = make_config(
        data={"dataset": "problems", "evaluation_split": "validation", **cut},
        steps=NUM_STEPS,
        global_batch_size=BATCH,
        learning_rate=RATE,
        schedule="constant",
        adam_epsilon=1e-3,
        max_grad_norm=None,
    )
    make_context(tmp_path / "work", artifacts, config)
    run_to_end(tmp_path / "work", config)

    folder = artifacts["base"] / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows, _ = rows_of(TEXTS["train"], tokenizer)
    order = DataOrder(len(rows), BATCH, BATCH, 0, 1, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0)
    for step, metrics in enumerate(logged(tmp_path / "work")[:NUM_STEPS], 1):
        batch = rows[order.global_batch(step)]
        loss = model(input_ids=batch, labels=batch).loss
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    result = json.loads((tmp_path / "work" / "result.json").read_text())["metrics"]
    held_out, num_tokens = rows_of(TEXTS["validation"], tokenizer)
    with torch.no_grad():
        loss = model(input_ids=held_out, labels=held_out).loss.item()
    assert result["evaluation_loss"] == pytest.approx(loss, rel=1e-5)
    num_bytes = sum(len(text.encode()) for text in TEXTS["validation"])
    assert result["evaluation_bits_per_byte"] == pytest.approx(loss * num_tokens / num_bytes / math.log(2), rel=1e-5)
