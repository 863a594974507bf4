"""Totals of all refreshes of a lifecycle home by recipe, folded from their ledgers (event logs): each event once.

<home>/metrics.json    the totals, with the number of bytes of each ledger that they contain
<home>/metrics.lock    held while they are brought up to date

A year of ledgers is read once. They never shrink when the retention policy removes a ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.ledger.events import (
    ANY_EVENT,
    AnyEvent,
    AttemptBegan,
    AttemptEnded,
    CompareBegan,
    PromotionDecided,
    RefreshBegan,
    RefreshEnded,
    RefreshKilled,
    StageCached,
    StageFailed,
    StageWaits,
    TrialEnded,
    now_ms,
)
from flows.ledger.home import hardware_file, home
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.record import final_result
from flows.ledger.refreshes import TORN, Ledger, ledgers
from stages.core.approval import PROMOTED, VERDICT_TAG
from stages.core.errors import LifecycleError, StoreError
from stages.core.files import write_atomically
from stages.kinds.promote.verdict import VERDICT_FILE, Verdict
from stages.kinds.registry import makes
from stages.planner.hardware import from_yaml

FILE, LOCK = "metrics.json", "metrics.lock"
SECONDS_PER_HOUR = 3600
DAY_MS = 86_400_000
FORGOTTEN_AFTER_MS = 90 * DAY_MS
"""Milliseconds without an event after which a recipe is forgotten, which ends the alarm about its age."""
LARGEST_VERDICT_BYTES = 1 << 20
RAN_THROUGH = ("completed", "not_promoted", "waiting_for_approval")
"""States of refreshes that ran to their end, promoted or not."""


class Tallied(BaseModel):
    """Base class of the parts of `metrics.json`, which are changed in place while events are folded."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class StageTotals(Tallied):
    """Totals of one stage of a recipe over all refreshes, and the latest values that it gave.

    attempts: by outcome. at_ms: time of the latest values. last_seconds: of the latest finished attempt. margins: by
    gate, positive while it holds. cost: in the currency of the hardware file; 0 while that names no price.
    """

    kind: str
    attempts: dict[str, int] = Field(default_factory=dict)
    seconds: float = 0.0
    waited_s: float = 0.0
    device_seconds: float = 0.0
    cost: float = 0.0
    at_ms: int = 0
    last_seconds: float | None = None
    tokens_per_s: float | None = None
    scores: dict[str, float] = Field(default_factory=dict)
    margins: dict[str, float] = Field(default_factory=dict)


class RecipeTotals(Tallied):
    """Totals of a recipe. refreshes, comparisons: number that ended, by state. The times are 0 before the first.

    last_state, last_end_ms: of the latest refresh that ended.
    """

    at_ms: int = 0
    last_success_ms: int = 0
    last_promotion_ms: int = 0
    last_end_ms: int = 0
    last_state: str = ""
    refreshes: dict[str, int] = Field(default_factory=dict)
    comparisons: dict[str, int] = Field(default_factory=dict)
    stages: dict[str, StageTotals] = Field(default_factory=dict)


class OpenAttempt(Tallied):
    """Attempt whose end is not folded yet."""

    began_ms: int
    num_devices: int


class Cursor(Tallied):
    """Progress in one ledger. num_bytes: folded so far. The other fields hold what a running refresh still needs.

    damaged_bytes: size of the ledger when its next line could not be read. waits: since when stages wait, in
    milliseconds. layout_devices: of a comparison's layouts. is_part: of a refresh that was to stop early.
    """

    num_bytes: int = 0
    damaged_bytes: int | None = None
    recipe: str = ""
    process: ProcessIdentity | None = None
    began_ms: int = 0
    is_part: bool = False
    kinds: dict[str, str] = Field(default_factory=dict)
    waits: dict[str, int] = Field(default_factory=dict)
    attempts: dict[str, OpenAttempt] = Field(default_factory=dict)
    compared_stage: str | None = None
    layout_devices: tuple[int, ...] = ()

    @property
    def is_running(self) -> bool:
        return self.process is not None


class Totals(Tallied):
    """Contents of `metrics.json`: totals by recipe, and the progress in each ledger by its refresh's id."""

    recipes: dict[str, RecipeTotals] = Field(default_factory=dict)
    cursors: dict[str, Cursor] = Field(default_factory=dict)


