"""Adapters of a tiny model as training leaves them: PEFT's files, and recorded predictions for a few documents."""

import json
from pathlib import Path
from typing import Any

from stages.adapters.files import copy_companions

DOCUMENTS = ([40, 72, 73, 84, 5, 20, 16, 17, 63, 33], [90, 12, 4, 4, 51, 66, 7, 8], [9, 40, 33, 71, 70, 69, 68, 5, 6])
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(base: Path, artifact: Path, *modules: str, rank: int = 8, seed: int = 0, scale: float = 0.1) -> None:
    """Write an artifact of a random LoRA adapter on `modules` (default: all linear layers), with its predictions."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(modules or ALL))
    model = get_peft_model(load(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=scale)
    model.save_pretrained(artifact / "adapter", save_embedding_layers=False)
    copy_companions(base, artifact / "adapter")
    path = artifact / "adapter" / "adapter_config.json"
    described = json.loads(path.read_text()) | {"base_model_name_or_path": base.parent.name}
    path.write_text(json.dumps(described))
    write_record(model, artifact)


def write_record(model: Any, artifact: Path) -> None:
    """Write a model's predictions for a few documents, as training records them: tokens, targets, log-probabilities."""
    documents = []
    for tokens in DOCUMENTS:
        targets = [-100, *tokens[2:]]
        values = log_probabilities(model, tokens)[1:]
        recorded = {"log_probabilities": values, "greedy": likeliest(model, tokens)[1:]}
        documents.append({"input_ids": tokens[:-1], "targets": targets, "log_probability": sum(values), **recorded})
    artifact.mkdir(exist_ok=True)
    (artifact / "log_probabilities.json").write_text(json.dumps({"documents": documents}))


def load(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype="float32").eval()


def adapted(base: Path, artifact: Path) -> Any:
    """Return the base model with the adapter, loaded by PEFT."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base), artifact / "adapter").eval()


def log_probabilities(model: Any, token_ids: list[int]) -> list[float]:
    """Return the model's log-probability of every token but the first, computed with Transformers."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, :-1]
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])
    return [float(value) for value in picked[:, 0]]


def likeliest(model: Any, token_ids: list[int]) -> list[int]:
    """Return the model's most probable token at each position but the first, computed with Transformers."""
    import torch

    with torch.no_grad():
        found: list[int] = model(input_ids=torch.tensor([token_ids])).logits[0, :-1].argmax(-1).tolist()
    return found


def greedy(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation of `num_tokens` tokens by Transformers, past end-of-text tokens."""
    import torch

    made = model.generate(
        input_ids=torch.tensor([token_ids]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
    )
    answer: list[int] = made[0, len(token_ids) :].tolist()
    return answer
