"""Base class of the rules about what a training engine supports; needs neither the engine's libraries nor torch.

The base supports every option, device and model; an engine states only where it differs.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from stages.models.facts import ModelFacts
from stages.models.shape import ModelShape
from stages.models.walked import shape_of
from stages.parallel.layout import EngineName, Layout, RunConstraints

Feature = Literal[
    "muon",
    "fewer_bits_adamw",
    "stochastic_rounding",
    "fp8",
    "fp32",
    "rowwise_fp8",
    "score_head",
    "second_model",
    "teacher_server",
    "mtp_loss",
    "media",
    "unpacked_rows",
    "frozen_parts",
    "frozen_routers",
    "adapter",
    "adapted_experts",
    "quantized_base",
    "eva",
    "replay_experts",
    "tp",
    "cp",
    "ep",
    "sequence_parallel",
    "compile",
    "cpu_offload",
    "activation_offload",
    "recomputed_stages",
    "sharded_gradients",
]
"""Options of a recipe that an engine may lack, or that do not go with others; those from `tp` on are of its layout."""
Features = Mapping[Feature, str]
"""Features that a training uses, each as its recipe asks for it: "`precision: fp8`"."""
UNTRIED = ", with which it has not been tried"
APART: Mapping[Feature, Mapping[Feature, str]] = {
    "muon": {"adapter": ", whose factors are no whole matrices to orthogonalise", "media": UNTRIED},
    "fp8": {"media": UNTRIED},
    "quantized_base": {"media": ", whose tower it would quantize, too"},
    "eva": {"media": ", since its start is measured on text"},
    "score_head": {"adapter": ", since it trains whole models only", "media": ", since it reads text alone"},
    "teacher_server": {"media": ", since it is asked about text alone"},
    "mtp_loss": {"adapter": ", which has no weights for the layer", "media": UNTRIED},
    "frozen_parts": {"adapter": ", whose base is frozen"},
    "frozen_routers": {"adapter": ", whose base is frozen, and which `adapter.exclude_modules` keeps off routers"},
    "stochastic_rounding": {
        "adapter": ", which learns in fp32",
        **dict.fromkeys(("fp8", "fp32"), ", since it needs `precision: bf16`"),
    },
    "cpu_offload": {"muon": ", which gathers matrices on the device"},
    "compile": {"unpacked_rows": ", of which each has its own length: layers would be compiled again for each"},
    "sharded_gradients": {"stochastic_rounding": ", which would sum them in bf16"},
}
"""Features that do not go with others, with the end of an error message; read by `stages.parallel.legality`."""


class EngineRules:
    """Rules about a training engine: the parallel layouts, options, devices and models that it supports."""

    name: ClassVar[EngineName]
    factors: ClassVar[tuple[str, ...]]
    """Names of the parallel degrees whose product is the number of processes."""
    own_fields: ClassVar[tuple[str, ...]]
    """Layout fields that this engine supports and at least one other engine does not."""
    lacks: ClassVar[Features] = {}
    """Features that the engine lacks, each with the end of an error message that may name a substitute or be empty."""
    apart: ClassVar[Mapping[Feature, Mapping[Feature, str]]] = APART
    """Features that do not go with others, of this engine; those of a layout come first, as keys."""
    adapter_options: ClassVar[frozenset[str] | None] = None
    """Names of the `adapter:` options that the engine supports. None means all, also options added later."""
    builds_from_shape: ClassVar[bool] = False
    """True if the engine builds models itself, of known families only; False if it runs Transformers' code."""

    def has(self, feature: Feature) -> bool:
        return feature not in self.lacks

    def supports_adapter_option(self, name: str) -> bool:
        return self.adapter_options is None or name in self.adapter_options

    def refuses_device(self, torch_type: str) -> str | None:
        """Return why the engine cannot train on devices of this `torch.device.type`; None if it can."""
        return None

    def missing_package(self, precision: str) -> str | None:
        """Return which package the precision lacks, and how to install it, or None.

        Packages that only the device's own machine can look for are left to the engine.
        """
        return None

    def environment(self, torch_type: str, layout: Layout) -> Mapping[str, str]:
        """Return the environment variables that a parallel layout needs before a process first uses its device."""
        return {}

    def layout_errors(self, layout: Layout, constraints: RunConstraints) -> Iterator[str]:
        """Yield errors of a parallel layout for any model: degrees that do not fit the engine or the batch."""
        yield from ()

    def model_errors(self, layout: Layout, shape: ModelShape) -> Iterator[str]:
        """Yield errors of a parallel layout for a model of these sizes, such as heads that do not divide."""
        yield from ()

    def device_errors(self, torch_type: str, layout: Layout, precision: str, shape: ModelShape) -> Iterator[str]:
        """Yield errors of a layout on devices of this `torch.device.type`, given the packages installed here."""
        yield from ()

    def layout_warnings(self, layout: Layout, constraints: RunConstraints, shape: ModelShape) -> Iterator[str]:
        if layout.sequence_parallel and layout.tp == 1:
            yield "layout: sequence_parallel does nothing with tp 1"

    def shape_of(self, facts: ModelFacts) -> ModelShape:
        """Return a model's sizes; ModelError if unknown, or the engine would compute the model differently."""
        return shape_of(facts)
