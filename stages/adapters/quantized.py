"""Frozen base model in 4 or 8 bits, on which a LoRA adapter is trained (QLoRA, Dettmers et al. 2023).

Codes and scales are frozen parameters of bytes whose rows stand alone, so that FSDP2 shards them by rows, without casts
as of floats. The weight itself is made for the moment of its use, once in the forward and once in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from stages.adapters.config import BasePrecision
from stages.adapters.files import INNER
from stages.core.errors import ModelError
from stages.models.linear_layers import NF4_BLOCK, unquantizable
from stages.parallel.accelerator import fused

# fmt: off
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
"""Values of the 16 codes of NF4: quantiles of the normal distribution (Dettmers et al. 2023, appendix E)."""
SMALLEST = 1e-12
"""Smallest quantization scale, which rows of zeros get."""
CHUNK_WEIGHTS = 2**22
"""Number of weights decoded at a time: what is computed on the way is 40 MB, which the cache of a large GPU holds."""


class QuantizedLinear(nn.Module):
    """Frozen linear layer whose weight W [out, in] is kept quantized, as bytes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.bias = base.bias

    @property
    def weight(self) -> Tensor:
        """Weight [out, in] in fp32, for which PEFT asks."""
        return self.decoded(torch.float32)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in fp32 and rounded once to a dtype."""
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.codes.device)
        decode, num_rows = self._decoder(), max(1, CHUNK_WEIGHTS // self.in_features)
        for first in range(0, self.out_features, num_rows):
            rows = slice(first, first + num_rows)
            decode(rows, weight[rows])
        return weight

    def _decoder(self) -> Callable[[slice, Tensor], None]:
        """Return a function that writes some rows of the weight into a tensor [rows, in]."""
        raise NotImplementedError

    def quantized(self, rows: Tensor) -> dict[str, Tensor]:
        """Quantize some rows [rows, in] of this layer's weight; return codes, scales and the like by name."""
        # `meta`: no memory for a weight that is replaced in the next line
        base = nn.Linear(self.in_features, len(rows), bias=False, device="meta")
        base.weight = nn.Parameter(rows, requires_grad=False)
        return {name: one.data for name, one in type(self)(base).named_parameters()}

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = _FrozenProduct.apply(states, self)
        return result if self.bias is None else result + self.bias.to(result.dtype)


