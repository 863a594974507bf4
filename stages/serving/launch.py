"""What it takes to start the same server again: a value, and the file that a serve stage leaves of it."""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, Field

from stages.core.contract import StrictModel
from stages.serving.config import ServingConfig

LAUNCH_FILE = "launch.json"


class LaunchSpec(StrictModel):
    """The content of `launch.json`. Files written before there was more than one engine say `vllm_version`."""

    model: Path
    served_name: str
    serving: ServingConfig
    engine: str = "vllm"
    engine_version: str = Field(validation_alias=AliasChoices("engine_version", "vllm_version"))

    @property
    def version_tag(self) -> dict[str, str]:
        """`ENGINE_version`: how versions of artifacts and tags have it."""
        return {f"{self.engine}_version": self.engine_version}
