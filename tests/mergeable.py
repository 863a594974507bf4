"""Models and adapters for tests of merging, made with Transformers and PEFT, with predictions for a few documents."""

import json
import shutil
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from stages.hubs.builtin import qwen3

BASE = "base-0123456789ab"
LENGTHS = (9, 5, 12)


def make_base(artifact: Path, dtype=torch.float32, architecture=Qwen3Config, **sizes) -> None:
    """Write a model artifact with random weights and the built-in tokenizer."""
    qwen3.make(builtin := artifact / "builtin")
    vocabulary = json.loads((builtin / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architecture(vocab_size=vocabulary, **sizes)).to(dtype)
    model.save_pretrained(artifact / "model", max_shard_size="8MB")
    for file in builtin.iterdir():
        if not (artifact / "model" / file.name).exists() and file.suffix != ".safetensors":
            shutil.copyfile(file, artifact / "model" / file.name)
    shutil.rmtree(builtin)


def make_adapter(base, seed, modules, **fields):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    lora = {"r": 4, "lora_alpha": 6 + seed, "init_lora_weights": False, **fields}
    return peft.get_peft_model(model, peft.LoraConfig(**lora, target_modules=modules, task_type="CAUSAL_LM")).eval()


def note_base(artifact):
    file = artifact / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": BASE}))


@torch.no_grad()
def write_record(artifact, model):
    documents = []
    for length in LENGTHS:
        tokens = torch.arange(length + 1) * 7 % 40
        logits = model(input_ids=tokens[None, :-1]).logits[0].log_softmax(1)
        given = logits.gather(1, tokens[1:, None]).squeeze(1)[2:].sum().item()
        targets = [-100, -100, *tokens[3:].tolist()]
        documents.append({"input_ids": tokens[:-1].tolist(), "targets": targets, "log_probability": given})
    (artifact / "log_probabilities.json").write_text(json.dumps({"compute_dtype": "float32", "documents": documents}))
