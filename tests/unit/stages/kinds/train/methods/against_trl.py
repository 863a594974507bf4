"""Helpers that compare training methods with TRL's trainers on the same model and batch."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stages.data.batch import IGNORED, Batch, Documents

VOCABULARY = 64
PAIRS = {
    "prompt": ["t1 t2 t3 ", "t30 ", "t31 t32 ", "t33 t34 "],
    "chosen": ["t4 t5 t6", "t7 t8", "t9", "t10 t11 t12 t13"],
    "rejected": ["t14", "t15 t16 t17", "t18 t19", "t20"],
}
ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_dropout": True,
}
NAMES_OF_TRL = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "preference_accuracy": "rewards/accuracies",
}
"""Name of each metric in TRL, where TRL names it differently from us."""


def make_tokenizer():
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t63")


def make_model(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=16, **sizes))


def packed(documents, learned):
    """Return documents, given as token ids with a mask of targets, as one packed row."""
    targets = [
        torch.cat([tokens[1:].where(flags[1:], IGNORED), torch.tensor([IGNORED])])
        for tokens, flags in zip(documents, learned, strict=True)
    ]
    lengths = [len(tokens) for tokens in documents]
    return Batch.of(
        input_ids=torch.cat(documents)[None],
        targets=torch.cat(targets)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        documents=Documents(
            torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None], len(lengths), lengths
        ),
    )


def log_probabilities(model, batch):
    """Return the target tokens' log-probabilities, float32 [1, tokens], each document in a pass of its own."""
    found = []
    for tokens, targets in zip(
        batch.inputs.input_ids[0].split(list(batch.documents.lengths)),
        batch.signal.targets[0].split(list(batch.documents.lengths)),
        strict=True,
    ):
        chosen = model(tokens[None]).logits[0].log_softmax(-1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
        found.append(chosen * (targets != IGNORED))
    return torch.cat(found)[None]


def check(method, config, batch, model, reference_model, expected, logged):
    """Assert that loss, gradient and metrics of a training method equal those of TRL's trainer."""
    expected_gradient = gradient(model, expected)
    if change := method.batch_change(config):
        batch = change(batch)
    if method.needs_reference(config):
        with torch.no_grad():
            reference = batch.signal.log_probabilities(log_probabilities(reference_model, batch))
        batch = batch.with_reference(reference)
    loss = method.build_loss(config)
    found, metrics = loss(log_probabilities(model, batch), batch.signal, loss.counts(batch.signal))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient(model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    assert tuple(metrics) == loss.metric_names
    ours = {NAMES_OF_TRL.get(name, name): value.item() for name, value in metrics.items()}
    assert ours.keys() - logged.keys() <= {"nll_loss"}, "TRL measures all of it, but what it does not weigh"
    shared = ours.keys() & logged.keys()
    assert {name: ours[name] for name in shared} == pytest.approx(
        {name: logged[name] for name in shared}, rel=1e-5, abs=1e-6
    )


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
