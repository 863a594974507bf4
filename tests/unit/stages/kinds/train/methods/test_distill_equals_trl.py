"""Distillation equals TRL's; tokens beyond a teacher's top k count as one more class of the vocabulary."""

import pytest
import torch
from pydantic import ValidationError
from trl.experimental.gkd import GKDConfig, GKDTrainer

from stages.data.batch import Candidates
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.distill import DistillConfig, DistillLoss, DistillSampling
from tests.unit.stages.kinds.train.methods.against_trl import ARGUMENTS, VOCABULARY, gradient, make_model, packed

LENGTHS = [7, 5, 9]
TRAINING = {
    "kind": "train",
    "method": "distill",
    "model": "base",
    "data": {"dataset": "texts"},
    "global_batch_size": 8,
    "learning_rate": 1e-4,
}

SERVER = {"url": "http://host/v1", "served_model": "wise"}


@pytest.fixture(scope="module")
def models():
    """Provide a student model and a teacher model, both with confident predictions."""
    found = [make_model(0), make_model(1)]
    for model in found:
        for parameter in model.parameters():
            parameter.data *= 3
    return found


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(2)
    documents = [torch.randint(0, VOCABULARY, (length,)) for length in LENGTHS]
    return packed(documents, [torch.arange(length) >= 2 for length in LENGTHS])


def logits_of(model, batch):
    """Return a model's logits [1, tokens, vocabulary] of a packed row, with one forward pass a document."""
    documents = batch.inputs.input_ids[0].split(LENGTHS)
    return torch.cat([model(tokens[None]).logits for tokens in documents], 1)


def taught(batch, teacher, config):
    with torch.no_grad():
        values = (logits_of(teacher, batch) / config.temperature).log_softmax(-1)
    values, tokens = values.topk(config.loss_top_k)
    whole = config.loss_top_k == VOCABULARY
    return batch.with_signal(candidates=Candidates(tokens, values, whole), temperature=config.temperature)


