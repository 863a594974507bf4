"""Registry of the serving engines: vLLM, llama.cpp, SGLang and LMDeploy, by name.

A new engine is a folder beside `vllm/`, or a table in `packaged.py`, and one line here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from stages.core.contract import StageConfig
from stages.core.errors import ModelError, RecipeError, ResourceError
from stages.core.files import read_json_object
from stages.models.facts import PROCESSOR_FILES, ModelFacts
from stages.models.model_folder import holds_gguf
from stages.models.processor_files import reads_media
from stages.serving.config import ServingConfig, Speculation, SpeculationMethod
from stages.serving.engine import Engine, LaunchSpec, WeightFiles
from stages.serving.llama_cpp.engine import LlamaCpp
from stages.serving.packaged import LMDEPLOY, SGLANG
from stages.serving.vllm.engine import Vllm

ENGINES: dict[str, Engine] = {"vllm": Vllm(), "llama_cpp": LlamaCpp(), "sglang": SGLANG, "lmdeploy": LMDEPLOY}
DEFAULT_ENGINE = "vllm"
DEFAULT_ENGINES: dict[WeightFiles, str] = {"gguf": "llama_cpp"}


def chosen_engine(serving: ServingConfig | None) -> Engine:
    """Return the engine that a recipe's `serving` block names, or the default engine."""
    return ENGINES[(serving and serving.engine) or DEFAULT_ENGINE]


def installed_version(engine: Engine) -> dict[str, str]:
    """Return the installed version as a tag, {"vllm_version": "0.32.0"}; ResourceError if not installed."""
    return {f"{engine.name}_version": engine.find_program().version}


def unserved(engine: Engine, facts: ModelFacts, serving: ServingConfig) -> Iterator[str]:
    """Yield `FIELD: PROBLEM` for options with which the engine on this machine could not serve a model."""
    try:
        engine.check_serves(facts, serving)
    except RecipeError as error:
        yield str(error)


def engine_of(name: str) -> Engine:
    """Return the engine that a `launch.json` names. Raises ResourceError if this version of the code lacks it."""
    if name not in ENGINES:
        raise ResourceError(f"looking for the serving engine {name}: there are {', '.join(ENGINES)}; update this code")
    return ENGINES[name]


def weight_files_of(model: Path) -> WeightFiles:
    """Return whether a model folder holds `gguf` or `safetensors` weight files."""
    return "gguf" if holds_gguf(model) else "safetensors"


def check_weight_files(model: Path, engine: Engine) -> None:
    """Raise ModelError if the engine cannot read a model folder's kind of weight files (safetensors or GGUF)."""
    found, expected = weight_files_of(model), engine.capabilities.weights
    if found != expected:
        raise ModelError(f"serving {model}: it holds {found}, and {engine.title} serves {expected}; {_advice(found)}")


def check_sees(model: Path, engine: Engine, adapters: Mapping[str, Path] = MappingProxyType({})) -> None:
    """Raise ModelError if an engine would leave out a model's processor, or an adapter was trained with another."""
    if reads_media(model) and not engine.capabilities.pictures:
        able = " or ".join(other.title for other in ENGINES.values() if other.capabilities.pictures)
        raise ModelError(
            f"serving {model}: the model sees, and with {engine.title} its pictures are not compared with what was "
            f"trained; serve it with {able}"
        )
    for name, folder in adapters.items():
        for file in PROCESSOR_FILES:
            own, base = folder / file, model / file
            if own.is_file() and (not base.is_file() or read_json_object(own) != read_json_object(base)):
                raise ModelError(
                    f"serving the adapter {name} on {model}: it was trained with another {file}, such as other bounds "
                    "of pixels, and one server has one; serve what a stage of `kind: merge` makes of it"
                )


def with_engine(serving: ServingConfig | None, model: str, stages: Mapping[str, StageConfig]) -> ServingConfig | None:
    """Return a stage's `serving` settings, with llama_cpp as engine if the stage `model` makes GGUF files."""
    engine = DEFAULT_ENGINES.get(_made_by(model, stages))
    if engine is None or (serving and serving.engine):
        return serving
    return (serving or ServingConfig()).model_copy(update={"engine": engine})


def engine_problems(
    serving: ServingConfig | None, model: str, adapters: bool, stages: Mapping[str, StageConfig]
) -> Iterator[str]:
    """Yield problems of a recipe whose serving engine cannot serve the stage's model, its adapters or its dtype."""
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


def speculation_problems(
    serving: ServingConfig, method: SpeculationMethod, draft: str | None, stages: Mapping[str, StageConfig]
) -> Iterator[str]:
    """Yield a problem if the chosen engine cannot guess tokens ahead so. draft: stage of the draft model, if any."""
    engine = chosen_engine(serving)
    if method not in engine.capabilities.speculation:
        able = " or ".join(name for name, other in ENGINES.items() if method in other.capabilities.speculation)
        yield f"speculative: {engine.name} cannot guess tokens ahead by {method}; serve with {able}, or remove it"
    elif draft and (made := _made_by(draft, stages)) != engine.capabilities.weights:
        yield f"speculative.draft: {engine.name} serves {engine.capabilities.weights}, but {draft} makes {made}"


def idle_serving_fields(serving: ServingConfig | None) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for fields of the recipe's `serving` block that the chosen engine ignores."""
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
    speculation: Speculation | None = None,
) -> LaunchSpec:
    """Return a launch spec for serving a model folder with an installed engine; raise ResourceError without it.

    engine: default: the one that `serving` names, or else the one for the folder's weight files.
    """
    name = serving.engine or DEFAULT_ENGINES.get(weight_files_of(model), DEFAULT_ENGINE)
    engine = engine or engine_of(name)
    return LaunchSpec(
        model=model,
        served_name=served_name,
        adapters=dict(adapters),
        base_name=base_name,
        serving=serving,
        speculation=speculation,
        engine=engine.name,
        engine_version=engine.find_program().version,
    )
