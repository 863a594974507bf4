"""Preview of a stage's data as the model will see it, before anything is trained (`lifecycle data`).

A process like a stage's prepares it. Data on this machine is copied into the store; other downloads run only on
request, and no other stage runs.
"""

import shlex
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from flows.launch import local
from flows.launch.stage_process import watch
from flows.ledger.home import store_root
from flows.planning.outside import resolve_outside
from flows.planning.plan import Plan, PlannedStage, chosen_stages, plan
from flows.planning.stored import find_stored
from flows.recipe.recipe import load_recipe
from flows.running.runner import BuiltStage, Observer, run_stage
from flows.running.validation import COMES_FROM, input_of
from flows.store.record import Index
from flows.store.store import Store
from stages.core.contract import Execution, StageInput
from stages.core.errors import RecipeError, StoreError
from stages.core.files import write_atomically
from stages.data.summaries import DataLook
from stages.hubs.fetched import FetchedConfig
from stages.hubs.files import requested_files
from stages.hubs.registry import HUBS
from stages.kinds.look.config import LOOK_FILE, LookConfig

LARGE_BYTES = 1 << 30
"""Most bytes of local files that `lifecycle data` copies, in seconds, without the option `--download`."""


@dataclass(frozen=True)
class LookRequest:
    """Arguments of `lifecycle data`. downloads: whether inputs that are not on this machine may be fetched."""

    recipe: Path
    stage: str
    overrides: Sequence[str] = ()
    num_rows: int = 5
    downloads: bool = False


def look_at_data(request: LookRequest, observer: Observer) -> DataLook:
    """Return a preview of a stage's data as the model will see it. observer: follows the downloads for it.

    Raises RecipeError for a stage without data, StoreError for data or a tokenizer that are not there yet (it says what
    to run), and what the download and the preparation of the data raise.
    """
    store = Store(store_root())
    index = store.index()
    planned = _planned(request, index)
    stage = planned.stages[request.stage]
    built: dict[str, BuiltStage] = {}
    for name in _needed(stage, planned):
        built[name] = _built(name, planned, request, index, store, observer)
    with tempfile.TemporaryDirectory(dir=store.make_folder(store.root / ".work" / "look")) as folder:
        stage_input = input_of(stage, planned.stages, built, store, Path(folder))
        assert stage_input, "all that it needs has been built"
        return _look(stage_input, stage, request.num_rows, Path(folder) / "look")


def _planned(request: LookRequest, index: Index) -> Plan:
    recipe = load_recipe(request.recipe, request.overrides)
    chosen = chosen_stages(recipe, request.stage)
    kind = recipe.stages[request.stage].kind
    if find_spec(f"stages.kinds.{kind}.look") is None:
        with_data = [name for name, config in recipe.stages.items() if find_spec(f"stages.kinds.{config.kind}.look")]
        raise RecipeError(
            f"looking at the data of `{request.stage}`: a stage of kind {kind} has none to look at; "
            f"expected {', '.join(with_data) or 'a stage that trains or generates'}"
        )
    recipe, _ = find_stored(recipe, chosen, index)
    unreachable: dict[str, str] = {}
    outside = resolve_outside(recipe, chosen, unreachable)
    return plan(recipe, outside, index, until=request.stage, unreachable=unreachable)


def _needed(stage: PlannedStage, planned: Plan) -> Iterator[str]:
    """Yield the upstream stages that a preview needs: datasets, and the nearest existing model with its tokenizer."""
    for name in stage.upstream:
        config = planned.stages[name].config
        while config.product in ("server", "adapter", "model") and not _is_there(name, planned):
            references = config.references()
            before = next((references[field] for field in COMES_FROM if field in references), None)
            if before is None:
                break
            name, config = before, planned.stages[before].config
        yield name


def _is_there(name: str, planned: Plan) -> bool:
    return planned.stages[name].action == "cached" and planned.stages[name].config.product == "model"


def _built(
    name: str, planned: Plan, request: LookRequest, index: Index, store: Store, observer: Observer
) -> BuiltStage:
    stage = planned.stages[name]
    artifact = index.find(stage.kind, stage.version) if stage.action == "cached" else None
    if artifact:
        record = artifact.record
        return BuiltStage(record.stage, record.kind, record.version, "cached", 0.0, artifact.folder, record)
    download = stage.config if isinstance(stage.config, FetchedConfig) else None
    if download and download.product != "adapter" and (request.downloads or _is_at_hand(download)):
        return run_stage(stage, {}, store, observer)
    why = planned.unknown.get(name, "it is not in the store")
    source = f" ({download.source})" if download else ""
    remedy = "add `--download`, or run" if source else "first run"
    options = "".join(f" --set {shlex.quote(one)}" for one in request.overrides)
    raise StoreError(
        f"looking at the data of {request.stage}: it needs {name}{source}, and {why}; {remedy} "
        f"`lifecycle run {request.recipe} --until {name}{options}`"
    )


def _is_at_hand(config: FetchedConfig) -> bool:
    hub = HUBS[config.source.hub]
    if not hub.is_local:
        return hub.is_offline
    return sum(path.stat().st_size for path in requested_files(config.request).values()) <= LARGE_BYTES


def _look(stage_input: StageInput, stage: PlannedStage, num_rows: int, work: Path) -> DataLook:
    """Return the preview of a stage's data, prepared by a process on this machine, wherever the stage will run."""
    execution = Execution(environment=stage.config.execution.environment)
    config = LookConfig(stage=stage_input, num_rows=num_rows, execution=execution)
    work.mkdir()
    planned = PlannedStage(
        "", "the look at data", config.kind, "", "", {}, config, upstream=(), ancestors=(), action="run", reason=""
    )
    own_input = StageInput(
        name=planned.name,
        kind=config.kind,
        version="",
        config=config.model_dump(mode="json", exclude={"execution"}),
        inputs={},
        cache=stage_input.cache,
    )
    write_atomically(work / "config.json", own_input.model_dump_json(indent=2))
    watch(local.start(work, config), planned, work, lambda: None, threading.Event())
    return DataLook.model_validate_json((work / LOOK_FILE).read_bytes())
