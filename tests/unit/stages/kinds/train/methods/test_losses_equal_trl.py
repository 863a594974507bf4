"""DPO's losses, gradients and metrics equal TRL's, on the batch that TRL's trainer makes of a few pairs."""

from typing import get_args

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig as TrlConfig
from trl import DPOTrainer

from stages.kinds.train.methods.dpo import DPO, DpoConfig, LossType
from tests.unit.stages.kinds.train.methods.against_trl import (
    ARGUMENTS,
    PAIRS,
    check,
    log_probabilities,
    make_model,
    make_tokenizer,
    packed,
)

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
    """Provide TRL's DPO trainer with a one-layer model, and another random model as its reference."""
    arguments = TrlConfig(output_dir=str(tmp_path_factory.mktemp("trl")), **ARGUMENTS)
    dataset = Dataset.from_dict(PAIRS)
    models = make_model(0), make_model(1)
    return DPOTrainer(*models, arguments, train_dataset=dataset, processing_class=make_tokenizer())


@pytest.fixture(scope="module")
def inputs(trainer):
    return next(iter(trainer.get_train_dataloader()))


@pytest.fixture(scope="module")
def ours(inputs):
    """Provide TRL's batch (all chosen answers, then all rejected) as our packed row of pairs."""
    order = torch.arange(len(inputs["input_ids"])).view(2, -1).T.flatten()
    lengths = inputs["attention_mask"].sum(1)
    documents = [inputs["input_ids"][number][: lengths[number]] for number in order]
    return packed(documents, [inputs["completion_mask"][number][: lengths[number]].bool() for number in order])


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
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    check(DPO, config, ours, trainer.model, trainer.ref_model, expected, logged)
    assert DPO.needs_reference(config) == (config.reference == "start")


def test_every_loss_is_compared():
    compared = {name for fields in COMBINATIONS for name in DpoConfig(**fields).loss_types}
    assert compared == set(get_args(LossType))


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm"])
def test_label_smoothing_is_that_of_conservative_dpo_where_trl_ignores_it(trainer, inputs, ours, loss_type):
    """Label smoothing is conservative DPO's also where TRL ignores it; once it does not, compare these with TRL."""

    def losses(smoothing):
        trainer.loss_types, trainer.loss_weights = [loss_type], [1.0]
        trainer.beta, trainer.label_smoothing, trainer.ld_alpha = 0.1, smoothing, None
        trainer.precompute_ref_logps = False
        loss = DPO.build_loss(DpoConfig(loss_type=loss_type, label_smoothing=smoothing))
        with torch.no_grad():
            batch = ours.with_reference(ours.signal.log_probabilities(log_probabilities(trainer.ref_model, ours)))
            found, metrics = loss(log_probabilities(trainer.model, batch), batch.signal, loss.counts(batch.signal))
            return trainer.compute_loss(trainer.model, inputs).item(), found.item(), metrics["reward_margin"].item()

    (trl, plain, margin), (trl_smoothed, smoothed, _) = losses(0.0), losses(0.2)
    assert trl_smoothed == trl == pytest.approx(plain, rel=1e-5)
    assert smoothed != pytest.approx(plain, rel=1e-5)
    if loss_type == "sigmoid":  # -log sigmoid(-x) is x - log sigmoid(x), and the mean of x the margin of the rewards
        assert smoothed == pytest.approx(plain + 0.2 * margin, rel=1e-4)
