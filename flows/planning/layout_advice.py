"""What `lifecycle layouts` is asked and answers: a recipe or a model's config → layouts ranked, or one explained."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.ledger.home import hardware_file
from stages.core.errors import LayoutError, ModelError, RecipeError
from stages.models.known_models import known_model
from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.parallel.legality import layout_problems
from stages.planner.hardware import Hardware, built_in, from_yaml, load_hardware
from stages.planner.prediction import shared_cpu
from stages.planner.search import ENGINES, Candidate, Question, SearchResult, estimate, search
from stages.planner.workload import Workload
from stages.train.config import TrainConfig

DEFAULT_SEQUENCE_LENGTH = 4096
DEFAULT_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Inquiry:
    """The command line's numbers; None: as the recipe or the default says."""

    num_gpus: int
    gpu: str
    stage: str | None = None
    gpus_per_node: int | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    precision: Any = None
    lora_rank: int | None = None
    tokens: float | None = None
    engine: EngineName | None = None


@dataclass(frozen=True)
class Explained:
    """One layout, with what makes it illegal or unwise."""

    question: Question
    candidate: Candidate
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Ranked:
    """The best layouts, and the search they are from."""

    question: Question
    result: SearchResult
    top: int

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """Those that fit; where none does, those that come nearest."""
        return (self.result.fitting or self.result.too_large)[: self.top]


def ask(model: str, inquiry: Inquiry) -> Question:
    """Read the recipe, config or known model, and check the numbers. Raises RecipeError, ModelError, DownloadError."""
    _check_positive(inquiry)
    hardware = _hardware(inquiry)
    path = Path(model)
    if path.suffix in (".yaml", ".yml"):
        shape, workload = _of_recipe(path, inquiry)
    else:
        shape, workload = _of_config(model), Workload(DEFAULT_SEQUENCE_LENGTH, DEFAULT_BATCH_ROWS)
    asked = Workload(
        sequence_length=inquiry.seq_len or workload.sequence_length,
        global_batch_size=inquiry.global_batch_size or workload.global_batch_size,
        precision=inquiry.precision or workload.precision,
        method=workload.method,
        lora_rank=inquiry.lora_rank,
        total_tokens=inquiry.tokens or workload.total_tokens,
    )
    engines = (inquiry.engine,) if inquiry.engine else ENGINES
    return Question(shape, asked, hardware, inquiry.num_gpus, engines)


def ranked(question: Question, top: int) -> Ranked:
    """Search all legal layouts."""
    return Ranked(question, search(question), top)


def explained(question: Question, text: str) -> Explained:
    """One layout in full. Raises LayoutError for one that cannot work, with all reasons."""
    engine, layout = parse_layout(text, question.num_gpus)
    problems = layout_problems(engine, layout, question.setting, question.shape)
    errors = [problem.message for problem in problems if problem.severity == "error"]
    if errors:
        raise LayoutError("\n".join([f"the layout {text!r} cannot work:", *(f"  {error}" for error in errors)]))
    candidate = estimate(question, engine, layout)
    assert candidate is not None, "only with a bound on memory is there no estimate"
    return Explained(question, candidate, tuple(problem.message for problem in problems))


def parse_layout(text: str, num_gpus: int) -> tuple[EngineName, Layout]:
    """`tp=4,pp=2,micro_batch_size=2`, with `megatron` or `fsdp` before it where the fields leave that open.

    What is left of the GPUs is data parallelism, sharded; tensor parallelism brings sequence parallelism along.
    """
    words = [word for word in re.split(r"[,\s]+", text.strip()) if word]
    engines = [word.removeprefix("engine=") for word in words if word.removeprefix("engine=") in ENGINES]
    fields = dict(_field(word) for word in words if word.removeprefix("engine=") not in ENGINES)
    if "tp" in fields and fields["tp"] != "1":
        fields.setdefault("sequence_parallel", "true")
    try:
        layout = Layout.model_validate_strings(fields)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise LayoutError(f"reading the layout {text!r}: {problems}") from error
    if "dp_shard" not in fields and num_gpus % layout.world_size == 0:
        layout = layout.model_copy(update={"dp_shard": num_gpus // layout.world_size})
    is_megatron = max(layout.tp, layout.pp, layout.cp, layout.ep) > 1
    default: EngineName = "megatron" if is_megatron else "fsdp"
    return ("megatron" if engines[0] == "megatron" else "fsdp") if engines else default, layout


def _field(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    if name in Layout.model_fields and value:
        return name, value
    close = difflib.get_close_matches(name, Layout.model_fields, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise LayoutError(
        f"reading a layout: {word!r} is no field with a value; known: {', '.join(Layout.model_fields)}{hint}"
    )


def _hardware(inquiry: Inquiry) -> Hardware:
    """Processes share a CPU, as this machine's calibration describes it if there is one."""
    if inquiry.gpu != "cpu":
        return load_hardware(inquiry.gpu, inquiry.gpus_per_node)
    machine = from_yaml(hardware_file()) if hardware_file().is_file() else built_in("cpu")
    return shared_cpu(machine, inquiry.num_gpus)


def _check_positive(inquiry: Inquiry) -> None:
    options = {
        "--gpus": inquiry.num_gpus,
        "--gpus-per-node": inquiry.gpus_per_node,
        "--seq-len": inquiry.seq_len,
        "--global-batch-size": inquiry.global_batch_size,
        "--lora-rank": inquiry.lora_rank,
        "--tokens": inquiry.tokens,
    }
    bad = [f"{name} is {value:g}" for name, value in options.items() if value is not None and value <= 0]
    if bad:
        raise RecipeError(f"looking for layouts: {', '.join(bad)}; expected positive numbers")


def _of_recipe(path: Path, inquiry: Inquiry) -> tuple[ModelShape, Workload]:
    from flows.ledger.home import store_root
    from flows.planning.model_shape import shape_of_stage
    from flows.planning.outside import resolve_outside
    from flows.planning.plan import chosen_stages
    from flows.recipe.recipe import load_recipe
    from flows.store.store import Store

    recipe = load_recipe(path)
    trained = {name: config for name, config in recipe.stages.items() if isinstance(config, TrainConfig)}
    if not trained or (inquiry.stage and inquiry.stage not in trained):
        named = inquiry.stage or "any"
        raise RecipeError(f"{path}: looking for the train stage {named}; found {', '.join(trained) or 'none'}")
    name = inquiry.stage or next(iter(trained))
    config = trained[name]
    outside = resolve_outside(recipe, chosen_stages(recipe, name), unreachable={})
    return shape_of_stage(recipe, name, outside, Store(store_root()).index()), _workload(config)


def _workload(config: TrainConfig) -> Workload:
    per_step = config.global_batch_size * config.data.sequence_length
    return Workload(
        sequence_length=config.data.sequence_length,
        global_batch_size=config.global_batch_size,
        precision=config.precision,
        method=config.method,
        total_tokens=config.steps * per_step if config.steps else None,
    )


def _of_config(model: str) -> ModelShape:
    """A `config.json`, a folder that has one, or the name of a known model."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if path.is_file():
        try:
            return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, AttributeError) as error:
            raise ModelError(f"reading {path}: {error}; expected a Hugging Face config.json") from error
    known = known_model(model)
    if known is None:
        raise ModelError(
            f"looking for the model {model!r}: no recipe, no config.json, no folder with one, no known model"
        )
    return known
