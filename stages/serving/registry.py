"""Registry of the serving engines.

A new engine is a room beside `vllm/`, or a class in `packaged.py`, and one line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from stages.core.contract import StageConfig
from stages.core.errors import ModelError, ResourceError
from stages.models.model_folder import holds_gguf
from stages.serving.config import ServingConfig
from stages.serving.engine import Engine, LaunchSpec, WeightFiles
from stages.serving.llama_cpp.engine import LlamaCpp
from stages.serving.packaged import Lmdeploy, Sglang
from stages.serving.vllm.engine import Vllm

ENGINES: dict[str, Engine] = {"vllm": Vllm(), "llama_cpp": LlamaCpp(), "sglang": Sglang(), "lmdeploy": Lmdeploy()}
DEFAULT_ENGINE = "vllm"
DEFAULT_ENGINES: dict[WeightFiles, str] = {"gguf": "llama_cpp"}
"""Kind of weight files → engine, where it is not `DEFAULT_ENGINE`."""


def chosen_engine(serving: ServingConfig | None) -> Engine:
    """Return the engine that a recipe's `serving` block names, or the default."""
    return ENGINES[(serving and serving.engine) or DEFAULT_ENGINE]


def installed_version(engine: Engine) -> dict[str, str]:
    """Return {`ENGINE_version`: version}, as artifact versions hold it. Raises ResourceError if there is none."""
    return {f"{engine.name}_version": engine.find_program().version}


def engine_of(name: str) -> Engine:
    """Return the engine that a `launch.json` names. Raises ResourceError if this code does not have it."""
    if name not in ENGINES:
        raise ResourceError(f"looking for the serving engine {name}: there are {', '.join(ENGINES)}; update this code")
    return ENGINES[name]


def weight_files_of(model: Path) -> WeightFiles:
    """Return the kind of weight files in a model folder."""
    return "gguf" if holds_gguf(model) else "safetensors"


def check_weight_files(model: Path, engine: Engine) -> None:
    """Raise ModelError for a model folder whose weight files an engine does not read."""
    found, expected = weight_files_of(model), engine.capabilities.weights
    if found != expected:
        raise ModelError(f"serving {model}: it holds {found}, and {engine.title} serves {expected}; {_advice(found)}")


def with_engine(serving: ServingConfig | None, model: str, stages: Mapping[str, StageConfig]) -> ServingConfig | None:
    """Return the `serving` settings for the stage `model`, with the engine filled in where it is not the default."""
    engine = DEFAULT_ENGINES.get(_made_by(model, stages))
    if engine is None or (serving and serving.engine):
        return serving
    return (serving or ServingConfig()).model_copy(update={"engine": engine})


def engine_problems(
    serving: ServingConfig | None, model: str, adapters: bool, stages: Mapping[str, StageConfig]
) -> Iterator[str]:
    """Yield problems of a server of the stage `model`, with or without adapters, by what its engine supports."""
    engine, found = chosen_engine(serving), _made_by(model, stages)
    if found != engine.capabilities.weights:
        yield (
            f"serving.engine: {engine.name} serves {engine.capabilities.weights}, but {model} makes {found}; "
            f"{_advice(found)}"
        )
    elif adapters and not engine.capabilities.adapters:
        yield f"serving.engine: {engine.name} serves no adapters; merge them first (`kind: merge`)"
    if serving and serving.dtype not in ("auto", *engine.capabilities.dtypes):
        computes = " or ".join(engine.capabilities.dtypes)
        yield f"serving.dtype: {engine.name} computes in {computes}, not in {serving.dtype}"


def idle_serving_fields(serving: ServingConfig | None) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for fields of `serving` that the engine does not use."""
    engine = chosen_engine(serving)
    for field in engine.capabilities.idle_fields:
        yield f"serving.{field}", f"{engine.title} has no such option"


def _made_by(stage: str, stages: Mapping[str, StageConfig]) -> WeightFiles:
    return getattr(stages[stage], "weight_files", "safetensors")


def _advice(found: WeightFiles) -> str:
    if found == "gguf":
        return f"say `engine: {DEFAULT_ENGINES['gguf']}`, or serve the model that it was made from"
    return "make one of it (`kind: quantize`, `method: gguf`), or say `engine: vllm`"


def new_launch_spec(
    model: Path,
    served_name: str,
    serving: ServingConfig,
    engine: Engine | None = None,
    *,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    base_name: str | None = None,
) -> LaunchSpec:
    """Return a launch spec for an installed engine: `engine`, the one that `serving` names, or the one for the files.

    Raises ResourceError if the engine is not installed.
    """
    name = serving.engine or DEFAULT_ENGINES.get(weight_files_of(model), DEFAULT_ENGINE)
    engine = engine or engine_of(name)
    return LaunchSpec(
        model=model,
        served_name=served_name,
        adapters=dict(adapters),
        base_name=base_name,
        serving=serving,
        engine=engine.name,
        engine_version=engine.find_program().version,
    )