class Int8Linear(QuantizedLinear):
    """Frozen linear layer in int8, with one scale per row: 255 even steps between minus and plus the largest weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        weight = base.weight.detach().float()
        scales = weight.abs().amax(1, keepdim=True).clamp(min=SMALLEST)
        # -127 to 127: -128 is not used, so that the steps are the same on both sides of 0
        codes = (weight / scales * 127).round().to(torch.int8)
        self.codes, self.scales = _frozen(codes.view(torch.uint8)), _frozen(scales.view(torch.uint8))

    def _decoder(self) -> Callable[[slice, Tensor], None]:
        codes, scales = self.codes.view(torch.int8), self.scales.view(torch.float32) / 127
        return lambda rows, out: torch.mul(codes[rows], scales[rows], out=out)


class Nf4Linear(QuantizedLinear):
    """Frozen linear layer in NF4, with one quantized scale for every 64 weights of a row (double quantization).

    Scales are kept in 8 bits, relative to the row's largest, as square roots, so that small ones beside an outlier keep
    their digits.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        # [out, in / 64, 64]
        blocks = base.weight.detach().float().view(self.out_features, -1, NF4_BLOCK)
        largest = blocks.abs().amax(-1)
        row = largest.amax(1, keepdim=True).clamp(min=SMALLEST)
        # Rounded up, so that no weight is beyond its scale.
        block_scales = ((largest / row).sqrt() * 255).ceil().clamp(1, 255).to(torch.uint8)
        # [15]: half-way between neighbours, so that `bucketize` gives the number of the nearest level
        levels = torch.tensor(NF4_LEVELS, device=blocks.device)
        borders = (levels[1:] + levels[:-1]) / 2
        relative = blocks / ((block_scales.float() / 255).square() * row)[..., None]
        # [out, in / 2, 2]: two neighbouring codes of 4 bits go into a byte.
        codes = torch.bucketize(relative, borders).to(torch.uint8).view(self.out_features, -1, 2)
        self.codes = _frozen(codes[..., 0] | codes[..., 1] << 4)
        self.block_scales, self.row_scales = _frozen(block_scales), _frozen(row.view(torch.uint8))

    def decoded(self, dtype: torch.dtype) -> Tensor:
        in_graph = torch.compiler.is_compiling()  # whose kernels it becomes a part of
        decode = _nf4_weights if in_graph else fused(_nf4_weights, self.codes.device)
        if decode is _nf4_weights and not in_graph:  # its intermediate results would take memory
            return super().decoded(dtype)
        weight: Tensor = decode(self.codes, self._scales(), torch.tensor(NF4_LEVELS, device=self.codes.device), dtype)
        return weight

    def _scales(self) -> Tensor:
        """Return the scale of each block, fp32 [out, in / 64]."""
        return (self.block_scales.float() / 255).square() * self.row_scales.view(torch.float32)

    def _decoder(self) -> Callable[[slice, Tensor], None]:
        levels = torch.tensor(NF4_LEVELS, device=self.codes.device)
        pairs = torch.cartesian_prod(levels, levels).flip(1)  # of each byte, the levels of its lower and higher code
        scales = self._scales()

        def decode(rows: slice, out: Tensor) -> None:
            # A byte at a time: three times as fast as one code at a time, in less than half of the memory.
            blocks = embedding(self.codes[rows].int(), pairs).view(-1, scales.shape[1], NF4_BLOCK)
            torch.mul(blocks, scales[rows, :, None], out=out.view(blocks.shape))

        return decode


def _nf4_weights(codes: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights [out, in] of NF4 codes [out, in / 2] and scales of blocks [out, in / 64], both on one device.

    To be compiled, into one kernel that reads bytes and writes weights: operations of their own took a sixth of a step
    on an H100.
    """
    shifts = torch.arange(0, 8, 4, device=codes.device)
    # [out, in / 64, 64]
    blocks = levels[(codes[..., None] >> shifts & 15).int()].view(*scales.shape, NF4_BLOCK)
    return (blocks * scales[..., None]).to(dtype).flatten(1)


class _FrozenProduct(torch.autograd.Function):
    """Matrix product with a frozen quantized weight, which is decoded again in the backward pass to save memory."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return linear(states, layer.decoded(states.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        # for the input alone: a frozen weight needs no gradient, so neither input nor weight is kept for it
        return gradient @ ctx.layer.decoded(gradient.dtype), None


def quantize_base(causal_lm: Any, precision: BasePrecision) -> None:
    """Quantize every frozen linear layer between embedding and head, in place. Raises ModelError."""
    made = {"nf4": Nf4Linear, "int8": Int8Linear}[precision]
    for name, layer in quantizable_layers(causal_lm, precision).items():
        causal_lm.set_submodule(name, made(layer))


def quantizable_layers(causal_lm: Any, precision: BasePrecision) -> dict[str, nn.Linear]:
    """Return the linear layers to quantize by name; raise ModelError if matrices would stay unquantized."""
    decoder = {id(module) for module in causal_lm.get_decoder().modules()}
    layers = {
        name: module
        for name, module in causal_lm.named_modules()
        # no subclasses: their forward may be another, as that of Llama 4's router
        if type(module) is nn.Linear and id(module) in decoder and not module.weight.requires_grad
    }
    named = causal_lm.named_parameters()
    stacked = [name.replace(INNER, "") for name, one in named if one.ndim > 2 and ".lora_" not in name]
    inputs = {name.replace(INNER, ""): layer.in_features for name, layer in layers.items()}
    if error := unquantizable(precision, inputs, stacked, type(causal_lm).__name__):
        raise ModelError(error)
    return layers


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous(), requires_grad=False)
