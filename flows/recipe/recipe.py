"""Reader of recipes: parses YAML text and overrides, and validates the stages, in topological order.

The meaning of fields belongs to the stages' configs; what runs is decided in `plan.py`.
"""

import functools
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from flows.recipe.overrides import apply_overrides
from flows.recipe.problems import MAX_PROBLEMS, explain
from flows.recipe.text import absolute, bad_numbers, closest, read_text, resolve_file_sources, show, tree_of
from stages.core.contract import MAKE_ABSOLUTE, StageConfig, StrictModel
from stages.core.errors import LayoutError, RecipeError
from stages.core.fields import Reference, find_marker, models_in
from stages.core.lines import counted
from stages.core.redaction import shortened
from stages.hubs.fetched import FetchedConfig
from stages.kinds.registry import KINDS
from stages.kinds.train.config import LAYOUT_PROBLEM

MAX_STAGES = 256
MAX_PROBLEM_CHARACTERS = 1000
NAME_PATTERN = r"[a-z0-9][a-z0-9_-]{0,62}"
NAME_RULE = "lower-case letters, digits, - and _"
TOP_LEVEL_FIELDS = ("name", "on_collision", "stages")
OnCollision = Literal["queue", "skip"]
"""Policy for a scheduled refresh while another one holds what it needs: wait (`queue`) or be left out (`skip`)."""

AnyStage: Any = Annotated[functools.reduce(operator.or_, KINDS.values()), Field(discriminator="kind")]


@dataclass(frozen=True)
class Recipe:
    """Validated recipe of one complete refresh, with stages in topological order. Its paths are absolute.

    on_collision: whether a scheduled refresh waits or is left out while another of this recipe runs; `skip` also
    applies while others hold the devices that it needs (with `queue`, its stages wait for them). text: without
    overrides.
    """

    name: str
    folder: Path
    stages: dict[str, StageConfig]
    on_collision: OnCollision = "queue"
    text: str = ""

    @property
    def fetched(self) -> dict[str, FetchedConfig]:
        """Stages that fetch a model or data from outside the store; every chain of references ends at one of them."""
        return {name: config for name, config in self.stages.items() if isinstance(config, FetchedConfig)}

    def upstream_of(self, stage: str) -> tuple[str, ...]:
        """Return the names of the stages that `stage` refers to directly, each once."""
        return tuple(dict.fromkeys(self.stages[stage].references().values()))

    def ancestors_of(self, stage: str) -> tuple[str, ...]:
        """Return the names of all stages that `stage` depends on, directly or not, in topological order."""
        ancestors: set[str] = set()
        todo = [*self.upstream_of(stage)]
        while todo:
            name = todo.pop()
            if name not in ancestors:
                ancestors.add(name)
                todo += self.upstream_of(name)
        return tuple(name for name in self.stages if name in ancestors)

    def dependents_of(self, stage: str) -> tuple[str, ...]:
        """Return the names of all stages that depend on `stage`, directly or not, in topological order."""
        return tuple(name for name in self.stages if stage in self.ancestors_of(name))


def load_recipe(path: Path, overrides: Sequence[str] = (), errors: list[RecipeError] | None = None) -> Recipe:
    """Read a recipe file, apply overrides such as `stages.sft.learning_rate=1e-4`, and validate it.

    errors: where given, takes the error that `load_stages` would raise, and the valid stages are returned. Raises
    `RecipeError` that lists every problem.
    """
    noted: list[RecipeError] | None = None if errors is None else []
    text = read_text(path)
    tree = tree_of(text, path)
    problems = apply_overrides(tree, overrides)
    problems += _top_level_problems(tree)
    try:
        recipe = load_stages(tree.get("name") or path.stem, path.absolute().parent, tree["stages"], problems, noted)
    except RecipeError as error:
        raise type(error)(f"{path}: {error}") from error
    if errors is not None and noted:
        errors += [type(error)(f"{path}: {error}") for error in noted]
    return replace(recipe, on_collision=tree.get("on_collision", recipe.on_collision), text=text)


