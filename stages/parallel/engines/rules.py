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
    "rowwise_fp8",
    "score_head",
    "second_model",
    "activation_offload",
    "mtp_loss",
    "pictures",
    "splits_all",
]


def nearest_divisor(degree: int, *numbers: int) -> int:
    """Return the largest degree, up to the given one, that divides the numbers."""
    return next(one for one in range(degree, 0, -1) if not any(number % one for number in numbers))


class EngineRules:
    """Rules about a training engine: the parallel layouts, options, devices and models that it supports."""

    name: ClassVar[EngineName]
    factors: ClassVar[tuple[str, ...]]
    """Names of the parallel degrees whose product is the number of processes."""
    own_fields: ClassVar[tuple[str, ...]]
    """Layout fields that this engine supports and at least one other engine does not."""
    lacks: ClassVar[Mapping[Feature, str]] = {}
    """Features that the engine lacks, each with the end of an error message that may name a substitute or be empty."""
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

    def refuses_replay(self, layout: Layout) -> str | None:
        """Return why choices of experts cannot be replayed in a layout, following the option's name; or None."""
        return None

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
        yield from ()

    def shape_of(self, facts: ModelFacts) -> ModelShape:
        """Return a model's sizes; ModelError if unknown, or the engine would compute the model differently."""
        return shape_of(facts)
