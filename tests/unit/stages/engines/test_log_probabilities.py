"""Log-probabilities computed in chunks equal those from all logits, gradients included, but never hold all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CohereConfig, FalconH1Config, Gemma2Config, GraniteConfig, Qwen3Config

from stages.data.batch import IGNORED
from stages.engines import log_probabilities
from stages.engines.log_probabilities import (
    LogitsTransform,
    greedy_tokens,
    likeliest_tokens,
    logits_transform,
    tempered,
    token_log_probabilities,
)

ROWS, SEQUENCE, WIDTH, VOCABULARY = 2, 24, 16, 50


def softcapped(logits: Tensor) -> Tensor:
    return 0.5 * torch.tanh(logits / 0.5)


@pytest.fixture
def targets() -> Tensor:
    torch.manual_seed(1)
    targets = torch.randint(VOCABULARY, (ROWS, SEQUENCE))
    return targets.masked_fill(torch.rand(ROWS, SEQUENCE) < 0.6, IGNORED)


@pytest.fixture
def hidden() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(ROWS, SEQUENCE, WIDTH, requires_grad=True)


def head(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)


def plain(hidden: Tensor, head: nn.Linear, targets: Tensor, transform: LogitsTransform | None) -> Tensor:
    logits = head(hidden).float()
    logits = transform(logits) if transform else logits
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(targets == IGNORED, 0.0)


def gradients_of(result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    return torch.autograd.grad((result * torch.randn(result.shape)).sum(), inputs)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("transform", [None, softcapped], ids=["plain", "softcapped"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_equal_to_log_softmax_with_gradients(
    hidden: Tensor,
    targets: Tensor,
    chunk_tokens: int,
    transform: LogitsTransform | None,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head(bias=bias)
    found = token_log_probabilities(hidden, module, targets, transform)
    expected = plain(hidden, module, targets, transform)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    inputs = (hidden, *module.parameters())
    for one, other in zip(gradients_of(found, *inputs), gradients_of(expected, *inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_greedy_tokens_are_the_likeliest_where_there_is_a_target(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head(bias=True)
    expected = module(hidden).argmax(-1).masked_fill(targets == IGNORED, IGNORED)
    assert torch.equal(greedy_tokens(hidden, module, targets), expected)
    nothing = torch.full_like(targets, IGNORED)
    assert torch.equal(greedy_tokens(hidden, module, nothing), nothing)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_several_tokens_of_a_position_are_given_with_gradients(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of a position's tokens, perhaps one twice, have the right values and gradients."""
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head()
    others = torch.stack([targets, torch.zeros_like(targets), torch.ones_like(targets)], -1).clamp(min=0)
    wanted = torch.cat([targets.unsqueeze(-1), others], -1)
    transform = tempered(softcapped, temperature)
    found = token_log_probabilities(hidden, module, wanted, transform)
    values = (softcapped(module(hidden)) / temperature).log_softmax(-1).gather(-1, wanted.clamp(min=0))
    expected = values * (targets != IGNORED).unsqueeze(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    inputs = (hidden, module.weight)
    for one, other in zip(gradients_of(found, *inputs), gradients_of(expected, *inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 1000])
@pytest.mark.parametrize("number", [1, 5, VOCABULARY])
def test_the_likeliest_tokens_are_those_of_the_whole_softmax(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head(bias=True)
    values, tokens = softcapped(module(hidden)).log_softmax(-1).topk(number)
    expected = torch.stack([tokens.float(), values], 2) * (targets != IGNORED)[..., None, None]
    torch.testing.assert_close(likeliest_tokens(hidden, module, targets, number, softcapped), expected)


def test_chunks_do_not_add_up_in_half_precision(
    hidden: Tensor, targets: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, exact = head(dtype=torch.bfloat16), head()
    exact.weight.data.copy_(module.weight.data)
    halved = hidden.detach().bfloat16().requires_grad_()
    (whole,) = gradients_of(token_log_probabilities(halved, module, targets), module.weight)
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", VOCABULARY)
    (chunked,) = gradients_of(token_log_probabilities(halved, module, targets), module.weight)
    (expected,) = gradients_of(plain(halved.float(), exact, targets, None), exact.weight)
    assert whole.dtype == chunked.dtype == torch.bfloat16
    error_of_whole, error_of_chunked = ((found.float() - expected).norm() for found in (whole, chunked))
    assert error_of_chunked < 2 * error_of_whole  # sums in bf16 are 3.5 times as far off already here


def test_no_target_gives_zeros_and_zero_gradients(hidden: Tensor) -> None:
    module = head(bias=True)
    result = token_log_probabilities(hidden, module, torch.full((ROWS, SEQUENCE), IGNORED))
    assert not result.any()
    assert not any(gradient.any() for gradient in gradients_of(result, hidden, *module.parameters()))


class LargestTensor(TorchDispatchMode):
    """PyTorch dispatch mode that records the number of elements of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


def test_logits_exist_for_one_chunk_at_a_time(targets: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_logits = 2 * 4000
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_logits)
    module = nn.Linear(1, 4000, bias=False)
    hidden = torch.randn(ROWS, SEQUENCE, 1, requires_grad=True)
    with LargestTensor() as largest:
        token_log_probabilities(hidden, module, targets).sum().backward()
    assert largest.num_elements == chunk_logits


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Gemma2Config(final_logit_softcapping=30.0), 30 * torch.tanh(torch.tensor(40 / 30)).item()),
        (CohereConfig(logit_scale=0.0625), 2.5),
        (GraniteConfig(logits_scaling=8.0), 5.0),
        (FalconH1Config(lm_head_multiplier=0.5), 20.0),
    ],
    ids=["Gemma 2", "Cohere", "Granite", "Falcon-H1"],
)
def test_what_models_do_to_their_logits_is_known(config: Any, expected: float) -> None:
    transform = logits_transform(config)
    assert transform is not None
    assert transform(torch.tensor(40.0)).item() == pytest.approx(expected)


def test_most_models_leave_their_logits_alone() -> None:
    assert logits_transform(Qwen3Config()) is None


def test_a_temperature_divides_what_a_model_makes_of_its_logits(hidden: Tensor, targets: Tensor) -> None:
    for transform in (None, softcapped):
        found = token_log_probabilities(hidden, head(), targets, tempered(transform, 0.7))
        expected = plain(hidden, head(), targets, lambda logits, own=transform: (own(logits) if own else logits) / 0.7)
        assert torch.allclose(found, expected, atol=1e-5)
