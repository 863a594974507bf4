"""Preference losses, their gradients and metrics are TRL's, on the batch that TRL's trainer makes of a few pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig as TrlConfig
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer

from stages.data.batch import IGNORED, Batch
from stages.train.methods.dpo import DPO, DpoConfig, LossType
from stages.train.methods.simpo import SimpoConfig, SimpoLoss

VOCABULARY = 64
PAIRS = {
    "prompt": ["t1 t2 t3 ", "t30 ", "t31 t32 ", "t33 t34 "],
    "chosen": ["t4 t5 t6", "t7 t8", "t9", "t10 t11 t12 t13"],
    "rejected": ["t14", "t15 t16 t17", "t18 t19", "t20"],
}
NAMES_OF_TRL = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "preference_accuracy": "rewards/accuracies",
}
"""Name of a metric → TRL's."""
COMBINATIONS = [
    {"loss_type": "sigmoid"},
    {"loss_type": "sigmoid_norm"},
    {"loss_type": "ipo", "beta": 0.5},
    {"loss_type": "hinge"},
    {"loss_type": "robust", "label_smoothing": 0.1},
    {"loss_type": "exo_pair", "label_smoothing": 1e-3},
    {"loss_type": "nca_pair"},
    {"loss_type": "bco_pair"},
    {"loss_type": "sppo_hard"},
    {"loss_type": "apo_zero"},
    {"loss_type": "apo_down"},
    {"loss_type": "discopop"},
    {"loss_type": "discopop", "discopop_tau": 0.5},
    {"loss_type": "aot"},
    {"loss_type": "aot", "label_smoothing": 0.2},
    {"loss_type": "aot_unpaired"},
    {"loss_type": ("sigmoid", "bco_pair"), "loss_weights": (0.8, 0.2)},
    {"loss_type": ("apo_zero", "hinge", "ipo")},
    {"loss_type": "sft"},
    {"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0, 0.3)},
    {"rpo_alpha": 0.5},
    {"ld_alpha": 0.0},
    {"ld_alpha": 0.4, "loss_type": ("sigmoid", "ipo", "apo_zero"), "rpo_alpha": 1.0},
    {"reference": "none"},
    {"reference": "none", "loss_type": ("ipo", "aot"), "ld_alpha": 0.5},
]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A DPO trainer of TRL: one layer, another random model as its reference."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t63")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=16, **sizes)
    arguments = TrlConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_dropout=True,
    )
    made = [Qwen3ForCausalLM(config), Qwen3ForCausalLM(config)]
    return DPOTrainer(*made, arguments, train_dataset=Dataset.from_dict(PAIRS), processing_class=tokenizer)


@pytest.fixture(scope="module")
def inputs(trainer):
    return next(iter(trainer.get_train_dataloader()))


@pytest.fixture(scope="module")
def ours(trainer, inputs):
    """TRL's batch, first all chosen and then all rejected, as one packed row of pairs."""
    order = torch.arange(len(inputs["input_ids"])).view(2, -1).T.flatten()
    documents, targets = [], []
    for number in order:
        real = inputs["attention_mask"][number].bool()
        tokens, learned = inputs["input_ids"][number][real], inputs["completion_mask"][number][real].bool()
        documents.append(tokens)
        targets.append(torch.cat([tokens[1:].where(learned[1:], IGNORED), torch.tensor([IGNORED])]))
    lengths = [len(tokens) for tokens in documents]
    return Batch(
        input_ids=torch.cat(documents)[None],
        targets=torch.cat(targets)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        document_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        num_documents=len(lengths),
        document_lengths=lengths,
    )


def log_probabilities(model, batch):
    """Float32 [1, tokens], of documents that are sent through the model one by one."""
    found = []
    for tokens, targets in zip(
        batch.input_ids[0].split(list(batch.document_lengths)),
        batch.targets[0].split(list(batch.document_lengths)),
        strict=True,
    ):
        chosen = model(tokens[None]).logits[0].log_softmax(-1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
        found.append(chosen * (targets != IGNORED))
    return torch.cat(found)[None]


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_dpo_and_its_relatives(trainer, inputs, ours, fields):
    config = DpoConfig(**fields)
    trainer.loss_types, trainer.loss_weights = list(config.weights), list(config.weights.values())
    trainer.beta, trainer.label_smoothing, trainer.ld_alpha = config.beta, config.label_smoothing, config.ld_alpha
    trainer.args.discopop_tau = config.discopop_tau
    trainer.precompute_ref_logps = config.reference == "none"
    nothing = torch.zeros(len(PAIRS["prompt"]))
    expected = trainer.compute_loss(
        trainer.model, {**inputs, "ref_chosen_logps": nothing, "ref_rejected_logps": nothing}
    )
    check(trainer, DPO, config, ours, expected)
    assert DPO.needs_reference(config) == (config.reference == "start")


def check(trainer, method, config, batch, expected):
    """Loss, gradient and metrics of a method are those that TRL's trainer has just given."""
    expected_gradient = gradient(trainer.model, expected)
    if change := method.batch_change(config):
        batch = change(batch)
    if method.needs_reference(config):
        with torch.no_grad():
            reference = batch.log_probabilities(log_probabilities(trainer.ref_model, batch))
        batch = batch.with_reference(reference)
    loss = method.build_loss(config)
    found, metrics = loss(log_probabilities(trainer.model, batch), batch, loss.counts(batch))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient(trainer.model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    expected_metrics = {name: logged[NAMES_OF_TRL[name]] for name in loss.metric_names}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        expected_metrics, rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("fields", [{}, {"beta": 0.1, "gamma": 0.5}, {"gamma": 0.0}], ids=str)
def test_simpo(trainer, ours, fields):
    config = SimpoConfig(**fields)
    values = log_probabilities(trainer.model, ours)
    means = ours.document_sums(values) / ours.document_sums(ours.has_target.float())
    trl = SimpleNamespace(
        loss_type="simpo",
        beta=config.beta,
        simpo_gamma=config.gamma,
        alpha=0.0,
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    losses, chosen, rejected = CPOTrainer.cpo_loss(trl, means[0::2], means[1::2])
    expected_gradient = gradient(trainer.model, losses.mean())
    loss = SimpoLoss(config)
    mean, found = loss(log_probabilities(trainer.model, ours), ours, loss.counts(ours))
    assert mean.item() == pytest.approx(losses.mean().item(), rel=1e-5)
    assert (gradient(trainer.model, mean) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    assert found["reward_chosen"].item() == pytest.approx(chosen.mean().item())
    assert found["reward_rejected"].item() == pytest.approx(rejected.mean().item())


def test_every_loss_is_compared():
    compared = {name for fields in COMBINATIONS for name in DpoConfig(**fields).loss_types}
    assert compared == set(get_args(LossType))
