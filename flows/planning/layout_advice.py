"""Layout search for `lifecycle layouts`, which ranks all parallel layouts of a model or explains a single one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from flows.ledger.home import hardware_file, store_root
from flows.planning.layout_text import engine_and_fields, line_problems
from flows.planning.model_shape import ModelConfigs, download_of, measured_shape, published_shape
from flows.planning.outside import resolve_outside
from flows.planning.plan import chosen_stages
from flows.planning.stored import find_stored
from flows.recipe.recipe import load_recipe
from flows.store.store import Store
from stages.core.errors import LayoutError, ModelError, RecipeError
from stages.core.fields import what_is_wrong
from stages.hubs.answers import PLANNING_LIMIT_S
from stages.kinds.train.config import TrainConfig
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.shape import ModelShape
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import ENGINES, EngineName, Layout
from stages.parallel.legality import is_legal, refusals
from stages.planner.adapted import PlannedAdapter
from stages.planner.costs import SearchRequest
from stages.planner.hardware import Hardware, built_in, from_yaml, load_hardware, shared_cpu
from stages.planner.search import Candidate, SearchResult, estimate, has_fitting, safest_first, search, work_errors
from stages.planner.workload import Precision, Workload

DEFAULT_SEQUENCE_LENGTH = 4096
DEFAULT_BATCH_ROWS = 1024
MORE_DEVICES = (2, 4, 8, 16, 32)
"""Multiples of the number of devices that are tried where no layout fits."""
USUAL_RANK = 16
"""Rank of the LoRA adapters that are tried where no layout fits."""


@dataclass(frozen=True)
class LayoutOptions:
    """Command-line options of `lifecycle layouts`; None means the recipe's value or the default."""

    num_gpus: int
    gpu: str
    stage: str | None = None
    gpus_per_node: int | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    precision: Precision | None = None
    lora_rank: int | None = None
    tokens: float | None = None
    engine: EngineName | None = None


@dataclass(frozen=True)
class Ranked:
    """Result of a layout search for `lifecycle layouts`, which shows the `top` best layouts."""

    request: SearchRequest
    result: SearchResult
    top: int
    remedies: tuple[str, ...] = ()
    """Changes with which a layout would fit, such as more devices; empty if one fits as it is, or none would."""

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """Return the best layouts that fit, then tight ones; if none fits, those that lack least memory."""
        return (safest_first(self.result.fitting) or self.result.too_large)[: self.top]


@dataclass(frozen=True)
class Explained:
    """Predicted memory and speed of a single parallel layout, as `lifecycle layouts` explains it, with warnings."""

    request: SearchRequest
    candidate: Candidate
    warnings: tuple[str, ...]


def search_request(model: str, options: LayoutOptions) -> SearchRequest:
    """Return the layout search for a recipe's stage, a `config.json` or a known model.

    Raises RecipeError, ModelError, DownloadError.
    """
    _check_positive(options)
    hardware = _hardware(options)
    if Path(model).suffix in (".yaml", ".yml"):
        shape, config = _of_recipe(Path(model), options.stage)
        workload, num_gpus = config.workload, _training_gpus(config, options.num_gpus)
        server = config.colocated_server
    else:
        server = None
        shape, workload = _of_config(model), Workload(DEFAULT_SEQUENCE_LENGTH, DEFAULT_BATCH_ROWS)
        num_gpus = options.num_gpus
    workload = replace(
        workload,
        sequence_length=options.seq_len or workload.sequence_length,
        global_batch_size=options.global_batch_size or workload.global_batch_size,
        precision=options.precision or workload.precision,
        adapter=_adapter(workload.adapter, options.lora_rank),
        total_tokens=options.tokens or workload.total_tokens,
    )
    engines = (options.engine,) if options.engine else ENGINES
    return SearchRequest(shape, workload, hardware, num_gpus, engines, server=server)


def ranked(request: SearchRequest, top: int) -> Ranked:
    """Search all legal layouts of a model and rank them by predicted step time."""
    result = search(request)
    return Ranked(request, result, top, () if result.fitting else tuple(_remedies(request)))


def _remedies(request: SearchRequest) -> Iterator[str]:
    """Yield the options nearest to a request under which a layout would fit: more devices, LoRA adapters."""
    larger = (replace(request, num_gpus=factor * request.num_gpus) for factor in MORE_DEVICES)
    if enough := next(filter(has_fitting, larger), None):
        yield f"{enough.num_gpus} devices to train on (--gpus)"
    if not request.workload.adapter:
        adapted = replace(request.workload, adapter=PlannedAdapter(USUAL_RANK))
        if has_fitting(replace(request, workload=adapted)):
            yield f"LoRA adapters (--lora-rank {USUAL_RANK})"


