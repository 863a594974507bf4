"""Check of stages' inputs (data, templates, …) once the downloads are there, before any stage trains.

A process like a stage's does the check (`stages/kinds/check`): the orchestrator reads no data. What it does not find,
for lack of time or because another stage has yet to make the data, the stage itself finds when its turn comes.
"""

import shutil
import threading
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from flows.launch.stage_process import watch
from flows.planning.plan import PlannedStage
from flows.running.runner import BuiltStage, Launcher
from flows.store.store import Store
from stages.core.contract import Execution, StageInput
from stages.core.errors import StageTimeoutError
from stages.core.files import write_atomically
from stages.kinds.check.config import FINDINGS_FILE, CheckConfig, Findings

TIMEOUT_S = 300.0
CHAT_TEMPLATE_FILE = "chat_template.jinja"
COMES_FROM = ("adapter", "adapters.0", "model", "base")
"""Config fields that name the model or adapter from which a stage's model is made; the first that is set counts."""


def input_findings(
    stages: Mapping[str, PlannedStage],
    built: Mapping[str, BuiltStage],
    store: Store,
    folder: Path,
    launch: Launcher,
    stop: threading.Event,
) -> Iterator[Findings]:
    """Check the inputs (data, chat templates, …) of the stages that will run, and yield the problems.

    Inputs that neither exist nor can be derived yet are not checked. folder: for the work of the check; removed
    afterwards. Raises what `watch` raises when the check itself fails or is stopped.
    """
    will_run = [stage for stage in stages.values() if stage.action == "run" and stage.name not in built]
    waiting = [stage for stage in will_run if stage.config.HAS_CHECK]
    inputs = [one for stage in waiting if (one := input_of(stage, stages, built, store, folder))]

    def environment(stage_input: StageInput) -> list[tuple[str, str]]:
        return sorted(stages[stage_input.name].config.execution.environment.items())

    try:
        # One process for all stages that have the same environment variables.
        for variables, group in groupby(sorted(inputs, key=environment), key=environment):
            execution = Execution(environment=dict(variables), timeout_s=TIMEOUT_S)
            config = CheckConfig(stages=tuple(group), execution=execution)
            yield _run(config, store, folder, launch, stop)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(config: CheckConfig, store: Store, folder: Path, launch: Launcher, stop: threading.Event) -> Findings:
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    planned = PlannedStage(
        "", "the check of inputs", config.kind, "", "", {}, config, upstream=(), ancestors=(), action="run", reason=""
    )
    cache = store.make_folder(store.cache_folder(config.kind))
    dumped = config.model_dump(mode="json", exclude={"execution"})
    stage_input = StageInput(name=planned.name, kind=config.kind, version="", config=dumped, inputs={}, cache=cache)
    write_atomically(work / "config.json", stage_input.model_dump_json(indent=2))
    try:
        watch(launch(work, config), planned, work, lambda: None, stop)
    except StageTimeoutError:
        if not (work / FINDINGS_FILE).exists():
            raise
    return Findings.model_validate_json((work / FINDINGS_FILE).read_bytes())


def input_of(
    stage: PlannedStage, stages: Mapping[str, PlannedStage], built: Mapping[str, BuiltStage], store: Store, folder: Path
) -> StageInput | None:
    """Return the input for a stage's check before it runs, with the nearest existing ancestor of a model.

    None while data that the stage needs is not made, or no ancestor of its model exists.
    """
    inputs = {}
    for name in stage.upstream:
        if name in built:
            inputs[name] = built[name].artifact
        elif made_from := _made_from(name, stages, built, folder):
            inputs[name] = made_from
        else:
            return None
    return StageInput(
        name=stage.name,
        kind=stage.kind,
        version=stage.version,
        config=stage.config.model_dump(mode="json", exclude={"execution": {"environment"}}),
        inputs=inputs,
        cache=store.make_folder(store.cache_folder(stage.kind)),
    )


def _made_from(
    name: str, stages: Mapping[str, PlannedStage], built: Mapping[str, BuiltStage], folder: Path
) -> Path | None:
    """Return the folder of the nearest existing model from which a stage's model or server derives, or None.

    It has the same tokenizer and, unless a stage on the way brings its own, the same chat template. An adapter is no
    model, and data that a model will generate does not exist yet.
    """
    if stages[name].config.product == "dataset":
        return None
    template: Path | None = None
    ancestor: str | None = name
    while ancestor and (ancestor not in built or stages[ancestor].config.product == "adapter"):
        config = stages[ancestor].config
        template = template or config.own_chat_template
        references = config.references()
        ancestor = next((references[field] for field in COMES_FROM if field in references), None)
    if ancestor is None or not template:
        return built[ancestor].artifact if ancestor else None
    return _with_template(built[ancestor].artifact, template, folder / "models" / name)


def _with_template(artifact: Path, template: Path, folder: Path) -> Path:
    """Return a copy of a model's artifact folder with another chat template, in which all other files are links."""
    model = folder / "model"
    if not model.exists():
        model.mkdir(parents=True)
        for path in (artifact / "model").iterdir():
            if path.name != CHAT_TEMPLATE_FILE:
                (model / path.name).symlink_to(path)
        shutil.copyfile(template, model / CHAT_TEMPLATE_FILE)
    return folder
