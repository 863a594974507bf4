"""DPO of an adapter under FSDP2 equals TRL's with PEFT in fp32. The reference is the base model without the adapter."""

import json
import math

import peft
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer

from tests.parity.test_fsdp import models
from tests.unit.stages.kinds.train.methods.against_trl import ARGUMENTS, PAIRS, make_tokenizer

__all__ = ["models"]

NUM_STEPS, SEED, BETA = 5, 3, 0.5
LEARNING_RATE, MAX_GRAD_NORM, EPSILON = 1e-2, 0.5, 1e-3
LAYOUTS = {
    1: {"plain": {"micro_batch_size": 4}, "recomputed": {"micro_batch_size": 4, "recompute": "full"}},
    2: {"sharded": {"dp_shard": 2, "micro_batch_size": 2}, "replicated": {"dp_replicate": 2, "micro_batch_size": 2}},
}


class RecordingTrainer(DPOTrainer):
    """TRL's DPO trainer, extended to record each step's exact loss, since the logged one is rounded."""

    def compute_loss(self, *arguments, **options):
        loss = super().compute_loss(*arguments, **options)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


class FirstGradients(TrainerCallback):
    """Trainer callback that records the first step's clipped gradients by parameter name."""

    def __init__(self):
        self.gradients = {}

    def on_pre_optimizer_step(self, *_, model, **__):
        named = [(name.removeprefix("base_model.model."), one.grad) for name, one in model.named_parameters()]
        self.gradients = self.gradients or {name: one.clone() for name, one in named if one is not None}


@pytest.fixture(scope="module")
def trl(models, tmp_path_factory):
    """Provide results of TRL's DPO: losses, first gradients, final adapter weights, and the pairs as token ids."""
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32, attn_implementation="eager")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        beta=BETA,
        max_steps=NUM_STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        adam_epsilon=EPSILON,
        max_grad_norm=MAX_GRAD_NORM,
        save_strategy="no",
        disable_tqdm=True,
        **ARGUMENTS,
    )
    first, data = FirstGradients(), Dataset.from_dict(PAIRS)
    trainer = RecordingTrainer(
        model,
        None,
        arguments,
        train_dataset=data,
        processing_class=make_tokenizer(),
        peft_config=config,
        callbacks=[first],
    )
    assert trainer.ref_model is None
    torch.manual_seed(SEED)
    drawn = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32), config)
    peft.set_peft_model_state_dict(trainer.model, peft.get_peft_model_state_dict(drawn))
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    return trainer.losses, first.gradients, peft.get_peft_model_state_dict(trainer.model), documents(inputs)


def documents(inputs):
    """Return TRL's pairs, chosen answers before rejected ones in its batch, each as token ids and target mask."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    names = ("input_ids", "completion_mask")
    found = [tuple(inputs[name][row][:length].tolist() for name in names) for row, length in enumerate(lengths)]
    return list(zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True))


@pytest.mark.parametrize("processes", LAYOUTS)
def test_losses_gradients_and_weights_are_those_of_trl(processes, trl, models, fsdp_ranks, tmp_path):
    losses, gradients, weights, pairs = trl
    cases = {name: config_of(layout) for name, layout in LAYOUTS[processes].items()}
    spec = {"model": str(models / "qwen3"), "output": str(tmp_path), "num_steps": NUM_STEPS, "pairs": pairs}
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "cases": cases}))
    program = "tests.parity.adapter_dpo_program"
    fsdp_ranks.run(program, processes, tmp_path / "spec.json", log=tmp_path / "log.txt")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0] - 0.1
    for name in cases:
        assert json.loads((tmp_path / f"{name}.json").read_text()) == pytest.approx(losses, rel=0, abs=1e-6), name
        found = load_file(tmp_path / f"{name}.gradients.safetensors")
        assert found.keys() == gradients.keys()
        assert max((found[key] - gradients[key]).abs().max().item() for key in found) < 1e-6, name
        written = load_file(tmp_path / name / "adapter_model.safetensors")
        assert written.keys() == weights.keys()
        assert max((written[key] - weights[key]).abs().max().item() for key in written) < 1e-6, name


def config_of(layout):
    return {
        "kind": "train",
        "method": "dpo",
        "dpo": {"beta": BETA},
        "model": "base",
        "adapter": {"rank": 4, "alpha": 8},
        "data": {"dataset": "pairs"},
        "layout": layout,
        "global_batch_size": len(PAIRS["prompt"]),
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": EPSILON,
        "max_grad_norm": MAX_GRAD_NORM,
        "precision": "fp32",
        "seed": SEED,
    }
