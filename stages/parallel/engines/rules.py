"""Base of what an engine supports and refuses, known before its libraries are imported. Pure; needs no torch.

An engine states only where it differs from the base, which supports every option, device and model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from stages.models.facts import ModelFacts
from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout, RunConstraints

Feature = Literal["muon", "fewer_bits_adamw", "rowwise_fp8", "score_head", "second_model"]


class EngineRules:
    """Layouts, options, devices and models that an engine supports."""

    name: ClassVar[EngineName]
    factors: ClassVar[tuple[str, ...]]
    """Degrees whose product is the number of processes."""
    own_fields: ClassVar[tuple[str, ...]]
    """Layout fields that this engine supports and some other engine does not."""
    lacks: ClassVar[Mapping[Feature, str]] = {}
    """Features that the engine lacks, each with its substitute, as the end of a sentence; may be empty."""
    adapter_options: ClassVar[frozenset[str] | None] = None
    """Options of `adapter:` that the engine supports; None: all, later ones too."""
    builds_from_shape: ClassVar[bool] = False
    """True if the engine builds the model itself and so trains known shapes only; else it runs Transformers' code."""

    def has(self, feature: Feature) -> bool:
        """Return whether the engine has a feature."""
        return feature not in self.lacks

    def supports_adapter_option(self, name: str) -> bool:
        """Return whether the engine supports an option of `adapter:`."""
        return self.adapter_options is None or name in self.adapter_options

    def refuses_device(self, torch_type: str) -> str | None:
        """Return why the engine does not train on this kind of device (`torch.device.type`); None where it does."""
        return None

    def missing_package(self, precision: str) -> str | None:
        """Return the package that the engine lacks here for the precision, with how to install it; None if none is
        missing.

        Packages that only the device's own machine can look for are left to the engine.
        """
        return None

    def environment(self, torch_type: str, layout: Layout) -> Mapping[str, str]:
        """Return environment variables that the layout wants before a device of this kind is used first."""
        return {}

    def layout_errors(self, layout: Layout, constraints: RunConstraints) -> Iterator[str]:
        """Yield why the layout's own degrees do not fit the engine and the batch, whatever the model."""
        yield from ()

    def model_errors(self, layout: Layout, shape: ModelShape) -> Iterator[str]:
        """Yield why the engine cannot run the layout with a model of this shape."""
        yield from ()

    def device_errors(self, torch_type: str, layout: Layout, precision: str, shape: ModelShape) -> Iterator[str]:
        """Yield why it cannot run the layout on devices of this kind with the packages that are installed here.

        torch_type: `torch.device.type`.
        """
        yield from ()

    def layout_warnings(self, layout: Layout, constraints: RunConstraints, shape: ModelShape) -> Iterator[str]:
        """Yield why the layout is likely to be slow on the engine."""
        yield from ()

    def shape_of(self, facts: ModelFacts) -> ModelShape:
        """Return the shape of a model.

        Raises ModelError for sizes that are unknown, and for a model that the engine would compute differently.
        """
        return facts.shape
