"""KTO's loss, gradient, metrics and mismatched answers (for the KL term) equal TRL's, on TRL's own batch.

A mismatched answer is one to another prompt, from which KTO estimates the KL divergence.
"""

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import KTOConfig as TrlConfig
from trl import KTOTrainer

from stages.data.batch import IGNORED, Documents
from stages.data.dataset import Description, PackedDataset
from stages.data.prepare import DatasetWriter
from stages.data.tokenizer import TokenizedDocument
from stages.data.units import Unit
from stages.kinds.train.methods.kto import KTO, KtoConfig
from tests.unit.stages.kinds.train.methods.against_trl import (
    ARGUMENTS,
    gradient,
    log_probabilities,
    make_model,
    make_tokenizer,
)

ROWS = {
    "prompt": ["t1 t2 t3 ", "t30 ", "t31 t32 ", "t33 t34 "],
    "completion": ["t4 t5 t6", "t7 t8", "t9", "t10 t11 t12 t13"],
    "label": [True, False, False, True],
}
NAMES_OF_TRL = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "kl": "kl",
}
COMBINATIONS = [
    {},
    {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.25},
    {"loss_type": "apo_zero_unpaired"},
    {"loss_type": "apo_zero_unpaired", "desirable_weight": 2.0},
]


def make_trainer(folder, rows, **fields):
    arguments = TrlConfig(output_dir=str(folder), **ARGUMENTS, **fields)
    dataset, models = Dataset.from_dict(rows), (make_model(0), make_model(1))
    return KTOTrainer(*models, arguments, train_dataset=dataset, processing_class=make_tokenizer())


def in_one_row(folder, documents, labels):
    """Return a dataset with one packed row of KTO documents, each with an answer mask and a good/bad label."""
    folder.mkdir()
    writer = DatasetWriter(folder, is_labelled=True)
    units = [
        Unit((TokenizedDocument(tokens.numpy().astype(np.int32), flags.numpy()),), is_good)
        for (tokens, flags), is_good in zip(documents, labels, strict=True)
    ]
    writer.write_row(units)
    names = ("num_rows", "num_documents", "num_tokens", "num_target_tokens", "num_good")
    writer.finish(
        Description(
            sequence_length=writer.num_tokens + 3,
            packing=True,
            padding_token=0,
            num_source_rows=1,
            num_bad_rows=0,
            num_over_long=0,
            conversations=False,
            warnings=(),
            **{name: getattr(writer, name) for name in names},
        )
    )
    writer.close()
    return PackedDataset(folder)


def unpadded(inputs, prefix=""):
    lengths = inputs[f"{prefix}attention_mask"].sum(1)
    return [
        (inputs[f"{prefix}input_ids"][number][:length], inputs[f"{prefix}completion_mask"][number][:length].bool())
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_kto(tmp_path, fields):
    config = KtoConfig(**fields)
    trainer = make_trainer(tmp_path / "trl", ROWS, **fields)
    inputs = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(trainer.model, inputs)
    expected_gradient = gradient(trainer.model, expected)
    dataset = in_one_row(tmp_path / "rows", unpadded(inputs), inputs["label"].tolist())
    batch, other = dataset.batch([0]), dataset.mismatched([0])
    with torch.no_grad():
        reference = batch.signal.log_probabilities(log_probabilities(trainer.ref_model, batch))
        ratios = [log_probabilities(model, other) for model in (trainer.model, trainer.ref_model)]
    kl = other.signal.log_probabilities(ratios[0] - ratios[1]).mean().clamp(min=0).item()
    batch = batch.with_reference(reference).with_signal(kl=kl if KTO.needs_divergence(config) else None)
    loss = KTO.build_loss(config)
    found, metrics = loss(log_probabilities(trainer.model, batch), batch.signal, loss.counts(batch.signal))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient(trainer.model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    logged = {name: trainer._metrics["train"][theirs][-1] for name, theirs in NAMES_OF_TRL.items()}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(logged, rel=1e-5, abs=1e-6)


def test_answers_to_other_prompts_are_those_of_trl(tmp_path):
    inputs = next(iter(make_trainer(tmp_path / "trl", ROWS).get_train_dataloader()))
    other = in_one_row(tmp_path / "rows", unpadded(inputs), inputs["label"].tolist()).mismatched([0])
    for number, (tokens, learned) in enumerate(unpadded(inputs, "KL_")):
        of_document = other.documents.ids == number
        assert torch.equal(other.inputs.input_ids[of_document], tokens)
        assert torch.equal(other.signal.targets[of_document][:-1], tokens[1:].where(learned[1:], IGNORED))


def test_a_batch_without_bad_answers_has_no_reward_of_them():
    loss = KTO.build_loss(KtoConfig())
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    from stages.data.batch import Batch

    batch = Batch.of(
        zeros,
        zeros,
        zeros,
        Documents(zeros, 1, [4]),
        reference_log_probabilities=torch.zeros(1),
        is_good=torch.tensor([True]),
        kl=0.5,
    )
    found, metrics = loss(torch.zeros(1, 4), batch.signal, loss.counts(batch.signal))
    assert found.item() == pytest.approx(1 - torch.sigmoid(torch.tensor(-0.05)).item())
    assert metrics["reward_chosen"].item() == 0
    assert metrics["reward_rejected"].isnan()


def test_defaults_are_those_of_trl(tmp_path):
    theirs = TrlConfig(output_dir=str(tmp_path), **ARGUMENTS)
    assert KtoConfig().model_dump() == {name: getattr(theirs, name) for name in KtoConfig.model_fields}
