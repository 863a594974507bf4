"""Predicted kernel time of one model layer and of the head on one process rank, for one micro-batch.

A matrix product runs at a constant share of the peak: less where its output has few tiles for the processors, where the
summed dimension is short, and where a dimension is no multiple of what tensor cores load at once (NVIDIA, "Matrix
multiplication background user's guide"); or at the rate of memory, if that is slower (the roofline of Williams et al.
2009). Fused attention computes the causal half of the scores at a rate of its own (Dao 2023). All other kernels stream
through memory. Where kernels are short, the host that launches them limits the rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from stages.models.shape import ModelShape
from stages.planner.hardware import Hardware
from stages.planner.walked import dense_products, kept_values
from stages.planner.workload import PlannedPrecision, ProgramTraits

TILE = 128
"""Rows and columns of the output tile that one processor of the device computes at a time in a matrix product."""
ALIGNED = ((64, 1.0), (32, 0.97), (16, 0.92), (8, 0.75), (4, 0.2), (2, 0.15), (1, 0.12))
"""Share of the matmul rate by the power of two that divides the inner dimension (loads take 16 bytes or more)."""
LOGITS_CHUNK = 2**27
"""Number of logits computed at a time where the loss is computed in chunks; see `stages.engines.log_probabilities`."""
BACKWARD_ATTENTION = 2.5
"""Cost of fused attention's backward pass over its forward: five products instead of two (Dao 2023, section 3.1)."""
LAUNCHES_OF_A_COLLECTIVE = 3
"""Host time of calling a collective, in kernel launches: its kernel, and the events that streams wait for."""
CASTS = {"fp8": 2.5, "fp4": 4.5}
"""Memory traffic of casting a matrix product's input to 8 or 4 bits, relative to reading it once in 16 bits.

fp8: read once, written twice. fp4: read for its scales and for its values, plain and rotated (NVIDIA 2025,
2509.25149)."""
EAGER_PASSES = {"layer norm": 2, "rms norm": 3}
"""Memory traffic of unfused elementwise operations relative to fused ones, by norm: RMSNorm is a chain in fp32."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one forward pass and of one backward pass, recomputation excluded."""

    forward_s: float
    backward_s: float

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def times(self, factor: float) -> PassTimes:
        return PassTimes(self.forward_s * factor, self.backward_s * factor)


@dataclass(frozen=True)
class LayerWork:
    """Model shape, batch and parallel degrees that determine one layer's work per process rank and micro-batch."""

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
    """True if the base is frozen: backward computes gradients only of activations and of adapters."""
    decoded_bytes: float = 0.0
    """Bytes that decoding the frozen 4- or 8-bit weights once, as each pass does, reads and writes."""

    @property
    def tokens(self) -> float:
        """Number of tokens of a micro-batch on one process rank."""
        return self.rows * self.sequence_length / self.cp

    @property
    def size(self) -> int:
        """Bytes of one activation value."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True)
class LayerTime:
    """Predicted seconds of one layer on one process rank, by kind of kernel, with the host's time to launch them."""

    attention_core: PassTimes
    products: PassTimes
    elementwise: PassTimes
    host_s: float
    """Seconds that the host takes to launch the kernels of one forward pass."""
    host_is_device: bool = False

    @cached_property
    def both(self) -> PassTimes:
        """Seconds of the layer's forward and backward pass, including the time to launch kernels.

        The host launches ahead but sometimes waits, so the slower of the two dominates and the faster adds some of its
        time (root of the sum of squares). On a CPU both are one processor, and add up.
        """
        busy = self.attention_core + self.products + self.elementwise
        if self.host_is_device:
            return busy + PassTimes(self.host_s, 2 * self.host_s)
        # Launches of the backward pass: twice those of the forward pass, as its kernels are.
        return PassTimes(math.hypot(busy.forward_s, self.host_s), math.hypot(busy.backward_s, 2 * self.host_s))


