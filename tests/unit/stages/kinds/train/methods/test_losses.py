"""Preference losses equal their closed forms, however a batch is divided into micro-batches."""

import math
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from stages.data.batch import IGNORED, Batch, Documents
from stages.kinds.train.methods.dpo import DpoConfig, DpoLoss, LossType
from stages.kinds.train.methods.dpo_losses import PAIR_LOSSES
from stages.kinds.train.methods.sft import SftLoss

LOG_PROBABILITIES = torch.tensor(
    [[-1.0, -2.0, 0.0, -0.5, 0.0, -3.0, 0.0, 0.0], [-1.5, 0.0, -0.25, -1.0, -1.0, 0.0, 0, 0]]
)
LENGTHS = [3, 2, 2, 1, 2, 4, 2]
NUM_DOCUMENTS = 5
PADDING_DOCUMENTS = {3: 5, 6: 6}


def make_batch(reference=None):
    """Return a batch of two rows of eight tokens: documents 0, 1, 2 and padding; documents 3, 4 and padding."""
    numbers = [0, 1, 2, 5, 3, 4, 6]
    document_ids = torch.tensor(numbers).repeat_interleave(torch.tensor(LENGTHS))
    targets = torch.where(LOG_PROBABILITIES == 0, IGNORED, 7)
    return Batch.of(
        input_ids=torch.zeros(2, 8, dtype=torch.int64),
        targets=targets,
        position_ids=torch.zeros(2, 8, dtype=torch.int64),
        documents=Documents(document_ids.view(2, 8), NUM_DOCUMENTS, LENGTHS),
        reference_log_probabilities=reference,
    )


def make_pairs(chosen, rejected, reference_chosen, reference_rejected, num_tokens=1):
    """Return log-probabilities and a packed row of a pair with these sums, over `num_tokens` tokens each."""
    values = torch.tensor([[chosen / num_tokens] * num_tokens + [rejected / num_tokens] * num_tokens])
    batch = Batch.of(
        input_ids=torch.zeros(1, 2 * num_tokens, dtype=torch.int64),
        targets=torch.ones(1, 2 * num_tokens, dtype=torch.int64),
        position_ids=torch.zeros(1, 2 * num_tokens, dtype=torch.int64),
        documents=Documents(torch.tensor([[0] * num_tokens + [1] * num_tokens]), 2, [num_tokens, num_tokens]),
        reference_log_probabilities=torch.tensor([reference_chosen, reference_rejected]),
    )
    return values, batch


def of_batch(loss, values, batch):
    """Return loss and metrics of a global batch that consists of one micro-batch."""
    return loss(values, batch.signal, loss.counts(batch.signal))


def test_document_sums_are_the_sums_of_each_real_document():
    assert make_batch().documents.sums(LOG_PROBABILITIES).tolist() == [-3.0, -0.5, -3.0, -1.5, -2.25]


def test_the_sft_loss_is_the_negative_log_likelihood_and_counts_targets():
    assert SftLoss().counts(make_batch().signal) == {"targets": 8}
    loss, metrics = SftLoss()(LOG_PROBABILITIES, make_batch(), {"targets": 8})
    assert loss.item() == pytest.approx(10.25 / 8)
    assert metrics == {}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_first_dpo_loss_is_ln_2_whatever_the_smoothing(smoothing):
    values, batch = make_pairs(-3.0, -5.0, -3.0, -5.0)
    loss, metrics = of_batch(DpoLoss(DpoConfig(label_smoothing=smoothing)), values, batch)
    assert loss.item() == pytest.approx(math.log(2))
    assert metrics["reward_margin"].item() == 0


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


H = (-2.0 - -2.5) - (-6.0 - -5.0)
"""Policy-to-reference log-ratio of the chosen answer minus that of the rejected one, in the test's pair."""

CLOSED_FORMS = [
    ({"loss_type": "sigmoid", "beta": 0.5}, -math.log(sigmoid(0.5 * H))),
    (
        {"loss_type": "sigmoid", "beta": 0.5, "label_smoothing": 0.1},
        -0.9 * math.log(sigmoid(0.5 * H)) - 0.1 * math.log(sigmoid(-0.5 * H)),
    ),
    ({"loss_type": "hinge", "beta": 0.1}, 1 - 0.1 * H),
    ({"loss_type": "hinge", "beta": 10.0}, 0.0),
    ({"loss_type": "ipo", "beta": 0.25}, (H / 4 - 1 / (2 * 0.25)) ** 2),
]


