"""Model FLOPs of a training step, and model FLOPs utilization (MFU): their share of the hardware's peak.

Counted is what the mathematics needs, never what an implementation adds (recomputed activations, padding, optimizer). A
token costs 2 in the forward pass for each parameter that it is multiplied by, plus the two matrix products of attention
(Chowdhery et al. 2022, PaLM, appendix B):

    forward = 2 × (parameters of all layers × tokens + parameters of the head × tokens with a target)
              + Σ layers 2 × heads × (query-key width + value width) × attended pairs
    training = 3 × forward        (the gradients of inputs and of weights cost one forward each)
               - 2 × frozen parameters × tokens     (which get none)

PaLM's formula counts more: causal attention attends to n (n + 1) / 2 pairs of a document of n tokens, not n² (as in Dao
2023, FlashAttention-2, section 4.1), packed documents do not attend to each other, and positions without a target need
no logits. Of a mixture of experts only the experts that a token is routed to count. Embedding look-ups, norms,
rotations and activation functions are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stages.models.media import ModelPart

TRAINING_OVER_FORWARD = 3
Patches = Mapping[ModelPart, Sequence[float]]
"""Number of patches of each picture, frame of a video or sound of documents, by the name of the tower they pass."""


@dataclass(frozen=True)
class AttentionWork:
    """Attention layers of one window size. width: sum of heads × (query-key width + value width)."""

    width: int
    window_tokens: int | None


@dataclass(frozen=True)
class TowerFlops:
    """Sizes of a tower and of the projector behind it from which the FLOPs of pictures, or of sounds, are computed.

    Each product is a number of multiplications: for a patch, or for a pair of patches of a medium. part: the tower's
    name, by which its patches are given.
    """

    part: ModelPart
    tower_products: float
    projector_products: float
    pair_products: float
    tower_learns: bool = True
    projector_learns: bool = True

    def forward(self, patches: Iterable[float]) -> float:
        """Return a forward pass's FLOPs. patches: number of patches of each medium."""
        return 2 * sum(sum(self._products(number)) for number in patches)

    def training(self, patches: Iterable[float]) -> float:
        """Return the FLOPs of a forward and a backward pass, which ends at the first part that learns."""
        by_medium = [self._products(number) for number in patches]
        tower, projector = sum(one for one, _ in by_medium), sum(one for _, one in by_medium)
        backward = 2 * tower * self.tower_learns
        backward += projector * (self.tower_learns + self.projector_learns)
        return 2 * (tower + projector + backward)

    def _products(self, number: float) -> tuple[float, float]:
        """Return the multiplications for one medium, in the tower and in the projector."""
        return self.tower_products * number + self.pair_products * number**2, self.projector_products * number


@dataclass(frozen=True)
class ModelFlops:
    """Sizes of a model from which its FLOPs are computed."""

    layer_parameters: float
    """Number of parameters outside the head that a token is multiplied by; of routed experts, the share it uses."""
    head_parameters: int
    attention: tuple[AttentionWork, ...]
    frozen_layer_parameters: float = 0
    """Number of frozen parameters outside the head that a token is multiplied by; training skips their gradients."""
    is_head_frozen: bool = False
    state_products: float = 0.0
    """Number of multiplications per token in products without weights, outside attention: of a state that is kept."""
    towers: tuple[TowerFlops, ...] = ()

    def forward(self, document_lengths: Iterable[int], num_targets: int, patches: Patches | None = None) -> float:
        """Return a forward pass's FLOPs over documents, without padding. num_targets: positions with logits."""
        in_towers = sum(one.forward((patches or {}).get(one.part, ())) for one in self.towers)
        return self._of_text(list(document_lengths), num_targets) + in_towers

    def training(self, document_lengths: Iterable[int], num_targets: int, patches: Patches | None = None) -> float:
        """Return the FLOPs of a forward and a backward pass over documents of these lengths, without padding."""
        lengths = list(document_lengths)
        frozen = self.frozen_layer_parameters * sum(lengths)
        frozen += self.head_parameters * num_targets if self.is_head_frozen else 0
        in_towers = sum(one.training((patches or {}).get(one.part, ())) for one in self.towers)
        return TRAINING_OVER_FORWARD * self._of_text(lengths, num_targets) - 2 * frozen + in_towers

    def _of_text(self, lengths: Sequence[int], num_targets: int) -> float:
        products = 2 * (
            (self.layer_parameters + self.state_products) * sum(lengths) + self.head_parameters * num_targets
        )
        scores = sum(
            2 * work.width * attended_pairs(length, work.window_tokens) for work in self.attention for length in lengths
        )
        return products + scores


def attended_pairs(num_tokens: int, window_tokens: int | None = None) -> int:
    """Return the number of token pairs in causal attention, own ones included. window_tokens: size, or None."""
    window = num_tokens if window_tokens is None else min(window_tokens, num_tokens)
    # The first tokens see 1, 2, … up to `window` tokens, and each later one sees `window`.
    return window * (window + 1) // 2 + (num_tokens - window) * window


def model_flops_utilization(flops: float, seconds: float, peak_flops_per_s: float, num_devices: int = 1) -> float:
    """Return model FLOPs over what the devices' dense peak would do in that time; at most 1.

    A measured peak may be exceeded if the machine was shared meanwhile; then this step's rate is the peak.
    """
    return min(1.0, flops / (seconds * peak_flops_per_s * num_devices))