@lru_cache(maxsize=65536)
def layer_time(work: LayerWork, software: ProgramTraits, hardware: Hardware, kernels: float = 0.0) -> LayerTime:
    """Return the predicted seconds of one layer, averaged over the model's dense and mixture-of-experts layers.

    kernels: launches of its forward pass (`stages.planner.kernels`), without those of collectives.
    """
    shape = work.shape
    # Share of the layers that are mixtures of experts; the others are dense.
    mixture = shape.num_mixture_layers / shape.num_layers
    experts = work
    if work.precision in CASTS and software.casts_at_products:
        experts = replace(work, precision="bf16")
        if not software.fused_elementwise:  # torchao has gradients of frozen weights
            work = replace(work, is_frozen=False)
    if shape.kinds:
        products = _walked_products(work, experts, hardware)
    else:
        products = _attention_products(work, hardware)
        if mixture < 1:
            products += _dense_ffn(work, hardware).times(1 - mixture)
        if mixture:
            products += _experts(experts, hardware).times(mixture)
    core = (
        _flash(work, software, hardware) if software.flash_attention else _unfused_attention(work, software, hardware)
    )
    launches = 0 if software.cuda_graphs else kernels + _collective_launches(work)
    host_s = launches * hardware.efficiency.launch_s
    return LayerTime(core, products, _elementwise(work, software, hardware), host_s, hardware.host_is_device)


def _collective_launches(work: LayerWork) -> int:
    """Return the kernel launches of a layer's tensor-parallel collectives in a forward pass.

    These are two all-reduces; with sequence parallelism each is a reduce-scatter and an all-gather.
    """
    if work.tp == 1:
        return 0
    # The backward pass counts twice as many, in `LayerTime.both`.
    return LAUNCHES_OF_A_COLLECTIVE * (4 if work.sequence_parallel else 2)


@lru_cache(maxsize=16384)
def head_time(work: LayerWork, software: ProgramTraits, hardware: Hardware) -> PassTimes:
    """Return the seconds of the output head: matrix product with the (padded) vocabulary, and fp32 cross-entropy.

    With logits in more than one chunk, the backward pass computes the product again.
    """
    columns = TILE * math.ceil(work.shape.vocab_size / work.tp / TILE)
    precision: PlannedPrecision = "fp32" if work.precision == "fp32" else "bf16"
    product = _product(hardware, precision, work.tokens, work.shape.hidden_size, columns, work.is_frozen)
    logits = work.tokens * columns
    if software.chunked_logits and logits > LOGITS_CHUNK:
        product += PassTimes(0.0, product.forward_s)
    forward_bytes, backward_bytes = _bytes_of_a_logit(work.size, software)
    rate = memory_rate(hardware)
    return product + PassTimes(logits * forward_bytes / rate, logits * backward_bytes / rate)


def _bytes_of_a_logit(size: int, software: ProgramTraits) -> tuple[int, int]:
    """Return the bytes of a logit to and from memory in a forward and a backward pass, beside those of products.

    size: bytes of the head's output. Compiled, it is read twice, then read once and overwritten by its gradient.
    """
    if not software.chunked_logits:
        return size + 8, size + 8
    if software.compiled_layers:
        return 2 * size, 2 * size
    # Cast to fp32, where it is not; largest (4), difference (8), exponential (8), sum (4). Backward difference,
    # exponential and scale (8 each), and the cast back.
    cast = size + 4 if size < 4 else 0
    return cast + 24, 2 * cast + 24


def memory_rate(hardware: Hardware) -> float:
    """Return the memory bandwidth that streaming kernels achieve, in bytes/s."""
    return hardware.memory_gb_per_s * 1e9 * hardware.efficiency.memory


def matmul_s(hardware: Hardware, precision: PlannedPrecision, rows: float, depth: float, columns: float) -> float:
    """Return the predicted seconds of a matrix product of shapes [rows, depth] × [depth, columns]."""
    if not rows or not columns:
        return 0.0
    efficiency = hardware.efficiency
    # [4096, …] × […, 4096] -> 32 × 32 tiles; on 108 processors 9.5 waves, so 0.89 of the full rate.
    tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
    waves = tiles / hardware.num_processors
    share = waves / (waves + efficiency.matmul_half_waves) * depth / (depth + efficiency.matmul_half_depth)
    rate = (
        hardware.sustained_flops_per_s(precision) * efficiency.matmul * share * min(_aligned(depth), _aligned(columns))
    )
    element_bytes = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}[precision]
    # Bytes: both operands in the product's precision, the result in 16 bits at least.
    moved = element_bytes * (rows * depth + depth * columns) + max(2, element_bytes) * rows * columns
    # Roofline: whichever is slower, computing or moving the operands.
    return max(2 * rows * depth * columns / rate, moved / memory_rate(hardware))