def load_stages(
    name: str,
    folder: Path,
    tree: Mapping[str, Any],
    problems: Sequence[str] = (),
    errors: list[RecipeError] | None = None,
) -> Recipe:
    """Validate the `stages` block of a recipe whose paths are relative to `folder`.

    problems: those found before, which the error lists too. errors: where given, takes the error, and the valid stages
    are returned that refer to valid ones only. Raises `RecipeError` that lists every problem; `LayoutError` if all are
    of layouts.
    """
    if len(tree) > MAX_STAGES:
        raise RecipeError(f"found {len(tree):,} stages, more than {MAX_STAGES}; split it into several recipes")
    stages: dict[str, StageConfig] = {}
    lines, num_of_layouts = [*problems], 0
    for stage, config in tree.items():
        numbers = [*bad_numbers(config, f"stages.{stage}")]
        if not re.fullmatch(NAME_PATTERN, stage):
            lines.append(f"stages.{stage}: the name of a stage consists of {NAME_RULE}")
        lines += numbers
        try:
            stages[stage] = _read_stage(resolve_file_sources(config, folder), folder)
        except ValidationError as error:
            reported = tuple(f"{problem.partition(': ')[0]}: " for problem in numbers)  # pydantic reports them again
            lines += [
                problem for problem in explain(error, stage, _kind_in(config)) if not problem.startswith(reported)
            ]
            num_of_layouts += sum(details["type"] == LAYOUT_PROBLEM for details in error.errors())
        else:
            lines += _launch_problems(stage, stages[stage])
    lines += islice(_reference_problems(stages, tree), MAX_PROBLEMS)
    # Following references to their end needs every stage to be there and valid.
    lines += [] if lines else _cycles(stages)
    sound = _sound(stages, lines)
    completed = {
        stage: config.completed_among(sound)
        for stage, config in sound.items()
        if not (lines and config.ASKS_ALL_STAGES)
    }
    # Checked against stages completed by what others say, as they will run.
    among = {stage: [*config.problems_among({**sound, **completed})] for stage, config in completed.items()}
    lines += [f"stages.{stage}.{problem}" for stage, of_stage in among.items() for problem in of_stage]
    if lines:
        # A class of its own where layouts are all that is wrong: other devices may be the remedy.
        error_class = LayoutError if num_of_layouts == len(lines) else RecipeError
        all_problems = error_class(_listed(lines))
        if errors is None:
            raise all_problems
        errors.append(all_problems)
        completed = _sound(completed, lines)
    return Recipe(name, folder, {stage: completed[stage] for stage in _topological(completed)})


def _sound(stages: Mapping[str, StageConfig], problems: Sequence[str]) -> dict[str, StageConfig]:
    """Return the stages without problems; stages that depend on a faulty stage or on themselves are left out."""
    sound: dict[str, StageConfig] = {}
    without = [
        name for name in stages if not any(one.startswith((f"stages.{name}.", f"stages.{name}:")) for one in problems)
    ]
    num_before = -1
    # Each round adds stages whose references are all sound; stages in a circle are never added.
    while num_before < len(sound):
        num_before = len(sound)
        sound |= {name: stages[name] for name in without if set(stages[name].references().values()) <= sound.keys()}
    return {name: sound[name] for name in stages if name in sound}


def _listed(problems: Sequence[str]) -> str:
    shown = [f"  {shortened(problem, MAX_PROBLEM_CHARACTERS)}" for problem in problems[:MAX_PROBLEMS]]
    more = ["  …; fix these first"] if len(problems) > MAX_PROBLEMS else []
    return "\n".join([f"the recipe has {counted(len(problems), 'problem')}:", *shown, *more])


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of recipe files, with which editors complete and check recipes."""
    recipe_file = create_model(
        "RecipeFile",
        __base__=StrictModel,
        __doc__="One complete refresh: named stages, which refer to one another by name.",
        name=(
            str,
            Field(
                None,
                pattern=f"^{NAME_PATTERN}$",
                description="Name of the refresh; default: the recipe's file name without suffix.",
            ),
        ),
        on_collision=(
            OnCollision,
            Field(
                "queue",
                description="Policy for a scheduled refresh that is due while another one of this recipe runs: "
                "queue (it waits) or skip (it is left out).",
            ),
        ),
        stages=(dict[str, AnyStage], Field(min_length=1)),
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **recipe_file.model_json_schema()}


def _kind_in(tree: Any) -> type[StageConfig] | None:
    """Return the config class of the kind that a stage's block names; None if it names none, or an unknown one."""
    kind = tree.get("kind") if isinstance(tree, dict) else None
    return KINDS.get(kind) if isinstance(kind, str) else None


def _read_stage(tree: Any, folder: Path) -> StageConfig:
    """Validate a stage's config strictly, so that a number in quotes is no number, and return it.

    As in JSON, a list may stand for a tuple and a text for a path. Paths outside the store become absolute.
    """
    # Pydantic takes 50 ms to build a validator of all kinds: a recipe that is right needs those of its own only.
    read = kind.model_validate_json if (kind := _kind_in(tree)) else TypeAdapter(AnyStage).validate_json
    # Through JSON text, since only for JSON does pydantic's strict mode take a list for a tuple.
    stage: StageConfig = read(
        json.dumps(tree), strict=True, context={MAKE_ABSOLUTE: lambda path: absolute(path, folder)}
    )
    return stage


def _top_level_problems(tree: Mapping[str, Any]) -> Iterator[str]:
    for field in tree:
        if field not in TOP_LEVEL_FIELDS:
            yield f"{field}: unknown field{closest(str(field), TOP_LEVEL_FIELDS)}"
    name = tree.get("name")
    if name is not None and not (isinstance(name, str) and re.fullmatch(NAME_PATTERN, name)):
        yield f"name: found {show(name)}, expected {NAME_RULE}"
    choices = get_args(OnCollision)
    if tree.get("on_collision", choices[0]) not in choices:
        yield f"on_collision: found {show(tree['on_collision'])}, expected {' or '.join(choices)}"


