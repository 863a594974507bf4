"""Time of one rank's kernels for one layer, and for the head, in one micro-batch: an achievable-rate model. Pure.

A matrix product runs at the peak times a constant, less where its output has few tiles for the processors, where the
summed dimension is short, and where a dimension is no multiple of what tensor cores load at once (NVIDIA, "Matrix
multiplication background user's guide"); or at the rate of memory, if that is slower (the roofline of Williams et al.
2009). Fused attention does its causal half of the scores at a rate of its own (Dao 2023). Everything else streams.
Where kernels are short, the host that launches them sets the pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from stages.models.shape import ModelShape
from stages.planner.hardware import Hardware
from stages.planner.workload import PlannedPrecision, Software

TILE = 128
"""Rows and columns of the output that one processor computes at a time."""
ALIGNED = ((64, 1.0), (32, 0.97), (16, 0.92), (8, 0.75), (4, 0.2), (2, 0.15), (1, 0.12))
"""Largest power of two in an inner dimension → share of the rate; under 16 bytes tensor cores cannot load it."""
BACKWARD_ATTENTION = 2.5
"""Products of the fused backward pass over those of the forward pass: five for two (Dao 2023, section 3.1)."""
KERNELS = {"fused": 30, "eager": 45, "experts": 40}
"""Launches of one layer's forward pass, and what a mixture of experts adds."""
LAUNCHES_OF_A_COLLECTIVE = 3
"""What calling one costs the host: the kernel, and events by which streams wait for each other."""
CASTS = {"fp8": 2.5, "fp4": 4.5}
"""Memory traffic of making a product's input one of few bits, over reading it once in 16: it is read, and written twice
in 8 bits; in 4 bits it is read for its scales and for its values, as it is and rotated (NVIDIA 2025, 2509.25149)."""
EAGER_PASSES = {"layer norm": 2, "rms norm": 3}
"""Memory traffic of elementwise operations that are not fused, over that of fused ones: RMSNorm and rotations are
written as chains of operations in fp32, LayerNorm is one kernel."""


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward and of a backward pass (without recomputation)."""

    forward_s: float
    backward_s: float

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def times(self, factor: float) -> Pass:
        """Both, `factor` times."""
        return Pass(self.forward_s * factor, self.backward_s * factor)


@dataclass(frozen=True)
class LayerWork:
    """What one rank computes of a layer, for one micro-batch."""

    shape: ModelShape
    rows: int
    sequence_length: int
    precision: PlannedPrecision
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    is_frozen: bool = False
    """Gradients are of activations and of an adapter only."""

    @property
    def tokens(self) -> float:
        """Tokens of one rank."""
        return self.rows * self.sequence_length / self.cp

    @property
    def size(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer on one rank."""

    attention_core: Pass
    products: Pass
    elementwise: Pass
    host_s: float
    """Launching one forward pass."""
    host_is_device: bool = False

    @cached_property
    def both(self) -> Pass:
        """All of the layer. The host launches ahead of the device, but not without waiting: the slower of both costs
        most, and the other some of its time (a root of squares). Where both are one processor, they add up."""
        busy = self.attention_core + self.products + self.elementwise
        if self.host_is_device:
            return busy + Pass(self.host_s, 2 * self.host_s)
        return Pass(math.hypot(busy.forward_s, self.host_s), math.hypot(busy.backward_s, 2 * self.host_s))


@lru_cache(maxsize=65536)
def layer_time(work: LayerWork, software: Software, hardware: Hardware) -> LayerTime:
    """Average over the model's layers (dense and mixtures)."""
    shape = work.shape
    mixture = shape.num_mixture_layers / shape.num_layers
    experts = work
    if work.precision in CASTS and software.casts_at_products:
        experts = replace(work, precision="bf16")
        if not software.fused_elementwise:  # a compiler leaves out gradients of frozen weights, torchao alone does not
            work = replace(work, is_frozen=False)
    products = _attention_products(work, hardware)
    if mixture < 1:
        products += _dense_ffn(work, hardware).times(1 - mixture)
    if mixture:
        products += _experts(experts, hardware).times(mixture)
    core = (
        _flash(work, software, hardware) if software.flash_attention else _unfused_attention(work, software, hardware)
    )
    kernels = KERNELS["fused" if software.fused_elementwise else "eager"] + mixture * KERNELS["experts"]
    launches = 0 if software.cuda_graphs else kernels + _collective_launches(work)
    host_s = launches * hardware.efficiency.launch_s
    return LayerTime(core, products, _elementwise(work, software, hardware), host_s, hardware.host_is_device)


