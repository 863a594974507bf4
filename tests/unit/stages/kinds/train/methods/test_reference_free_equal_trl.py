"""Losses, gradients and metrics of ORPO, CPO and SimPO equal those of TRL's trainers, on TRL's own batch."""

from typing import get_args

import pytest
import torch
from datasets import Dataset
from pydantic import ValidationError
from trl.experimental.cpo import CPOConfig as TrlCpoConfig
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOConfig as TrlOrpoConfig
from trl.experimental.orpo import ORPOTrainer

from stages.kinds.train.methods.cpo import CPO, CpoConfig, CpoLossType
from stages.kinds.train.methods.orpo import ORPO, OrpoConfig
from stages.kinds.train.methods.simpo import SIMPO, SimpoConfig
from tests.unit.stages.kinds.train.methods.against_trl import (
    ARGUMENTS,
    PAIRS,
    check,
    make_model,
    make_tokenizer,
    packed,
)

CPO_COMBINATIONS = [
    {},
    {"cpo_alpha": 0.3, "label_smoothing": 0.1},
    {"loss_type": "hinge"},
    {"loss_type": "ipo", "beta": 0.5},
    {"loss_type": "simpo", "simpo_gamma": 1.5, "beta": 2.0},
    {"loss_type": "simpo", "label_smoothing": 0.2},
    {"loss_type": "alphapo", "alpha": 0.25, "beta": 2.5},
    {"loss_type": "simpo", "alpha": -0.5},
    {"alpha": 0.1},
]


def trained(make_trainer, make_config, folder, **options):
    """Return the model of a TRL trainer, its batch as our packed pairs, its loss, and its logged metrics."""
    arguments = make_config(output_dir=str(folder), **ARGUMENTS, **options)
    dataset = Dataset.from_dict(PAIRS)
    trainer = make_trainer(make_model(0), arguments, train_dataset=dataset, processing_class=make_tokenizer())
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, inputs)
    return (
        trainer.model,
        as_pairs(inputs),
        loss,
        {name: one[-1] for name, one in trainer._stored_metrics["train"].items()},
    )


def as_pairs(inputs):
    documents, learned = [], []
    for number in range(len(inputs["chosen_input_ids"])):
        for side in ("chosen", "rejected"):
            real = inputs[f"{side}_attention_mask"][number].bool()
            documents.append(inputs[f"{side}_input_ids"][number][real])
            learned.append(inputs[f"{side}_labels"][number][real] >= 0)
    return packed(documents, learned)


@pytest.mark.parametrize("fields", [{}, {"beta": 0.7}], ids=str)
def test_orpo(tmp_path, fields):
    config = OrpoConfig(**fields)
    model, batch, loss, logged = trained(ORPOTrainer, TrlOrpoConfig, tmp_path, beta=config.beta)
    check(ORPO, config, batch, model, None, loss, logged)


@pytest.mark.parametrize("fields", CPO_COMBINATIONS, ids=str)
def test_cpo(tmp_path, fields):
    model, batch, loss, logged = trained(CPOTrainer, TrlCpoConfig, tmp_path, **fields)
    if logged["nll_loss"] == 0:  # TRL does not measure what it does not weigh
        logged.pop("nll_loss")
    check(CPO, CpoConfig(**fields), batch, model, None, loss, logged)


@pytest.mark.parametrize("fields", [{}, {"beta": 0.1, "gamma": 0.5}, {"gamma": 0.0}], ids=str)
def test_simpo(tmp_path, fields):
    config = SimpoConfig(**fields)
    options = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": config.beta, "simpo_gamma": config.gamma}
    model, batch, loss, logged = trained(CPOTrainer, TrlCpoConfig, tmp_path, **options)
    check(SIMPO, config, batch, model, None, loss, logged)


def test_defaults_are_those_of_trl(tmp_path):
    theirs = TrlCpoConfig(output_dir=str(tmp_path), **ARGUMENTS)
    assert CpoConfig().model_dump() == {name: getattr(theirs, name) for name in CpoConfig.model_fields}
    assert OrpoConfig().beta == TrlOrpoConfig(output_dir=str(tmp_path), **ARGUMENTS).beta


def test_every_loss_of_cpo_is_compared():
    assert {CpoConfig(**fields).loss_type for fields in CPO_COMBINATIONS} == set(get_args(CpoLossType))


def test_an_answer_that_is_certain_leaves_orpo_finite():
    tokens = torch.tensor([1, 2, 3])
    batch = ORPO.batch_change(OrpoConfig())(packed([tokens, tokens], [torch.tensor([False, True, True])] * 2))
    values = torch.zeros(1, 6, requires_grad=True)
    loss = ORPO.build_loss(OrpoConfig())
    found, _ = loss(values, batch.signal, loss.counts(batch.signal))
    found.backward()
    assert found.isfinite()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "`label_smoothing` does nothing to hinge"),
        ({"simpo_gamma": 1.0}, "`simpo_gamma` does nothing to sigmoid"),
        ({"loss_type": "alphapo", "cpo_alpha": 0.5}, "alphapo has none"),
        ({"alpha": float("inf")}, "finite"),
    ],
)
def test_options_that_would_do_nothing_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        CpoConfig(**fields)