def _aligned(dimension: float) -> float:
    # 4096 -> 1.0 (divisible by 64), 1000 -> 0.75 (by 8 only), an odd width -> 0.12.
    size = int(dimension)
    return next(share for power, share in ALIGNED if size % power == 0)


def _product(
    hardware: Hardware, precision: PlannedPrecision, rows: float, depth: float, columns: float, frozen: bool = False
) -> PassTimes:
    """Return the seconds of a linear layer's forward and backward pass; frozen weights have no gradient to compute."""
    forward_s = matmul_s(hardware, precision, rows, depth, columns)
    return PassTimes(forward_s, (1 if frozen else 2) * forward_s)


def _walked_products(work: LayerWork, experts: LayerWork, hardware: Hardware) -> PassTimes:
    """Return the seconds of a walked model's products in a layer, on average over its kinds of layers."""
    total = PassTimes(0.0, 0.0)
    for kind in work.shape.kinds:
        of_layer, weights = PassTimes(0.0, 0.0), 0.0
        for (inputs, outputs), whole in zip(dense_products(kind, work.tp), dense_products(kind), strict=True):
            of_layer += _product(hardware, work.precision, work.tokens, inputs, outputs, work.is_frozen)
            weights += math.prod(whole)
        for stacked in kind.experts:
            rows = work.tokens * kind.experts_computed
            held = stacked.num_experts / work.ep
            padded = held * TILE * math.ceil(rows / held / TILE)
            grouped = _product(hardware, experts.precision, padded, *stacked.sizes(work.etp), experts.is_frozen)
            # Bytes of sorting tokens by expert, or of the way back.
            moved = 2 * rows * work.shape.hidden_size * work.size / memory_rate(hardware)
            of_layer += grouped.times(1 / hardware.efficiency.grouped) + PassTimes(moved, moved)
            weights += kind.experts_per_token * stacked.inputs * stacked.outputs
        # A layer that several passes run through, and weights of other than linear layers.
        of_layer = of_layer.times(kind.products / weights) if weights else of_layer
        rate = hardware.sustained_flops_per_s("fp32" if work.precision == "fp32" else "bf16")
        state_s = 2 * work.tokens * kind.state_products / (rate * hardware.efficiency.matmul)
        of_layer += PassTimes(state_s, 2 * state_s)
        total += of_layer.times(len(kind.layers) / work.shape.num_layers)
    return total


def _attention_products(work: LayerWork, hardware: Hardware) -> PassTimes:
    shape = work.shape
    queries, keys_and_values = shape.query_width + shape.rotary_width, 2 * shape.kv_width
    # [inputs, outputs] of each product; tensor parallelism divides one of the two. First the output projection.
    matrices: list[tuple[float, float]] = [(shape.query_width / work.tp, shape.hidden_size)]
    if shape.latent:
        # The projection down to the latents is whole on every tensor-parallel rank, those up from them are cut.
        matrices.append((shape.hidden_size, shape.latent_width))
        matrices.append((shape.latent.query_rank, queries / work.tp))
        matrices.append((shape.latent.kv_rank, keys_and_values / work.tp))
    else:
        matrices.append((shape.hidden_size, (queries + keys_and_values) / work.tp))
    products = [_product(hardware, work.precision, work.tokens, *matrix, work.is_frozen) for matrix in matrices]
    return sum(products, start=PassTimes(0.0, 0.0))


def _dense_ffn(work: LayerWork, hardware: Hardware) -> PassTimes:
    shape, frozen = work.shape, work.is_frozen
    width = shape.ffn_size / work.tp
    # Gate and up are one product of twice the width.
    into = (2 if shape.gated_ffn else 1) * width
    inward = _product(hardware, work.precision, work.tokens, shape.hidden_size, into, frozen)
    return inward + _product(hardware, work.precision, work.tokens, width, shape.hidden_size, frozen)


def _experts(work: LayerWork, hardware: Hardware) -> PassTimes:
    """Return the experts' seconds on one rank: grouped products, rows padded to tiles, and moves in memory."""
    shape = work.shape
    held = shape.num_experts / work.ep
    # Rows for the experts of one rank if all experts are met equally; the `etp` ranks of an expert see the same rows.
    tokens = work.tokens * shape.experts_per_token * work.etp / work.tp
    rows = held * TILE * math.ceil(tokens / held / TILE)
    width = shape.expert_ffn_size / work.etp
    into = (2 if shape.gated_ffn else 1) * width
    inward = _product(hardware, work.precision, rows, shape.hidden_size, into, work.is_frozen)
    products = inward + _product(hardware, work.precision, rows, width, shape.hidden_size, work.is_frozen)
    # Bytes of sorting tokens by expert, and of the way back: each reads and writes every row.
    moved = 4 * tokens * shape.hidden_size * work.size / memory_rate(hardware)
    return products.times(1 / hardware.efficiency.grouped) + PassTimes(moved, moved)