def _collective_launches(work: LayerWork) -> int:
    """Of tensor parallelism's two all-reduces, which sequence parallelism splits in two each."""
    if work.tp == 1:
        return 0
    return LAUNCHES_OF_A_COLLECTIVE * (4 if work.sequence_parallel else 2)


@lru_cache(maxsize=16384)
def head_time(work: LayerWork, hardware: Hardware) -> Pass:
    """The product with the vocabulary (filled up to whole tiles), and the cross-entropy of its logits in fp32."""
    columns = TILE * math.ceil(work.shape.vocab_size / work.tp / TILE)
    precision: PlannedPrecision = "fp32" if work.precision == "fp32" else "bf16"
    product = _product(hardware, precision, work.tokens, work.shape.hidden_size, columns, work.is_frozen)
    streaming_s = work.tokens * columns * (work.size + 8) / memory_rate(hardware)
    return product + Pass(streaming_s, streaming_s)


def memory_rate(hardware: Hardware) -> float:
    """Bytes/s of kernels that stream."""
    return hardware.memory_gb_per_s * 1e9 * hardware.efficiency.memory


def matmul_s(hardware: Hardware, precision: PlannedPrecision, rows: float, depth: float, columns: float) -> float:
    """Seconds of [rows, depth] × [depth, columns]."""
    if not rows or not columns:
        return 0.0
    efficiency = hardware.efficiency
    tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
    waves = tiles / hardware.num_processors
    share = waves / (waves + efficiency.matmul_half_waves) * depth / (depth + efficiency.matmul_half_depth)
    rate = (
        hardware.sustained_flops_per_s(precision) * efficiency.matmul * share * min(_aligned(depth), _aligned(columns))
    )
    element_bytes = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}[precision]
    moved = element_bytes * (rows * depth + depth * columns) + max(2, element_bytes) * rows * columns
    return max(2 * rows * depth * columns / rate, moved / memory_rate(hardware))


def _aligned(dimension: float) -> float:
    size = int(dimension)
    return next(share for power, share in ALIGNED if size % power == 0)


def _product(
    hardware: Hardware, precision: PlannedPrecision, rows: float, depth: float, columns: float, frozen: bool = False
) -> Pass:
    """A product and its gradients: of the input, and unless its weights are `frozen` of these."""
    forward_s = matmul_s(hardware, precision, rows, depth, columns)
    return Pass(forward_s, (1 if frozen else 2) * forward_s)


def _attention_products(work: LayerWork, hardware: Hardware) -> Pass:
    shape = work.shape
    queries, keys_and_values = shape.query_width + shape.rotary_width, 2 * shape.kv_width
    matrices: list[tuple[float, float]] = [(shape.query_width / work.tp, shape.hidden_size)]
    if shape.latent:
        matrices.append((shape.hidden_size, shape.latent_width))
        matrices.append((shape.latent.query_rank, queries / work.tp))
        matrices.append((shape.latent.kv_rank, keys_and_values / work.tp))
    else:
        matrices.append((shape.hidden_size, (queries + keys_and_values) / work.tp))
    products = [_product(hardware, work.precision, work.tokens, *matrix, work.is_frozen) for matrix in matrices]
    return sum(products, start=Pass(0.0, 0.0))


def _dense_ffn(work: LayerWork, hardware: Hardware) -> Pass:
    shape, frozen = work.shape, work.is_frozen
    width = shape.ffn_size / work.tp
    into = (2 if shape.gated_ffn else 1) * width
    inward = _product(hardware, work.precision, work.tokens, shape.hidden_size, into, frozen)
    return inward + _product(hardware, work.precision, work.tokens, width, shape.hidden_size, frozen)