def read_totals() -> Totals:
    """Return the totals of this lifecycle home, up to date with its ledgers. Raises `StoreError` for a damaged file."""
    folder = home()
    if not folder.is_dir():
        return Totals()
    with FileLock(folder / LOCK, fallback_to_soft=False):
        file = folder / FILE
        try:
            before = file.read_text(encoding="utf-8")
            totals = Totals.model_validate_json(before)
        except FileNotFoundError:
            before, totals = "", Totals()
        except ValueError as error:
            raise StoreError(f"reading {file}: {error}; remove it, and every ledger is read again") from error
        catch_up(totals, price_per_device_second() or 0.0, now_ms())
        text = totals.model_dump_json(exclude_defaults=True)
        if text != before:
            write_atomically(file, text)
    return totals


def price_per_device_second() -> float | None:
    """Return the price of a device second from the hardware file; 0 when it, or its price, is missing; None if damaged.

    A damaged one must not hide everything else that is measured.
    """
    file = hardware_file()
    try:
        price = from_yaml(file).price_per_device_hour if file.is_file() else None
    except LifecycleError:
        return None
    return (price or 0.0) / SECONDS_PER_HOUR


def catch_up(totals: Totals, price_per_s: float, present_ms: int) -> None:
    """Fold into the totals what ledgers have gained, and forget removed ledgers and recipes unused for 90 days."""
    cursors = {}
    for ledger in ledgers():
        name = ledger.folder.name
        cursors[name] = cursor = totals.cursors.get(name) or Cursor()
        try:
            size = ledger.size()
            if size not in (cursor.num_bytes, cursor.damaged_bytes):
                _read_on(ledger, totals, cursor, price_per_s)
        except FileNotFoundError:  # removed meanwhile
            del cursors[name]
    totals.cursors = cursors
    oldest_ms = present_ms - FORGOTTEN_AFTER_MS
    totals.recipes = {name: recipe for name, recipe in totals.recipes.items() if recipe.at_ms >= oldest_ms}


def _read_on(ledger: Ledger, totals: Totals, cursor: Cursor, price_per_s: float) -> None:
    cursor.damaged_bytes = None
    with ledger.file.open("rb") as stream:
        stream.seek(cursor.num_bytes)
        for line in stream:
            if not line.endswith(b"\n"):  # being written, or torn by a crash: the next event tells
                return
            try:
                event = ANY_EVENT.validate_json(line)
            except ValidationError as error:
                if error.errors()[0]["type"] != TORN:
                    # An event of a later version, or damage: named by a metric, and tried again once there is more.
                    cursor.damaged_bytes = ledger.size()
                    return
            else:
                _fold(totals, cursor, event, price_per_s)
            cursor.num_bytes += len(line)


def _fold(totals: Totals, cursor: Cursor, event: AnyEvent, price_per_s: float) -> None:
    if isinstance(event, RefreshBegan):
        cursor.recipe, cursor.process, cursor.began_ms = event.recipe, event.process, event.time_ms
        cursor.is_part = event.until is not None
        cursor.kinds = {name: entry.kind for name, entry in event.stages.items()}
        cursor.waits, cursor.attempts, cursor.compared_stage = {}, {}, None
    recipe = totals.recipes.setdefault(cursor.recipe, RecipeTotals())
    recipe.at_ms = max(recipe.at_ms, event.time_ms)
    match event:
        case CompareBegan():
            cursor.compared_stage = event.stage
            cursor.layout_devices = tuple(layout.num_devices for layout in event.layouts)
        case TrialEnded():
            assert cursor.compared_stage
            device_seconds = cursor.layout_devices[event.layout] * event.seconds
            _spend(_stage(recipe, cursor, cursor.compared_stage), device_seconds, price_per_s)
        case RefreshEnded():
            _end(recipe, cursor, event.state, event.time_ms)
        case PromotionDecided():
            if event.tags.get(VERDICT_TAG) == PROMOTED:
                recipe.last_promotion_ms = max(recipe.last_promotion_ms, event.time_ms)
        case RefreshKilled():
            # Several processes may record a death; and a retry may have begun before it was recorded.
            if cursor.process == event.process:
                _end(recipe, cursor, "killed", event.time_ms)
        case StageWaits() | AttemptBegan() | AttemptEnded() | StageCached() | StageFailed():
            _fold_stage(recipe, cursor, event, price_per_s)