def _flash(work: LayerWork, software: ProgramTraits, hardware: Hardware) -> PassTimes:
    # Queries with keys (rotary part included) and probabilities with values; a multiply-add is two FLOPs.
    by_window = work.shape.flops().attention
    pairs_width = sum(one.width * _keys_met(work.sequence_length, one.window_tokens) for one in by_window)
    flops = 2 * work.tokens * pairs_width / work.shape.num_layers / work.tp
    precision: PlannedPrecision = "fp32" if work.precision == "fp32" else "bf16"
    share = (
        hardware.efficiency.first_flash_attention if software.first_flash_attention else hardware.efficiency.attention
    )
    share *= hardware.efficiency.attention_in_eight_bits if software.fp8_attention else 1.0
    rate = hardware.sustained_flops_per_s(precision) * share
    forward_s = flops / rate
    return PassTimes(forward_s, BACKWARD_ATTENTION * forward_s)


def _keys_met(num_tokens: int, window_tokens: int | None) -> float:
    """Return how many keys a query meets on average: half of the row under the causal mask, else the whole window."""
    attended = min(window_tokens or num_tokens, num_tokens)
    return attended / 2 if attended == num_tokens else attended


def _unfused_attention(work: LayerWork, software: ProgramTraits, hardware: Hardware) -> PassTimes:
    """Return the seconds of unfused attention: two batched matrix products, softmax and dropout over all scores."""
    shape = work.shape
    # No kernel skips the masked half here: every score of the square is computed and stored.
    scores = work.tokens * work.sequence_length * shape.num_heads / work.tp
    rate = hardware.sustained_flops_per_s("fp32" if work.precision == "fp32" else "bf16") * hardware.efficiency.matmul
    depth = shape.head_dim / (shape.head_dim + hardware.efficiency.matmul_half_depth)
    # Two products of two FLOPs for each score and channel.
    products_s = 4 * scores * shape.head_dim / (rate * depth * _aligned(shape.head_dim))
    # The factor is in bytes for 16-bit scores; softmax, and dropout with its mask, pass over all of them.
    moved = scores * (13 if software.dropout else 8) * work.size / 2
    forward_s = products_s + moved / memory_rate(hardware)
    return PassTimes(forward_s, 2 * forward_s)


def _elementwise(work: LayerWork, software: ProgramTraits, hardware: Hardware) -> PassTimes:
    """Return the seconds of norms and residuals (ten passes over hidden states), activations, rotary and casts.

    Frozen weights in few bits are decoded once in each pass.
    """
    shape = work.shape
    # Values per token. `whole` is repeated on every tensor-parallel rank without sequence parallelism, `split` never.
    whole: float = 10 * shape.hidden_size + 2 * shape.latent_width
    mixture = shape.num_mixture_layers / shape.num_layers
    width = (1 - mixture) * shape.ffn_size + mixture * shape.experts_per_token * shape.expert_ffn_size
    attention = 2 * (shape.query_width + shape.kv_width + 2 * shape.rotary_width)
    split = (3 if shape.gated_ffn else 2) * width + attention
    passes = 1 if software.fused_elementwise else EAGER_PASSES["layer norm" if shape.norm_bias else "rms norm"]
    # Tokens are cast to 8 bits before they are gathered, on the rank that has them; to 4 bits after it.
    is_cast_split = work.sequence_parallel and work.precision == "fp8"
    gathered = 2 * shape.hidden_size / (work.tp if is_cast_split else 1)
    casts = CASTS.get(work.precision, 0.0) * (gathered + width / work.tp)
    if shape.kinds:
        whole, split = kept_values(shape, work.size)
    whole, split = whole / (work.tp if work.sequence_parallel else 1), split / work.tp
    moved = work.tokens * work.size * (passes * (whole + split) + casts)
    forward_s, decoding_s = moved / memory_rate(hardware), work.decoded_bytes / memory_rate(hardware)
    return PassTimes(forward_s + decoding_s, 2 * forward_s + decoding_s)