def _experts(work: LayerWork, hardware: Hardware) -> Pass:
    """A rank's experts as one grouped product, every expert's rows filled up to whole tiles; tokens moved there."""
    shape = work.shape
    held = shape.num_experts / work.ep
    tokens = work.tokens * shape.experts_per_token * work.etp / work.tp
    rows = held * TILE * math.ceil(tokens / held / TILE)
    width = shape.expert_ffn_size / work.etp
    into = (2 if shape.gated_ffn else 1) * width
    inward = _product(hardware, work.precision, rows, shape.hidden_size, into, work.is_frozen)
    products = inward + _product(hardware, work.precision, rows, width, shape.hidden_size, work.is_frozen)
    moved = 4 * tokens * shape.hidden_size * work.size / memory_rate(hardware)
    return products.times(1 / hardware.efficiency.grouped) + Pass(moved, moved)


def _flash(work: LayerWork, software: Software, hardware: Hardware) -> Pass:
    shape = work.shape
    attended = min(shape.sliding_window or work.sequence_length, work.sequence_length)
    pairs = attended / 2 if attended == work.sequence_length else attended
    flops = 2 * work.tokens * pairs * (2 * shape.query_width + shape.rotary_width) / work.tp
    precision: PlannedPrecision = "fp32" if work.precision == "fp32" else "bf16"
    share = (
        hardware.efficiency.first_flash_attention if software.first_flash_attention else hardware.efficiency.attention
    )
    share *= hardware.efficiency.attention_in_eight_bits if software.fp8_attention else 1.0
    rate = hardware.sustained_flops_per_s(precision) * share
    forward_s = flops / rate
    return Pass(forward_s, BACKWARD_ATTENTION * forward_s)


def _unfused_attention(work: LayerWork, software: Software, hardware: Hardware) -> Pass:
    """Two batched products over all scores, which are written and read by softmax and dropout in between."""
    shape = work.shape
    scores = work.tokens * work.sequence_length * shape.num_heads / work.tp
    rate = hardware.sustained_flops_per_s("fp32" if work.precision == "fp32" else "bf16") * hardware.efficiency.matmul
    depth = shape.head_dim / (shape.head_dim + hardware.efficiency.matmul_half_depth)
    products_s = 4 * scores * shape.head_dim / (rate * depth * _aligned(shape.head_dim))
    moved = scores * (13 if software.dropout else 8) * work.size / 2
    forward_s = max(products_s, 0.0) + moved / memory_rate(hardware)
    return Pass(forward_s, 2 * forward_s)


def _elementwise(work: LayerWork, software: Software, hardware: Hardware) -> Pass:
    """Norms and residuals read and write the hidden state ten times, activations and rotations their inputs."""
    shape = work.shape
    whole = (10 * shape.hidden_size + 2 * shape.latent_width) / (work.tp if work.sequence_parallel else 1)
    mixture = shape.num_mixture_layers / shape.num_layers
    width = (1 - mixture) * shape.ffn_size + mixture * shape.experts_per_token * shape.expert_ffn_size
    attention = 2 * (shape.query_width + shape.kv_width + 2 * shape.rotary_width)
    split = ((3 if shape.gated_ffn else 2) * width + attention) / work.tp
    passes = 1 if software.fused_elementwise else EAGER_PASSES["layer norm" if shape.norm_bias else "rms norm"]
    # What goes into a gather of tokens is cast before it, on the rank that has them; in 4 bits behind it.
    is_cast_split = work.sequence_parallel and work.precision == "fp8"
    gathered = 2 * shape.hidden_size / (work.tp if is_cast_split else 1)
    casts = CASTS.get(work.precision, 0.0) * (gathered + width / work.tp)
    moved = work.tokens * work.size * (passes * (whole + split) + casts)
    forward_s = moved / memory_rate(hardware)
    return Pass(forward_s, 2 * forward_s)
