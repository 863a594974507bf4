"""A training learns a token that its model did not have, and what it exports is served with it."""

import json
import random
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.core.contract import StageInput
from stages.kinds.train.check import check
from stages.kinds.train.look import look
from stages.kinds.train.run import run
from tests.pipeline.test_speculation import serving
from tests.train_stage import logged, make_artifacts, make_config, make_context

TOKEN = "<|odd|>"
NUM_OLD, NUM_ROWS = 288, 320
"""Tokens of the built-in model, and the next multiple of 32, as 32 is the largest power of two in 288."""


@pytest.fixture(scope="module", params=["fsdp", pytest.param("megatron", marks=pytest.mark.nightly)])
def trained(request, tmp_path_factory):
    """Provide the work folder of a training on digits, in which a new token follows every odd one."""
    folder = tmp_path_factory.mktemp("added")
    artifacts, draw = make_artifacts(folder), random.Random(0)
    rows = ([draw.choice("0123456789") for _ in range(30)] for _ in range(128))
    texts = ["".join(f"{digit}{TOKEN if digit in '13579' else ''}" for digit in row) for row in rows]
    path = artifacts["problems"] / "data/train.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = make_config(
        data={"dataset": "problems", "format": "text", "sequence_length": 64, "add_tokens": [TOKEN]},
        engine=request.param,
        steps=30,
        global_batch_size=8,
        learning_rate=3e-3,
        execution={"measure_matmul_rate": False},
    )
    run(config, make_context(folder / "work", artifacts, config))
    return folder / "work"


def test_the_new_token_is_learned_and_exported(trained):
    losses = [row["loss"] for row in logged(trained)]
    assert losses[-1] < losses[0] / 2
    assert json.loads((trained / "model/config.json").read_text())["vocab_size"] == NUM_ROWS
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    ids = tokenizer(f"24{TOKEN}7").input_ids
    assert ids[2] == NUM_OLD and len(ids) == 4

    model = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    with torch.no_grad():
        chosen = model(torch.tensor([ids])).logits[0].argmax(-1)
    assert (chosen == NUM_OLD).tolist() == [False, False, False, True], "after the odd digit alone"
    # The padding began as the same mean, and no text has it.
    rows = load_file(trained / "model/model.safetensors")["model.embed_tokens.weight"]
    assert (rows[NUM_OLD] - rows[NUM_OLD + 1]).abs().max() > 1e-2


def test_a_look_at_the_data_shows_the_new_token_and_a_known_one_is_refused_before_training(trained, tmp_path):
    given = StageInput.model_validate_json((trained / "config.json").read_text())
    shown = look(given, 2, tmp_path)
    document = shown.rows[0].documents[0]
    text = "".join(piece.text for piece in document.pieces)
    assert text.count(TOKEN) > 5
    assert document.num_tokens == len(re.findall(r"\d|<\|\w+\|>", text))
    assert list(check(given)) == []
    data = {**given.config["data"], "add_tokens": [TOKEN, "<|im_end|>"]}
    known = given.model_copy(update={"config": {**given.config, "data": data}})
    ((field, error),) = check(known)
    assert field == "data.add_tokens"
    assert "the tokenizer has '<|im_end|>' already" in str(error)


@pytest.mark.nightly
def test_it_is_served_with_the_new_token(trained, tmp_path):
    prompt = AutoTokenizer.from_pretrained(trained / "model")("247").input_ids
    with serving(tmp_path, {"m": trained}) as (client, _):
        assert client.complete(prompt, max_tokens=4, ignore_eos=True).text.startswith(TOKEN)