def _launch_problems(stage: str, config: StageConfig) -> Iterator[str]:
    execution, path = config.execution, f"stages.{stage}.execution"
    if execution.nodes > 1 and not execution.options.SPANS_NODES:
        yield f"{path}.nodes: found {execution.nodes}, but the {execution.launcher} launcher has one node only"
    elif execution.nodes > 1 and not config.SPANS_NODES:
        spanning = " or ".join(kind for kind, known in KINDS.items() if known.SPANS_NODES)
        yield f"{path}.nodes: found {execution.nodes}, but only a {spanning} stage spreads over nodes"
    if execution.network_interface and execution.nodes == 1:
        yield f"{path}.network_interface: found {execution.network_interface}, but processes of one node use none"
    if not execution.is_local and config.product == "server":
        yield (
            f"{path}.launcher: found {execution.launcher}, but a server answers on its own machine only; "
            "expected local (an evaluation on a cluster starts its own server)"
        )
    for problem in execution.options.problems(execution.nodes):
        yield f"{path}.{execution.launcher}.{problem}"


def _reference_problems(stages: Mapping[str, StageConfig], tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each reference that names no stage, or a stage that makes the wrong kind of artifact.

    stages: the valid ones. References of the others are read from `tree`, so that all are reported.
    """
    for stage, config in tree.items():
        kind = str(config.get("kind")) if isinstance(config, dict) else None
        for path, reference in _reference_fields(KINDS[kind]) if kind in KINDS else ():
            for place, text in _texts_at(config, path):
                problem = _reference_problem(text, reference, stages, tree)
                yield from [f"stages.{stage}.{place}: {problem}"] if problem else []
        target = stages.get(str(config.get("model"))) if isinstance(config, dict) else None
        if target and target.product == "server" and config.get("serving"):
            yield f"stages.{stage}.serving: {config['model']} is a server and brings its own; remove one of the two"


def _texts_at(tree: object, path: tuple[str, ...], place: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text, or item of a list, at a dotted path of a recipe's tree, with its exact path.

    `*` in the path is any name of a mapping, or any index of a list.
    """
    if path and path[0] == "*" and isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from _texts_at(item, path[1:], f"{place}.{number}")
    elif path and isinstance(tree, dict):
        for name in tree if path[0] == "*" else {path[0]} & tree.keys():
            yield from _texts_at(tree[name], path[1:], f"{place}.{name}" if place else name)
    elif not path:
        yield from ((place, text) for text in (tree if isinstance(tree, list) else [tree]) if isinstance(text, str))


def _reference_problem(
    target: str, reference: Reference, stages: Mapping[str, StageConfig], tree: Mapping[str, Any]
) -> str | None:
    if target not in tree:
        return f"there is no stage `{target}`{closest(target, tree)}"
    if target in stages and stages[target].product not in reference.products:
        block = type(stages[target]).model_fields.get("adapter")
        if reference.products == ("adapter",) and block and models_in(block.annotation):
            return (
                f"{target} has no `adapter:` block, so it trains the whole model; expected an adapter: give it such a "
                "block, or name a stage that has one"
            )
        product, expected = stages[target].product, " or ".join(reference.products)
        found, expected = (f"an {text}" if text[0] == "a" else f"a {text}" for text in (product, expected))
        hint = "; a stage of `kind: merge` makes a model of it" if product == "adapter" else ""
        return f"refers to {target}, which produces {found}; expected {expected}{hint}"
    return None


@functools.cache  # a third of the time in which a recipe of few stages is read
def _reference_fields(model: type[BaseModel]) -> tuple[tuple[tuple[str, ...], Reference], ...]:
    fields = []
    for name, field in model.model_fields.items():
        if reference := find_marker(field, Reference):
            fields.append(((name,), reference))
        # `*` stands for the names of a mapping, or the places of a list.
        given = ("*",) if get_origin(field.annotation) in (dict, tuple) else ()
        for inner in models_in(field.annotation):
            fields += [((name, *given, *path), reference) for path, reference in _reference_fields(inner)]
    return tuple(fields)


def _cycles(stages: Mapping[str, StageConfig]) -> list[str]:
    """Return a problem for each cycle of stage references, such as `a → b → a`."""
    cycles: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def visit(stage: str, trail: list[str]) -> None:
        if stage in trail:
            cycle = trail[trail.index(stage) :]
            # a → b → a and b → a → b are one circle.
            cycles.setdefault(frozenset(cycle), " → ".join([*cycle, stage]))
        elif stage not in done:
            for upstream in stages[stage].references().values():
                visit(upstream, [*trail, stage])
            # Everything below is visited, so no later trail needs to enter here.
            done.add(stage)

    for stage in stages:
        visit(stage, [])
    return [f"stages refer to one another in a circle: {cycle}" for cycle in cycles.values()]


def _topological(stages: Mapping[str, StageConfig]) -> list[str]:
    """Return the stage names in topological order, upstream stages first, otherwise in the recipe's order."""
    order: dict[str, None] = {}

    def visit(stage: str) -> None:
        if stage not in order:
            for upstream in stages[stage].references().values():
                visit(upstream)
            order[stage] = None

    for stage in stages:
        visit(stage)
    return list(order)
