"""Kernels compute on a GPU what a CPU computes: attention over packed documents, log-probabilities in chunks, states
along the sequence (by flash-linear-attention, where it is installed).
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.adapters.quantized import Nf4Linear
from stages.data.batch import IGNORED, target_positions
from stages.engines import log_probabilities
from stages.engines.attention import packed_attention
from stages.engines.documents import PackedDocuments
from stages.engines.fsdp.model import load_model
from stages.engines.fsdp.optimizer import LowPrecisionAdamW
from stages.engines.fsdp.probe import packed
from stages.engines.log_probabilities import OutputHead, token_log_probabilities
from stages.engines.settings import LowPrecisionSettings
from stages.models.device_kernels import keep_models_of_transformers
from stages.parallel.accelerator import forget_peak, peak_bytes
from tests.gpu.device import DEVICE, ON_CPU, needs_device
from tests.zoo.models import tiny_model

pytestmark = needs_device

LENGTHS = [700, 3, 1, 320, 512, 512]
HEADS, KEY_VALUE_HEADS, HEAD_WIDTH = 8, 2, 64
ERRORS = [(torch.bfloat16, 0.01), (torch.float32, 1e-3)]
"""Tolerated relative error by precision: bf16 has 8 bits of mantissa, TF32 (which may replace fp32) has 11."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 100},
    "soft cap": {"sliding_window": 100, "softcap": 2.0},
    "sinks": {"s_aux": torch.linspace(-1, 1, HEADS)},
}