def _fold_stage(
    recipe: RecipeTotals,
    cursor: Cursor,
    event: StageWaits | AttemptBegan | AttemptEnded | StageCached | StageFailed,
    price_per_s: float,
) -> None:
    stage = _stage(recipe, cursor, event.stage)
    if isinstance(event, StageWaits):
        cursor.waits.setdefault(event.stage, event.time_ms)
        return
    since_ms = cursor.waits.pop(event.stage, None)
    stage.waited_s += 0.0 if since_ms is None else (event.time_ms - since_ms) / 1000
    match event:
        case AttemptBegan():
            attempt = OpenAttempt(began_ms=event.time_ms, num_devices=event.num_devices or 0)
            cursor.attempts[f"{event.stage}-{event.number}"] = attempt
        case AttemptEnded():
            begun = cursor.attempts.pop(f"{event.stage}-{event.number}", None)
            if begun is None:  # several processes may close a dead one's ledger: the first end counts
                return
            seconds = (event.time_ms - begun.began_ms) / 1000
            stage.attempts[event.outcome] = stage.attempts.get(event.outcome, 0) + 1
            stage.seconds += seconds
            _spend(stage, begun.num_devices * seconds, price_per_s)
            if event.outcome == "finished":
                if event.time_ms >= stage.at_ms:
                    stage.last_seconds = seconds
                _take_values(stage, event.metrics, event.folder, event.time_ms)
                if event.tags.get(VERDICT_TAG) == PROMOTED:
                    recipe.last_promotion_ms = max(recipe.last_promotion_ms, event.time_ms)
        case StageCached():
            stage.attempts["cached"] = stage.attempts.get("cached", 0) + 1
            _take_values(stage, final_result(event.artifact).metrics, event.artifact, event.time_ms)


def _stage(recipe: RecipeTotals, cursor: Cursor, name: str) -> StageTotals:
    return recipe.stages.setdefault(name, StageTotals(kind=cursor.kinds[name]))


def _spend(stage: StageTotals, device_seconds: float, price_per_s: float) -> None:
    stage.device_seconds += device_seconds
    stage.cost += device_seconds * price_per_s


def _take_values(stage: StageTotals, metrics: Mapping[str, float], folder: Path, time_ms: int) -> None:
    """Keep a stage's scores, speed and gate margins, unless later ones are known."""
    if time_ms < stage.at_ms:
        return
    stage.at_ms = time_ms
    stage.tokens_per_s = metrics.get("tokens_per_s")
    if makes(stage.kind, "scores"):
        stage.scores = {name: value for name, value in metrics.items() if "." in name and not name.endswith("_stderr")}
    stage.margins = _margins(folder / VERDICT_FILE)


def _margins(file: Path) -> dict[str, float]:
    """Return by how much each gate of a verdict holds (negative: is missed); empty for stages without a verdict."""
    try:
        if file.stat().st_size > LARGEST_VERDICT_BYTES:
            return {}
        verdict = Verdict.model_validate_json(file.read_bytes())
    except (OSError, ValueError):  # no promotion, or its artifact is gone; `lifecycle verify` names damage
        return {}
    gates = verdict.gates or ()
    return {gate.name: gate.found - gate.bound if gate.least else gate.bound - gate.found for gate in gates}


def _end(recipe: RecipeTotals, cursor: Cursor, state: str, time_ms: int) -> None:
    counts = recipe.comparisons if cursor.compared_stage else recipe.refreshes
    counts[state] = counts.get(state, 0) + 1
    if not cursor.compared_stage and time_ms >= recipe.last_end_ms:
        recipe.last_end_ms, recipe.last_state = time_ms, state
    if state in RAN_THROUGH and not cursor.compared_stage and not cursor.is_part:
        recipe.last_success_ms = max(recipe.last_success_ms, time_ms)
    # Only what the next lines of a retry do not bring themselves.
    cursor.process, cursor.kinds, cursor.waits, cursor.attempts = None, {}, {}, {}
    cursor.compared_stage, cursor.layout_devices = None, ()
