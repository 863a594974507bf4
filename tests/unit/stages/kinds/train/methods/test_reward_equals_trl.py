"""Loss, gradient and metrics of reward models equal those of TRL's trainer, on TRL's own batch of a few pairs."""

import pytest
import torch
from datasets import Dataset
from pydantic import ValidationError
from transformers import Qwen3Config, Qwen3ForSequenceClassification
from trl import RewardConfig as TrlConfig
from trl import RewardTrainer

from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.reward import REWARD, RewardConfig
from tests.unit.stages.kinds.train.methods.against_trl import (
    ARGUMENTS,
    PAIRS,
    VOCABULARY,
    gradient,
    make_tokenizer,
    packed,
)


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=16, num_labels=1, **sizes)
    return Qwen3ForSequenceClassification(config)


def scores_of(model, batch):
    """Return documents' scores at their last tokens, float32 [1, tokens], each in a pass of its own."""
    found = []
    for tokens in batch.inputs.input_ids[0].split(list(batch.documents.lengths)):
        score = model(tokens[None]).logits[0]
        found.append(torch.cat([score.new_zeros(len(tokens) - 1), score]))
    return torch.cat(found)[None]


MARGINS = [0.5, 0.0, 2.0, -1.0]


@pytest.mark.parametrize("margins", [None, MARGINS], ids=["", "margins"])
@pytest.mark.parametrize("fields", [{}, {"center_rewards_coefficient": 0.01}, {"center_rewards_coefficient": 2.0}])
def test_reward(tmp_path, fields, margins):
    arguments = TrlConfig(output_dir=str(tmp_path), **ARGUMENTS, **fields)
    dataset = Dataset.from_dict({**PAIRS, "margin": margins} if margins else PAIRS)
    trainer = RewardTrainer(make_model(), arguments, train_dataset=dataset, processing_class=make_tokenizer())
    inputs = next(iter(trainer.get_train_dataloader()))
    lengths = inputs["attention_mask"].sum(1)
    order = torch.arange(len(lengths)).view(2, -1).T.flatten()
    documents = [inputs["input_ids"][number][: lengths[number]] for number in order]
    batch = packed(documents, [torch.ones(len(tokens), dtype=torch.bool) for tokens in documents])
    if margins:
        batch = batch.with_signal(margins=inputs["margin"])
        assert sorted(inputs["margin"].tolist()) == sorted(MARGINS)
    expected = trainer.compute_loss(trainer.model, inputs)
    expected_gradient = gradient(trainer.model, expected)
    loss = REWARD.build_loss(RewardConfig(**fields))
    found, metrics = loss(scores_of(trainer.model, batch), batch.signal, loss.counts(batch.signal))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient(trainer.model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["preference_accuracy"].item() == pytest.approx(logged["accuracy"])
    assert metrics["reward_margin"].item() == pytest.approx(logged["margin"], rel=1e-5, abs=1e-6)
    mean = (metrics["reward_chosen"] + metrics["reward_rejected"]).item() / 2
    assert mean == pytest.approx(logged["mean_reward"], rel=1e-5, abs=1e-6)


TRAINING = {
    "kind": "train",
    "method": "reward",
    "model": "base",
    "data": {"dataset": "pairs"},
    "global_batch_size": 8,
    "learning_rate": 1e-4,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "megatron"}, "`method: reward` needs `engine: fsdp`"),
        ({"adapter": {}}, "`method: reward` .* `adapter`, since it trains whole models only; change either"),
        ({"reward": {"center_rewards_coefficient": 0}}, "greater than 0"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(fields, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({**TRAINING, **fields})


def test_what_it_makes_is_no_model_that_answers():
    assert TrainConfig.model_validate(TRAINING).product == "reward_model"
