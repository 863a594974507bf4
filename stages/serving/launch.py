"""What it takes to start the same server again: a value, and the file that a serve stage leaves of it."""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, Field

from stages.core.contract import StrictModel
from stages.serving.config import ServingConfig

LAUNCH_FILE = "launch.json"


class LaunchSpec(StrictModel):
    """The content of `launch.json`. Files written before there was more than one engine say `vllm_version`.

    model: the folder of the weights; of adapters, that of their base. served_name: what requests ask for.
    """

    model: Path
    served_name: str
    adapters: dict[str, Path] = Field(default_factory=dict, description="Name in requests → folder of the adapter.")
    base_name: str | None = Field(None, description="Of `model` in requests, where `served_name` is an adapter.")
    swaps_adapters: bool = Field(False, description="Other adapters of `model` may be loaded while it runs.")
    for_training: bool = Field(
        False,
        description="Answers are learned from: other weights may be loaded while it runs, and nothing but the "
        "request says how to sample.",
    )
    num_tried: int = Field(
        0,
        description="Servers that a person tries side by side, this one included, which need to start soon and to "
        "share the devices; 0: it serves others.",
    )
    serving: ServingConfig
    engine: str = "vllm"
    engine_version: str = Field(validation_alias=AliasChoices("engine_version", "vllm_version"))

    @property
    def own_name(self) -> str:
        """Of `model` itself in requests."""
        return self.base_name or self.served_name

    @property
    def folders(self) -> dict[str, Path]:
        """Name in requests → folder, of the model and its adapters."""
        return {self.own_name: self.model, **self.adapters}

    def asking(self, name: str) -> LaunchSpec:
        """The same server, another of whose names is asked for."""
        return self.model_copy(update={"served_name": name, "base_name": self.own_name})

    @property
    def version_tag(self) -> dict[str, str]:
        """`ENGINE_version`: how versions of artifacts and tags have it."""
        return {f"{self.engine}_version": self.engine_version}