def attend(device: str | torch.device, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Return attention's output and the gradients of queries, keys and values, as fp32 tensors on the CPU."""
    torch.manual_seed(0)
    shapes = [(2, heads, sum(LENGTHS) // 2, HEAD_WIDTH) for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)]
    states = [torch.randn(shape).bfloat16().to(device, dtype).requires_grad_() for shape in shapes]
    blocks = torch.full((sum(LENGTHS),), -1)
    blocks[300:600] = 0
    documents = PackedDocuments(LENGTHS, torch.device(device), blocks=blocks if "softcap" in options else None)
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    output, _ = packed_attention(nn.Identity(), *states, None, documents, **options)
    weights = torch.randn(output.shape).bfloat16().to(device, dtype)
    gradients = torch.autograd.grad((output * weights).sum(), states)
    return [tensor.float().cpu() for tensor in (output, *gradients)]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("dtype", "error"), ERRORS)
def test_packed_attention_equals_the_cpu(dtype: torch.dtype, error: float, kind: str) -> None:
    found_here, expected_there = attend(DEVICE, dtype, **OPTIONS[kind]), attend("cpu", torch.float32, **OPTIONS[kind])
    for found, expected in zip(found_here, expected_there, strict=True):
        assert relative_error(found, expected) < error


def test_documents_of_one_length_give_what_a_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN computes them on Hopper."""
    monkeypatch.setitem(globals(), "LENGTHS", [1024, 1024])
    for found, expected in zip(attend(DEVICE, torch.bfloat16), attend("cpu", torch.float32), strict=True):
        assert relative_error(found, expected) < 0.01


def test_a_step_of_adamw_in_bf16_equals_the_cpus() -> None:
    settings = LowPrecisionSettings("bf16", "bf16", bf16_stochastic_round=True)
    results = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(0)
        start, gradients = torch.randn(5000).bfloat16(), torch.randn(3, 5000).bfloat16()
        weight = nn.Parameter(start.to(device))
        adamw = LowPrecisionAdamW([{"params": [weight]}], {weight: "w"}, settings, 3, lr=1e-2)
        for step, gradient in enumerate(gradients):
            adamw.param_groups[0]["lr"] = 1e-2 / (step + 1)
            weight.grad = gradient.to(device)
            adamw.step()
        results.append([weight.detach(), *(adamw.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))])
    for here, there in zip(*results, strict=True):
        # The same random bits: but for the last bit in fp32, which rarely decides, the same numbers.
        assert (here.cpu() == there).double().mean() > 0.99


def test_weights_in_four_bits_are_decoded_to_the_bits_of_a_cpu() -> None:
    torch.manual_seed(0)
    layer = Nf4Linear(nn.Linear(1024, 300).requires_grad_(False))
    expected = layer.decoded(torch.bfloat16)
    assert torch.equal(layer.to(DEVICE).decoded(torch.bfloat16).cpu(), expected)


@pytest.mark.parametrize(("dtype", "error"), ERRORS)
def test_log_probabilities_equal_the_cpu(dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", 100 * 1000)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 256, 64).bfloat16(), (0.1 * torch.randn(1000, 64)).bfloat16()
    targets = torch.randint(1000, (2, 256)).masked_fill(torch.rand(2, 256) < 0.5, IGNORED)
    results = []
    for device, of_dtype in ((DEVICE, dtype), ("cpu", torch.float32)):
        head = nn.Linear(64, 1000, bias=False, device=device, dtype=of_dtype)
        head.weight.data.copy_(weight)
        states, wanted = hidden.to(device, of_dtype), targets.to(device)
        values = token_log_probabilities(states, OutputHead(head.weight), wanted, target_positions(wanted))
        (gradient,) = torch.autograd.grad(values.sum(), head.weight)
        results.append((values.float().cpu(), gradient.float().cpu()))
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < error


@pytest.mark.skipif(ON_CPU, reason="the host keeps no peak of what tensors take")
def test_long_rows_keep_within_a_chunk_of_logits() -> None:
    num_tokens, vocabulary = 16_384, 131_072  # the logits of all would take 8 GiB in fp32
    head = nn.Linear(64, vocabulary, bias=False, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.randn(1, num_tokens, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    forget_peak(DEVICE)
    wanted = torch.zeros(1, num_tokens, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(num_tokens, device=DEVICE)
    token_log_probabilities(hidden, OutputHead(head.weight), wanted, positions).sum().backward()
    assert peak_bytes(DEVICE) < 4 * 4 * log_probabilities.CHUNK_LOGITS


DOCUMENTS = [70, 3, 1, 129, 64]
MOST_ERROR = 0.01
"""Tolerated relative error: products of such kernels have 11 bits of mantissa."""


def learned(folder: Path, device: torch.device) -> list[Tensor]:
    """Return log-probabilities of packed documents and the gradients of all weights, on the CPU."""
    model = load_model(folder, reads_weights=True, trust_remote_code=False).to(device)
    torch.manual_seed(0)
    batch = packed(torch.randint(1, 49, (sum(DOCUMENTS),)).split(DOCUMENTS)).to(device)
    values = model(batch)[0]
    weights = [one for one in model.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(values.sum(), weights, allow_unused=True)
    return [one.detach().float().cpu() for one in (values, *gradients) if one is not None]


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "lfm2"])
def test_a_model_with_a_state_learns_as_on_a_cpu(tmp_path: Path, family: str) -> None:
    keep_models_of_transformers()
    tiny_model(family).save_pretrained(tmp_path)
    there = learned(tmp_path, torch.device("cpu"))
    try:
        here = learned(tmp_path, DEVICE)
    except RuntimeError as error:
        if "produces incorrect results" not in str(error):
            raise
        pytest.skip(f"flash-linear-attention refuses what is installed here: {error}")
    whole = sum(one.square().sum() for one in there[1:]) ** 0.5
    for number, (found, expected) in enumerate(zip(here, there, strict=True)):
        # Of gradients that are almost 0 next to the others, rounding is all that there is.
        scale = expected.norm() if number == 0 else whole
        assert ((found - expected).norm() / scale).item() < MOST_ERROR
    if family == "qwen3_5_text" and not ON_CPU and importlib.util.find_spec("fla"):
        assert "fla.ops.gated_delta_rule" in sys.modules
        assert tiny_model("mamba2").__module__.startswith("transformers."), "fla has models of that name"
