"""An adapter as it was read: what it makes of the weights of its base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stages.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Adapter:
    """What is on disk. `factors`: layer's name in the Transformers model → (A [rank, in], B [out, rank])."""

    base: str
    """Artifact that it was trained on: stage and version."""
    factors: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float
    is_transposed: bool
    """Whether the base's weights are [in, out], as those of GPT-2."""
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    """With DoRA, layer's name → length of each row of its merged weight [out]."""
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    """Name of a weight → what stands in its place."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Layer, of those whose factors change no linear layer → name of the parameter that they change. All experts of a
    layer are one parameter: then A is [experts, rank, in] and B [experts, out, rank]."""
    scalings: Mapping[str, float] = field(default_factory=dict)
    """Layer → its own scaling, where it has one."""

    @property
    def rank(self) -> int:
        """Rows of A, of the layer that has most."""
        return max(a.shape[-2] for a, _ in self.factors.values())

    @property
    def has_own_ranks(self) -> bool:
        """Whether linear layers have several ranks."""
        return len({len(a) for layer, (a, _) in self.factors.items() if layer not in self.parameters}) > 1

    def scaling_of(self, layer: str) -> float:
        """How often B A x counts there."""
        return self.scalings.get(layer, self.scaling)

    @property
    def weights(self) -> set[str]:
        """Names of the base's weights that merging changes, but for `parameters` (`experts.py`)."""
        return {*(f"{layer}.weight" for layer in self.layers), *self.saved}

    @property
    def layers(self) -> set[str]:
        """Names of the linear layers that have factors."""
        return set(self.factors) - set(self.parameters)

    @property
    def is_sum(self) -> bool:
        """Whether all that it does is to add scaling B A x to what linear layers give: it has no DoRA, no modules in
        place of others, and nothing on parameters."""
        return not self.magnitudes and not self.saved and not self.parameters

    def shape_of(self, name: str) -> list[int]:
        """Of one of `weights`."""
        if name in self.saved:
            return list(self.saved[name].shape)
        a, b = self.factors[name.removesuffix(".weight")]
        return [a.shape[1], b.shape[0]] if self.is_transposed else [b.shape[0], a.shape[1]]

    def change(self, layer: str) -> Tensor:
        """fp32: the product of the layer's factors, in its weight's shape; without DoRA, what the adapter adds.

        Of experts: [experts, out, in].
        """
        a, b = self.factors[layer]
        product = self.scaling_of(layer) * (b.float() @ a.float())
        return product.T if self.is_transposed else product

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """fp32: what one of `weights` is with the adapter in it. Raises ModelError for a weight of another shape."""
        layer = name.removesuffix(".weight")
        change = self.saved[name].float() if name in self.saved else self.change(layer)
        if change.shape != weight.shape:
            raise ModelError(
                f"merging {layer}: the adapter changes a weight of {tuple(change.shape)}, the model's is "
                f"{tuple(weight.shape)}; they do not belong together"
            )
        if name in self.saved:
            return change
        merged = weight.float() + change
        if layer not in self.magnitudes:
            return merged
        along_row = 0 if self.is_transposed else 1
        length = self.magnitudes[layer].float().unsqueeze(along_row)
        return merged * (length / merged.norm(dim=along_row, keepdim=True))
