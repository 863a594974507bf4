"""Choice of the layout for `layout: auto`: the one that the planner predicts to be fastest on this machine.

It is chosen before versions are computed, and part of the version: the same machine finds its artifact again; another
machine, or a calibration that changes the choice, trains again.
"""

from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass, replace

from flows.ledger.home import hardware_file
from flows.ledger.machine import gpus, num_cores
from flows.planning.devices import sees_gpus
from flows.planning.model_shape import ModelConfigs, download_of
from flows.recipe.recipe import Recipe
from stages.core.errors import LayoutError, ModelError, ResourceError, TransientError
from stages.kinds.train.config import TrainConfig
from stages.models.shape import ModelShape
from stages.parallel.compiler import missing_compiler
from stages.parallel.layout import ENGINES, AutoLayout
from stages.planner.costs import SearchRequest
from stages.planner.explain import PlannedMedia, planned_media
from stages.planner.hardware import Hardware, hardware_at_hand
from stages.planner.prediction import NUM_ALTERNATIVES, check_memory
from stages.planner.search import Candidate, estimate, fitting_layouts, work_errors

NUM_SHOWN = 3
MUCH_FASTER = 0.9
"""Relative step time below which another engine's layout is mentioned; people choose, as it changes the version."""


@dataclass(frozen=True)
class LayoutChoice:
    """Layout chosen for a stage with `layout: auto`, with its alternatives, best first."""

    stage: str
    candidates: tuple[Candidate, ...]
    media: tuple[PlannedMedia, ...] = ()
    other_engine: Candidate | None = None
    """Best layout of another engine, if it is much faster than the chosen layout; else None."""

    def __str__(self) -> str:
        best, *others = map(_described, self.candidates[:NUM_SHOWN])
        text = f"{self.stage}: layout auto → {best}" + (f"; then {'; '.join(others)}" if others else "")
        text += "".join(f"; {one}" for one in self.media)
        return text + (f"; faster with another `engine`: {_described(self.other_engine)}" if self.other_engine else "")


def choose_layouts(
    recipe: Recipe,
    stages: Collection[str],
    configs: ModelConfigs,
    unreachable: MutableMapping[str, str] | None = None,
    failed: Collection[str] = (),
) -> tuple[Recipe, list[LayoutChoice]]:
    """Return the recipe with each `layout: auto` replaced by a chosen layout, and each choice with its alternatives.

    unreachable: where given, a stage whose model's hub does not answer keeps its `auto`, and is noted with the reason.
    failed: stages with an error of their own; trainings of their models keep their `auto`. Raises LayoutError when no
    layout is legal or fits, ResourceError for a GPU without a description.
    """
    chosen, choices = dict(recipe.stages), []
    for name, config in _trainings(recipe, stages):
        if isinstance(config.layout, AutoLayout):
            download = download_of(recipe, name)
            if download in failed:
                continue
            try:
                shape = configs.shape_of(download)
            except TransientError as error:
                if unreachable is None:
                    raise
                unreachable[name] = f"stages.{name}.layout: auto, which needs the model's sizes: {error}"
                continue
            choice = choose_layout(name, config, shape)
            chosen[name] = config.model_copy(update={"layout": choice.candidates[0].layout})
            choices.append(choice)
    return replace(recipe, stages=chosen), choices


def _trainings(recipe: Recipe, stages: Collection[str]) -> Iterator[tuple[str, TrainConfig]]:
    """Yield those of the stages that train, by name, with their configs."""
    for name, config in recipe.stages.items():
        if name in stages and isinstance(config, TrainConfig):
            yield name, config


def choose_layout(name: str, config: TrainConfig, shape: ModelShape) -> LayoutChoice:
    """Return a stage's fastest layout on this machine, with alternatives.

    Raises LayoutError if none fits, and ResourceError for a GPU that the planner does not know.
    """
    counts, no_compiler = _process_counts(config), missing_compiler(bool(gpus()))
    requests = [
        SearchRequest(
            shape,
            config.workload,
            _hardware(name, count),
            count,
            ENGINES,
            server=config.colocated_server,
            no_compiler=no_compiler,
        )
        for count in counts
    ]
    found = [candidate for request in requests for candidate in fitting_layouts(request)]
    # The search knows the model and the work; some options of a recipe do not go with some degrees.
    candidates = [one for one in found if config.allows(one.engine, one.layout)]
    by_time = sorted(candidates, key=lambda candidate: candidate.time.mean_step_s)
    fastest = [candidate for candidate in by_time if candidate.engine == config.engine]
    if not fastest and (errors := [*work_errors(requests[0], config.engine)]):
        raise LayoutError(f"stages.{name}.layout: auto, but no layout goes with the model: {'; '.join(errors)}")
    if not fastest:
        processes = f"{counts[0]} processes" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} processes"
        other = f"; with another `engine`, {_described(by_time[0])} does" if by_time else ""
        raise LayoutError(
            f"stages.{name}.layout: auto, but no layout of {processes} fits this machine under {config.engine}{other}; "
            "`lifecycle layouts` says by how much"
        )
    # Of this engine's own layouts none is faster than the first, so what is found is another engine's.
    enough_s = MUCH_FASTER * fastest[0].time.mean_step_s
    much_faster = by_time[0] if by_time[0].time.mean_step_s < enough_s else None
    media = tuple(planned_media(shape, config.workload, fastest[0].layout))
    return LayoutChoice(name, tuple(fastest[: 1 + NUM_ALTERNATIVES]), media, much_faster)


def check_shared_devices(recipe: Recipe, will_run: Collection[str], configs: ModelConfigs) -> None:
    """Raise LayoutError for stages whose training and sampling, in turns on this machine's GPUs, do not both fit.

    Stages are left out whose GPUs, or whose model's sizes, are not known yet: they check it when they start.
    """
    problems = []
    for name, config in _trainings(recipe, will_run):
        if not (config.colocated_server and sees_gpus(config)):
            continue
        hardware = hardware_at_hand(gpus()[0], config.processes, hardware_file())
        try:
            shape = configs.shape_of(download_of(recipe, name))
        except (ModelError, TransientError):
            continue
        if hardware is None:
            continue
        world_size, server = config.layout.world_size, config.colocated_server
        request = SearchRequest(shape, config.workload, hardware, world_size, server=server)
        try:
            check_memory(request, estimate(request, config.engine, config.layout), hardware.memory_gib)
        except LayoutError as error:
            problems.append(f"stages.{name}.layout: {error}")
    if problems:
        raise LayoutError("\n".join(problems))


def _described(one: Candidate) -> str:
    return f"{one.text} ({one.time.step_time_s:.3g} s a step, {one.memory.peak_gib:.1f} GiB)"


def _hardware(name: str, processes: int) -> Hardware:
    names = gpus()
    # The first GPU stands for all: one layout for GPUs of several kinds is not planned.
    hardware = hardware_at_hand(names[0] if names else None, processes, hardware_file())
    if hardware is None:
        raise ResourceError(
            f"stages.{name}.layout: auto, but the planner knows no {names[0]}; describe it in {hardware_file()}"
        )
    return hardware


def _process_counts(config: TrainConfig) -> list[int]:
    """Return the numbers of processes to search: the recipe's, all GPUs without a sampler's, or 1 to all cores."""
    execution = config.execution
    if execution.processes:
        return [execution.processes * execution.nodes]
    if not gpus():
        return list(range(1, num_cores() + 1))
    return [max(1, len(gpus()) - config.sampling_devices) * execution.nodes]
