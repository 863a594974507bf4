"""What llm-compressor is to do with a model: a method and what `scaling` found → its modifiers.

llm-compressor's own tables of what AWQ and SmoothQuant scale are by architecture: those of others end in an error, or
in a norm that feeds other layers than the table says. So its two modifiers are given what was found, by name.
"""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.awq.base import get_lowest_common_ancestor_with_avoid
from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantMapping
from torch import nn

from stages.kinds.quantize.scaling import Scaling
from stages.serving.engine import Quantization

SMOOTHING_STRENGTH = 0.8
"""Of activations against weights: what SmoothQuant's authors use for models of many outliers."""


class AWQByName(AWQModifier):
    """AWQ whose mappings name modules: the original searches the model for each pattern, and experts have thousands."""

    def _set_resolved_mappings(self, model: nn.Module) -> None:
        modules, resolved = dict(model.named_modules()), dict[str, ResolvedMapping]()
        for mapping in self.mappings or ():
            names = list(mapping.balance_layers)
            parent_name, parent = get_lowest_common_ancestor_with_avoid(names, model)
            source = modules[mapping.smooth_layer]
            # AWQ replays a parent once, and forgets its inputs then: of two mappings with one parent, the first.
            resolved.setdefault(
                parent_name,
                ResolvedMapping(
                    mapping.smooth_layer, source, [modules[name] for name in names], names, parent, parent_name
                ),
            )
        self._resolved_mappings = list(resolved.values())


class SmoothQuantByName(SmoothQuantModifier):
    """SmoothQuant whose mappings, (readers, source), name modules."""

    def _resolve_mappings(self, model: nn.Module) -> list[SmoothQuantMapping]:
        modules = dict(model.named_modules())
        return [
            SmoothQuantMapping(source, modules[source], [modules[name] for name in readers])
            for readers, source in self.mappings or ()
        ]


def make_modifiers(quantization: Quantization, ignore: list[str], scalings: list[Scaling]) -> list[Modifier]:
    """In the order in which they are applied. ignore: names in memory."""
    groups = {"group_0": _four_bit_groups(quantization)}
    match quantization.method:
        case "awq":
            mappings = [AWQMapping(scaling.source, list(scaling.readers)) for scaling in scalings]
            # "both": half of the grid weighs activations alone, as AWQ was published, half the weights as well.
            awq = AWQByName(mappings=mappings, duo_scaling="both")
            return [awq, QuantizationModifier(config_groups=groups, ignore=ignore)]
        case "gptq":
            return [GPTQModifier(config_groups=groups, ignore=ignore)]
        case "int8":
            norms = [(list(scaling.readers), scaling.source) for scaling in scalings if scaling.of_norm]
            smoothing = SmoothQuantByName(smoothing_strength=SMOOTHING_STRENGTH, mappings=norms)
            return [*([smoothing] if norms else []), GPTQModifier(scheme="W8A8", ignore=ignore)]
        case "fp8":
            return [QuantizationModifier(scheme="FP8_DYNAMIC", ignore=ignore)]
        case unknown:
            raise AssertionError(f"the registry names {unknown} as a method of llm-compressor")


def _four_bit_groups(quantization: Quantization) -> QuantizationScheme:
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=quantization.group_size,
        symmetric=quantization.symmetric,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)
