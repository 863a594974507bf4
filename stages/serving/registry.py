"""The serving engines there are. A new engine is a room beside `vllm/` and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from stages.core.errors import ResourceError
from stages.serving.config import ServingConfig
from stages.serving.engine import Engine
from stages.serving.launch import LaunchSpec
from stages.serving.vllm.engine import Vllm

ENGINES: dict[str, Engine] = {"vllm": Vllm()}
DEFAULT_ENGINE = "vllm"


def default_engine() -> Engine:
    """The engine of every new server, since recipes name none."""
    return ENGINES[DEFAULT_ENGINE]


def installed_version() -> dict[str, str]:
    """`ENGINE_version` of that engine, as versions of artifacts have it. Raises ResourceError when there is none."""
    engine = default_engine()
    return {f"{engine.name}_version": engine.find_program().version}


def engine_of(name: str) -> Engine:
    """The engine that a `launch.json` names. Raises ResourceError when this version of the code has none such."""
    if name not in ENGINES:
        raise ResourceError(f"looking for the serving engine {name}: there are {', '.join(ENGINES)}; update this code")
    return ENGINES[name]


def new_launch_spec(
    model: Path,
    served_name: str,
    serving: ServingConfig,
    engine: Engine | None = None,
    *,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    base_name: str | None = None,
) -> LaunchSpec:
    """For an engine (default: that of new servers) as it is installed. Raises ResourceError when it is not."""
    engine = engine or default_engine()
    return LaunchSpec(
        model=model,
        served_name=served_name,
        adapters=dict(adapters),
        base_name=base_name,
        serving=serving,
        engine=engine.name,
        engine_version=engine.find_program().version,
    )