def of_model(model, batch):
    """Return the student's log-probabilities of the teacher's top tokens and of the target tokens."""
    values = (logits_of(model, batch) / batch.signal.temperature).log_softmax(-1)
    return values.gather(-1, batch.signal.wanted.clamp(min=0)).where(batch.signal.has_target[..., None], 0.0)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_of_the_whole_vocabulary_it_is_that_of_trl(models, batch, beta, temperature):
    model, teacher = models
    with torch.no_grad():
        teacher_logits = logits_of(teacher, batch)
    num_targets = int(batch.signal.has_target.sum())
    expected = GKDTrainer.generalized_jsd_loss(
        logits_of(model, batch), teacher_logits, batch.signal.targets, beta, temperature, num_items_in_batch=num_targets
    )
    expected_gradient = gradient(model, expected)
    config = DistillConfig(beta=beta, temperature=temperature, loss_top_k=VOCABULARY)
    own = taught(batch, teacher, config)
    loss = DistillLoss(config)
    found, metrics = loss(of_model(model, own), own.signal, loss.counts(own.signal))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient(model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    assert metrics["teacher_rest"].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_of_the_top_k_the_rest_is_one_token_more(models, batch, beta):
    """Distillation from a teacher's top k equals TRL's loss over k + 1 classes: the top k, and the sum of the rest."""
    model, teacher = models
    config = DistillConfig(beta=beta, loss_top_k=6)
    own = taught(batch, teacher, config)

    def with_rest(logits):
        shares = logits.softmax(-1)
        kept = shares.gather(-1, own.signal.candidates.tokens)
        others = torch.ones_like(shares).scatter(-1, own.signal.candidates.tokens, 0.0)
        return torch.cat([kept, (shares * others).sum(-1, keepdim=True)], -1)

    with torch.no_grad():
        of_teacher = with_rest(logits_of(teacher, batch))
    of_student = with_rest(logits_of(model, batch))
    counted = int(batch.signal.has_target.sum())
    expected = GKDTrainer.generalized_jsd_loss(
        of_student.log(), of_teacher.log(), batch.signal.targets, beta, num_items_in_batch=counted
    )
    expected_gradient = gradient(model, expected)
    loss = DistillLoss(config)
    found, metrics = loss(of_model(model, own), own.signal, loss.counts(own.signal))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient(model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    rest = of_teacher[batch.signal.has_target][:, -1]
    assert metrics["teacher_rest"].item() == pytest.approx(rest.mean().item(), rel=1e-5)
    assert 0.01 < rest.mean() < 0.9, "or nothing is compared"
    is_same = (logits_of(model, batch).gather(-1, own.signal.candidates.tokens).argmax(-1) == 0)[
        batch.signal.has_target
    ]
    assert metrics["teacher_agreement"].item() == pytest.approx(is_same.float().mean().item())
    nll = torch.nn.functional.cross_entropy(logits_of(model, batch)[0], batch.signal.targets[0])
    assert metrics["target_nll"].item() == pytest.approx(nll.item(), rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_teacher_that_leaves_no_rest_gives_finite_gradients(batch, beta):
    """Gradients are finite even if a teacher's top k have a probability of 1 in fp32: the rest stays above 0."""
    values = torch.tensor([0.0, -40.0]).expand(*batch.signal.targets.shape, 2)
    own = batch.with_signal(
        candidates=Candidates(torch.zeros(*batch.signal.targets.shape, 2, dtype=torch.int64), values)
    )
    student = torch.tensor([-1.0, 0.0, -50.0]).expand(*batch.signal.targets.shape, 3).clone().requires_grad_()
    loss = DistillLoss(DistillConfig(beta=beta, loss_top_k=2))
    found, _ = loss(student, own.signal, loss.counts(own.signal))
    found.backward()
    assert found.item() == pytest.approx(0, abs=1e-5)
    assert student.grad.isfinite().all()


def test_defaults_are_those_of_trl(tmp_path):
    theirs = GKDConfig(output_dir=str(tmp_path), **ARGUMENTS)
    assert DistillConfig().beta == theirs.beta
    assert DistillConfig().temperature == 1.0, "what GKD's loss has; its own field is of samples"
    assert DistillSampling().temperature == theirs.temperature
    assert DistillSampling().max_completion_length == theirs.max_new_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "`method: distill` learns from a teacher; name the stage of its model"),
        ({"teacher": "large", "method": "sft"}, "`teacher` is large, but `method: sft` has no teacher; remove it"),
        ({"teacher": "large", "distill": {"beta": 1.5}}, "less than or equal to 1"),
        ({"teacher": "large", "distill": {"loss_top_k": 0}}, "greater than 0"),
        ({"teacher": "large", "distill": {"temperature": 0}}, "greater than 0"),
        ({"teacher": "large", "distill": {"lmbda": 1.5}}, "less than or equal to 1"),
        ({"teacher": "large", "distill": {"sampling": {}}}, "`sampling` has no effect while `lmbda` is 0"),
        (
            {"teacher": "large", "distill": {"lmbda": 1}, "engine": "megatron"},
            "`distill.lmbda` needs a second model, the teacher, which only `engine: fsdp` can hold",
        ),
        (
            {"teacher": "large", "distill": {"lmbda": 1}, "data": {"dataset": "texts", "train_on": "all"}},
            "`data.train_on: all` leaves no prompts for the completions of `distill.lmbda`",
        ),
        (
            {"teacher": "large", "distill": {"lmbda": 1, "sampling": {"max_completion_length": 9999}}},
            "distill.sampling.max_completion_length: is 9999, which leaves no room for a prompt",
        ),
    ],
)
def test_what_cannot_be_distilled_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({**TRAINING, **fields})


def test_a_teacher_is_an_input_of_the_stage():
    config = TrainConfig.model_validate({**TRAINING, "teacher": "large"})
    assert config.references() == {"model": "base", "teacher": "large", "data.dataset": "texts"}
    assert "teacher" not in config.identity(), "its version stands in for its name"