def explained(request: SearchRequest, text: str) -> Explained:
    """Predict time and memory of a layout text, with warnings. Raises LayoutError, with all reasons, if impossible."""
    engine, layout = parse_layout(text, request.num_gpus)
    constraints, shape = request.constraints, request.shape
    errors = [*work_errors(request, engine)]
    errors += refusals(engine, layout, constraints, request.workload.features(shape), shape)
    if layout.compile and not request.hardware.compiles:
        errors.append(f"layout.compile: torch's compiler makes no kernels for {request.hardware.name}")
    if errors:
        raise LayoutError("\n".join([f"the layout {text!r} cannot work:", *(f"  {error}" for error in errors)]))
    warnings = [*RULES[engine].layout_warnings(layout, constraints, shape)]
    in_tokens = layout.model_copy(update={"sequence_parallel": True})
    is_possible = is_legal(engine, in_tokens, constraints, shape, request.workload.features(shape))
    if layout.tp > 1 and not layout.sequence_parallel and is_possible:
        warnings += ["layout: tp without sequence_parallel keeps the whole of norms and dropout on every rank"]
    return Explained(request, estimate(request, engine, layout), tuple(warnings))


def parse_layout(text: str, num_gpus: int) -> tuple[EngineName, Layout]:
    """Parse a layout such as `tp=4 pp=2 micro_batch_size=2`. Raises LayoutError, also if it leaves GPUs unused."""
    if problems := [*line_problems(text, Layout.model_fields)]:
        raise LayoutError(f"reading the layout {text!r}: {'; '.join(problems)}")
    engine, fields = engine_and_fields(text)
    try:
        layout = Layout.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        raise LayoutError(f"reading the layout {text!r}: {what_is_wrong(error)}") from error
    if layout.world_size != num_gpus:
        # The dp_shard with which the other degrees fill all GPUs, if there is one.
        left, rest = divmod(num_gpus, layout.world_size // layout.dp_shard)
        remedy = (
            f"write dp_shard={left}, or --gpus {layout.world_size}" if left and not rest else "change one of the two"
        )
        raise LayoutError(f"the layout {text!r} is of {layout.world_size} processes, for {num_gpus} GPUs; {remedy}")
    return engine, layout


def _hardware(options: LayoutOptions) -> Hardware:
    """Return the hardware of option `--gpu`; for `cpu`, this machine as calibrated or the built-in CPU, shared."""
    if options.gpu != "cpu":
        return load_hardware(options.gpu, options.gpus_per_node)
    machine = from_yaml(hardware_file()) if hardware_file().is_file() else built_in("cpu")
    return shared_cpu(machine, options.num_gpus)


def _adapter(of_recipe: PlannedAdapter | None, rank: int | None) -> PlannedAdapter | None:
    """Return the LoRA adapter to plan for: the recipe's, with `--lora-rank`'s rank, or one on all linear layers."""
    if rank is None:
        return of_recipe
    return replace(of_recipe, rank=rank) if of_recipe else PlannedAdapter(rank)


def _check_positive(options: LayoutOptions) -> None:
    numbers = {
        "--gpus": options.num_gpus,
        "--gpus-per-node": options.gpus_per_node,
        "--seq-len": options.seq_len,
        "--global-batch-size": options.global_batch_size,
        "--lora-rank": options.lora_rank,
        "--tokens": options.tokens,
    }
    bad = [f"{name} is {value:g}" for name, value in numbers.items() if value is not None and value <= 0]
    if bad:
        raise RecipeError(f"looking for layouts: {', '.join(bad)}; expected positive numbers")


def _training_gpus(config: TrainConfig, num_gpus: int) -> int:
    """Return the number of GPUs left for training beside a server that samples. Raises RecipeError if none is left."""
    left = num_gpus - config.sampling_devices
    if left < 1:
        raise RecipeError(
            f"--gpus is {num_gpus}, of which the server that samples takes {config.sampling_devices} "
            "(serving.tensor_parallel_size × data_parallel_size); none is left to train on: name those of both, or let "
            "them share devices (`placement: colocated`)"
        )
    return left


def _of_recipe(path: Path, stage: str | None) -> tuple[ModelShape, TrainConfig]:
    recipe = load_recipe(path)
    trained = {name: config for name, config in recipe.stages.items() if isinstance(config, TrainConfig)}
    if not trained or (stage and stage not in trained):
        raise RecipeError(f"{path}: looking for the train stage {stage or 'any'}; found {', '.join(trained) or 'none'}")
    name = stage or next(iter(trained))
    chosen, index = chosen_stages(recipe, name), Store(store_root()).index()
    recipe, _ = find_stored(recipe, chosen, index)
    # A hub that does not answer is noted and not raised: the table of known models may have the shape.
    outside = resolve_outside(recipe, chosen, unreachable={})
    configs = ModelConfigs(recipe, outside, index, PLANNING_LIMIT_S)
    return configs.shape_of(download_of(recipe, name)), trained[name]


def _of_config(model: str) -> ModelShape:
    """Return the shape of a model from a `config.json`, a folder that contains one, or a published model's name."""
    path = Path(model)
    if path.is_file() or (path / CONFIG_FILE).is_file():
        return measured_shape(ModelFacts(path))
    known = published_shape(model)
    if known is None:
        raise ModelError(
            f"looking for the model {model!r}: no recipe, no config.json, no folder with one, no known model"
        )
    if known.latent:
        raise ModelError(
            f"looking for layouts of {model!r}: no engine here trains latent attention; others' runs of this model are "
            "predicted from a table (tests/benchmarks/predict_table.py)"
        )
    return known
