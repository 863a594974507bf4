"""Where a model is published, parsed. Light and pure: every recipe is read with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """scheme: of the registry. place: what follows it, as its pattern has it."""

    scheme: str
    place: str
    is_hub: bool = False

    def __str__(self) -> str:
        """As a recipe writes it."""
        return f"{self.scheme}://{self.place}"