@pytest.mark.parametrize(("config", "expected"), CLOSED_FORMS)
def test_preference_losses_equal_their_closed_forms(config, expected):
    values, batch = make_pairs(-2.0, -6.0, -2.5, -5.0, num_tokens=4)
    loss, metrics = of_batch(DpoLoss(DpoConfig(**config)), values, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert metrics["reward_margin"].item() == pytest.approx(config["beta"] * H)
    assert metrics["reward_chosen"].item() == pytest.approx(config["beta"] * 0.5)
    assert metrics["reward_rejected"].item() == pytest.approx(config["beta"] * -1.0)
    assert metrics["preference_accuracy"].item() == 1


def test_a_micro_batch_without_pairs_adds_nothing_and_still_has_a_gradient():
    values = torch.zeros(1, 4, requires_grad=True)
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    batch = Batch.of(
        zeros, zeros + IGNORED, zeros, Documents(zeros, 0, [4]), reference_log_probabilities=torch.zeros(0)
    )
    loss, _ = DpoLoss(DpoConfig())(values, batch.signal, {"pairs": 2, "chosen tokens": 3})
    loss.backward()
    assert loss.item() == 0
    assert values.grad.abs().sum() == 0
    assert DpoLoss(DpoConfig()).counts(batch.signal) == {"pairs": 0, "chosen tokens": 0}


def test_pairs_of_a_row_are_a_distribution_however_rows_are_put_into_micro_batches():
    """AOT's loss, which sorts a row's pairs, is the same however rows are put into micro-batches (by layouts)."""
    torch.manual_seed(0)
    values = torch.randn(2, 6)
    batch = Batch.of(
        input_ids=torch.zeros(2, 6, dtype=torch.int64),
        targets=torch.ones(2, 6, dtype=torch.int64),
        position_ids=torch.zeros(2, 6, dtype=torch.int64),
        documents=Documents(torch.arange(12).view(2, 6), 12, [1] * 12),
        reference_log_probabilities=torch.randn(12),
    )
    rows = [
        Batch.of(
            batch.inputs.input_ids[row, None],
            batch.signal.targets[row, None],
            batch.inputs.position_ids[row, None],
            documents=Documents(torch.arange(6)[None], 6, [1] * 6),
            reference_log_probabilities=batch.signal.reference_log_probabilities.view(2, 6)[row],
        )
        for row in range(2)
    ]
    for loss_type in ("aot", "aot_unpaired"):
        loss = DpoLoss(DpoConfig(loss_type=loss_type))
        totals = loss.counts(batch.signal)
        together, _ = loss(values, batch.signal, totals)
        apart = sum(loss(values[row, None], rows[row].signal, totals)[0] for row in range(2))
        torch.testing.assert_close(together, apart)
        assert together != DpoLoss(DpoConfig())(values, batch.signal, totals)[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "simpo"}, "loss_type"),
        ({"loss_type": ()}, "expected different losses, at least one"),
        ({"loss_type": ("ipo", "ipo")}, "expected different losses"),
        ({"loss_type": ("ipo", "hinge"), "loss_weights": (1.0,)}, "1 numbers for 2 losses"),
        ({"loss_weights": (0.0,)}, "greater than 0"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "`label_smoothing` does nothing to ipo"),
        ({"loss_type": "exo_pair"}, "`loss_type: exo_pair` needs `label_smoothing` above 0"),
        ({"discopop_tau": 0.1}, "`discopop_tau` does nothing to sigmoid"),
        ({"loss_type": ("ipo", "sft"), "rpo_alpha": 1.0}, "`rpo_alpha` is the weight of `sft`"),
        ({"ld_alpha": 1.5}, "less than or equal to 1"),
        ({"reference": "base"}, "'start' or 'none'"),
    ],
)
def test_options_that_would_do_nothing_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        DpoConfig(**fields)


def test_the_names_of_losses_are_those_there_are():
    assert set(get_args(LossType)) == {*PAIR_LOSSES, "sft"}
