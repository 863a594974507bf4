"""Contract of a stage: its config in a recipe, and the files that its process reads and writes.

Every stage kind subclasses `StageConfig` (in `stages/kinds/<kind>/config.py`, light: pydantic and the standard library
only) and has a function `run(config, context) -> StageResult` (in `stages/kinds/<kind>/run.py`; where that module has
`prepare_process()`, a stage's process calls it first). The orchestrator starts `python -m stages WORK_FOLDER`; the two
share nothing but the files of that folder:

    config.json     in   the stage's config, the artifacts it builds on, where its caches are (`StageInput`)
    metrics.jsonl   out  one JSON object a line: "step", "time_ms" and numbers by metric name
    events.jsonl    out  one JSON object a line: progress, milestones, warnings (`StageEvent`)
    result.json     out  the final metrics (`StageResult`), written last; names what the stage refuses its artifact for
    error.json      out  the error class and message of a failed stage (`StageFailure`)
    scratch/             kept across retries (checkpoints), removed when the artifact is committed

Everything else in the folder is the artifact: a model lies in `model/` (a Hugging Face folder), an adapter in
`adapter/` (PEFT's files), a dataset in `data/`.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, JsonValue, PositiveInt, ValidationInfo, field_validator

from stages.core.errors import LifecycleError, class_name, error_classes
from stages.core.fields import (
    OutsideInput,
    Product,
    Reference,
    Seconds,
    StrictModel,
    marked_values,
    unset_later,
    values_named,
    without,
)
from stages.core.launchers.registry import BLOCKS, LauncherBlocks
from stages.core.metric_series import METRICS_FILE
from stages.core.redaction import redact

AdapterReference = Annotated[str, Reference(("adapter",))]
ModelReference = Annotated[str, Reference(("model",))]
ModelOrAdapterReference = Annotated[str, Reference(("model", "adapter"))]
DatasetReference = Annotated[str, Reference(("dataset",))]
ServableReference = Annotated[str, Reference(("model", "adapter", "server"))]
ServerReference = Annotated[str, Reference(("server",))]
ScoresReference = Annotated[str, Reference(("scores",))]
Relation = Literal["finetune", "merge", "quantized"]
"""Relation of a model to the one that it is made from, in the words of model cards on the Hugging Face hub."""
NetworkInterface = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,14}$")]
"""Name of a network interface as Linux allows it."""
T = TypeVar("T")
MAKE_ABSOLUTE = "make_absolute"
"""Key in the validation context: a function that makes a relative path absolute when a recipe is read."""


def _made_absolute(path: Path, info: ValidationInfo) -> Path:
    make_absolute: Callable[[Path], Path] | None = (info.context or {}).get(MAKE_ABSOLUTE)
    return make_absolute(path) if make_absolute else path


OutsidePath = Annotated[Path, OutsideInput(), AfterValidator(_made_absolute)]
LINE_EVERY_S = 60.0
"""Seconds between lines on progress in a stage's log."""
FINDING = "finding"
"""Tag of an artifact that its own stage judged unusable: `ERROR_CLASS: MESSAGE`."""


class Execution(LauncherBlocks):
    """Execution options of a stage, such as where it runs and how often it is tried; never part of its identity."""

    nodes: PositiveInt = Field(1, description="Number of machines; more than one only for training on a cluster.")
    network_interface: NetworkInterface | None = Field(
        None, description="Network interface of each of several nodes, such as ib0; processes use no other."
    )
    threads: PositiveInt | None = Field(None, description="Threads of each process; default: the cores shared evenly.")
    slots: PositiveInt | None = Field(None, description="Device slots held while the stage runs; default: its devices.")
    timeout_s: Seconds | None = Field(None, description="Time limit of the stage in seconds; it is stopped after that.")
    retries: int = Field(
        2, ge=0, le=1000, description="Number of retries after a transient error or the death of a process."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables added to the process's environment."
    )

    def problems_here(self) -> Iterator[str]:
        """Yield `FIELD: PROBLEM` for each field of a stage's config that this machine does not allow."""
        return iter(())

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not name or "=" in name or "\0" in name:
                raise ValueError(
                    f"{name!r} is no name of a variable; expected one that is not empty, without = and NUL"
                )
            if "\0" in value:
                raise ValueError(f"the value of {name} holds a NUL, which no variable can")
        return environment


@dataclass(frozen=True)
class Reported:
    """Parts of a kind's final metrics and files that reports show in tables and charts, beside the list of all metrics.

    - measured: metric of the run, such as its speed → heading of its column
    - under_load: METRIC of the metrics `METRIC_concurrency_N` → heading of its column
    - counts_data: whether metrics named like a count say what the stage read, made or left out
    - not_data: metrics that are named like such a count, and are none
    - curves: whether `metrics.jsonl` shows how the stage learns, step by step
    """

    measured: Mapping[str, str] = dataclass_field(default_factory=dict)
    under_load: Mapping[str, str] = dataclass_field(default_factory=dict)
    counts_data: bool = False
    not_data: tuple[str, ...] = ()
    curves: bool = False


@dataclass(frozen=True)
class ModelAtHand:
    """Model whose config a plan finds on this machine.

    - source: address that it is downloaded from
    - config: content of its `config.json`
    - folder: its files at their source, where all of them are downloaded from this machine
    """

    source: str
    config: Mapping[str, Any]
    folder: Path | None


class StageConfig(StrictModel, ABC):
    """Config of a stage. All of it is identity, except `execution`."""

    STAGE_VERSION: ClassVar[int]
    """Version of the stage's code; raised when the same config would give another artifact than before."""
    HAS_CHECK: ClassVar[bool] = False
    """True if `stages/kinds/<kind>/check.py` checks the stage's inputs before it runs."""
    LESS_MEMORY: ClassVar[str] = "raise its execution.slots, so that less runs beside it"
    """Advice when the kernel kills the stage for lack of memory."""
    PRODUCTS: ClassVar[tuple[Product, ...]] = ()
    """Products that stages of a kind may have, such as a model or a dataset."""
    REPORTED: ClassVar[Reported] = Reported()
    """Metrics and charts that reports show of the kind's stages."""
    RELATION: ClassVar[Relation | None] = None
    """Relation of the stage's model to the one that it is made from; None if it makes no model of another."""
    LEARNS: ClassVar[bool] = False
    """True if the stage's model learns from the datasets that the stage refers to."""
    SPANS_NODES: ClassVar[bool] = False
    """True if the stage's processes may spread over several nodes."""
    WAITS_FOR_GPUS: ClassVar[bool] = True
    """False if the stage may start while every GPU is taken, and needs none."""
    GPU_FOR_EACH_PROCESS: ClassVar[bool] = False
    """True if each process takes a GPU of its own, however many slots the stage holds."""

    kind: str
    execution: Execution = Execution()

    @property
    def product(self) -> Product:
        """Product of the stage, as other stages may use it."""
        (only,) = self.PRODUCTS
        return only

    @property
    def own_chat_template(self) -> Path | None:
        """Chat template of the model that the stage makes, where it differs from that of the model it starts from."""
        return None

    @property
    def processes(self) -> int:
        """Number of processes on each node."""
        return 1

    @property
    def devices(self) -> int:
        """GPUs, or shares of the CPU, that the stage keeps busy on each node."""
        return self.processes

    def identity(self) -> dict[str, JsonValue]:
        """Return the config with defaults, without `execution`, references, outside paths and unset later fields.

        The versions of the referenced stages and the contents of the paths stand in for references and paths.
        """
        skipped = {path for path, _ in marked_values(self, Reference)}
        skipped |= {path for path, _ in marked_values(self, OutsideInput)}
        skipped |= set(unset_later(self))
        return without(self.model_dump(mode="json", exclude={"execution"}), skipped)

    def progress_kept(self, scratch: Path) -> int:
        """Return the progress that a stage's scratch folder keeps for another attempt, in any unit; 0 if unknown."""
        return 0

    def resume_identity(self) -> dict[str, JsonValue]:
        """Return the part of the identity that an interrupted attempt must share to reuse its scratch folder."""
        return self.identity()

    def references(self) -> dict[str, str]:
        """Return dotted path of a config's field → name of the stage that it refers to."""
        return {path: str(value) for path, value in marked_values(self, Reference)}

    def outside_paths(self) -> dict[str, Path]:
        """Return dotted path of a config's field → path outside the store."""
        return {path: Path(value) for path, value in marked_values(self, OutsideInput)}

    ASKS_ALL_STAGES: ClassVar[bool] = False
    """True if `completed_among` looks at other stages than those that the config refers to."""

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        """Return a stage's config completed with facts from the other stages of its recipe."""
        return self

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        """Yield problems between a stage and the others of its recipe, beyond what `Reference` checks; one line
        each.
        """
        return iter(())

    def planned_problems(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        """Yield further problems of a stage among the others of its recipe, as `FIELD: PROBLEM`.

        For checks that read files, such as those of tasks: a plan makes them, not every reading of the recipe.
        """
        return iter(())

    def model_problems(self, read_config: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
        """Yield problems of the config with the model that the stage starts from, as `FIELD: PROBLEM`.

        read_config: returns the model's `config.json`, empty where it cannot be known yet; it may ask a hub. Raises
        LifecycleError for a config that the download, or the check of its files, will refuse.
        """
        return iter(())

    def model_findings(
        self, find_model: Callable[[], ModelAtHand | None], gpu_type: str | None
    ) -> Iterator[tuple[str, LifecycleError | str]]:
        """Yield dotted field and error of each problem with files on this machine, as a plan is made; a text is a note.

        - find_model: returns the model that the stage starts from; None where its config is not here. Raises
          LifecycleError for a config that cannot be read
        - gpu_type: torch's name for the kind of this machine's GPUs; None for a stage that does not run on them
        """
        return iter(())

    def first_problems(
        self, find_model: Callable[[], Path | None], find_dataset: Callable[[str], Path | None]
    ) -> Iterator[str]:
        """Yield problems that headers and first rows on this machine show before a run, as `FIELD: PROBLEM`.

        - find_model: returns the folder of the model that the stage starts from; None where it is not here
        - find_dataset: returns the folder, or the only file, of the dataset of a stage
        """
        return iter(())

    def target_problems(self, store: Path) -> Iterator[str]:
        """Yield problems of the place outside the store that a stage writes to, as `FIELD: PROBLEM`.

        Reads the environment and looks at folders of this machine; asks no server.
        """
        return iter(())

    def to_install(self) -> str | None:
        """Return the packages that a stage installs before it runs, and their size; None if everything is there.

        Raises ResourceError where it cannot be installed.
        """
        return None

    def hint_for(self, recipe_folder: Path) -> str | None:
        """Return the file beside the recipe that is meant by a name that a stage cannot resolve, if there is one."""
        return None

    def device_roles(self, variable: str, devices: Sequence[str]) -> str | None:
        """Return how devices are divided in a stage whose devices have different roles; None for other stages.

        devices: those that the recipe names by this variable, empty if it names none.
        """
        return None

    def missing_here(self, gpus: Sequence[str]) -> Iterator[str]:
        """Yield requirements of a stage that a machine with GPUs of these names lacks."""
        return iter(())

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        """Yield dotted path and reason of each config field that has no effect given the other fields, set or not."""
        execution, is_server = self.execution, self.product == "server"
        for name, options in BLOCKS.items():
            if not isinstance(execution.options, options) and not (is_server and options.DESCRIBES_SERVERS):
                yield f"execution.{name}", f"the launcher is {execution.launcher}"

    def custom_code(self) -> tuple[str, ...]:
        """Return options that make the stage run or keep code from outside, such as `serving.trust_…`."""
        trusted = (path for path, value in values_named(self, "trust_remote_code") if value)
        return tuple(f"{path}: Python files that come with the model" for path in trusted)

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return facts outside the store that decide a stage's result: resolved revisions, versions of programs.

        May ask the network; with limit_s once, for this long. Raises a `LifecycleError` for what cannot be resolved.
        """
        return {}


def base_of(name: str, stages: Mapping[str, StageConfig]) -> str:
    """Return the stage whose model an adapter belongs to, maybe through adapters that it continues; else the model's
    own.
    """
    while stages[name].product == "adapter":
        name = nearest_base(stages[name].references())
    return name


def nearest_base(by_field: Mapping[str, T]) -> T:
    """Return the field of an adapter's nearest reference: its base, or else the stage that it was trained on."""
    return by_field.get("base") or by_field["model"]


class Lease(StrictModel):
    """Server that a serve stage keeps running for the stages of the same refresh. Its API key is in the environment."""

    url: str
    pid: int


class Trial(StrictModel):
    """Trial run of a stage for measurements: its first steps, without saving anything or making an artifact.

    Not part of a config: a recipe cannot ask for it, so it can enter no version and no store.
    """

    steps: PositiveInt = Field(description="Number of steps of a trial run, whatever the config says.")


class StageInput(StrictModel):
    """Content of `config.json`: everything that a stage process gets."""

    name: str
    kind: str
    version: str
    config: dict[str, JsonValue]
    inputs: dict[str, Path] = Field(description="stage name → folder of its artifact")
    leases: dict[str, Lease] = Field(default_factory=dict, description="stage name → its running server")
    outside: dict[str, JsonValue] = Field(
        default_factory=dict, description="facts outside the store, resolved when the stage's version was computed"
    )
    trial: Trial | None = Field(None, description="options of a trial run, set when the stage is only to be measured")
    warnings: tuple[str, ...] = Field((), description="warnings of the flow about the inputs, repeated by the stage")
    cache: Path = Field(
        description="cache folder kept between runs; entries are keyed by content and written atomically"
    )


class StageEvent(StrictModel):
    """Line of `events.jsonl`."""

    time_ms: int
    event: Literal["progress", "milestone", "warning"]
    message: str
    done: float | None = None
    total: float | None = None
    unit: str | None = None


class StageResult(StrictModel):
    """Content of `result.json`: metrics, tags and findings of a stage that succeeded.

    Metrics and tags go to MLflow; `files` are uploaded there, with paths relative to the work folder. The first few
    metrics are shown to people. With a `lease` the artifact is complete although the process goes on, as a server,
    until it is stopped.
    """

    metrics: dict[str, float] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    files: list[str] = Field(default_factory=list)
    lease: Lease | None = None

    def refused_for(self, findings: Sequence[LifecycleError]) -> Self:
        """Return a stage's result with findings against it as a tag; the first finding's class stands for all."""
        if not findings:
            return self
        messages = "\n".join(dict.fromkeys(map(str, findings)))
        return self.model_copy(update={"tags": {**self.tags, FINDING: f"{class_name(findings[0])}: {messages}"}})


def finding_of(tags: Mapping[str, str]) -> LifecycleError | None:
    """Return why the stage that made an artifact refuses it, by the artifact's tags; None for a good artifact."""
    if FINDING not in tags:
        return None
    name, _, message = tags[FINDING].partition(": ")
    return error_classes().get(name, LifecycleError)(message)


class StageFailure(StrictModel):
    """Content of `error.json`: class and message of the error that ended a stage."""

    error: str = Field(description="name of the error class")
    message: str
    died: bool = Field(
        False, description="whether a signal that no one requested ended a process (`died` of the `LifecycleError`)"
    )

    @classmethod
    def of(cls, error: Exception) -> StageFailure:
        """Return the failure record of the error that ended a stage."""
        died = isinstance(error, LifecycleError) and error.died
        return cls(error=class_name(error), message=redact(str(error)), died=died)


@dataclass
class ProgressLines:
    """Lines on a stage's progress for its log, at most one a minute."""

    began: tuple[float, float] | None = None
    """Time in seconds and amount done at the beginning of a stage's progress: a resumed attempt does not begin at 0."""
    last_line_s: float = 0.0

    def line(self, now_s: float, done: float, total: float, unit: str, message: str) -> str | None:
        """Return the due line of progress, such as `120 of 600 steps, loss 0.31, 1:57 left`; None between two lines."""
        if self.began is None or done < self.began[1]:
            self.began, self.last_line_s = (now_s, done), now_s
        if now_s - self.last_line_s < LINE_EVERY_S:
            return None
        self.last_line_s = now_s
        began_s, first_done = self.began
        left = ""
        if done > first_done:
            left_s = round((total - done) / (done - first_done) * (now_s - began_s))
            left = f"{timedelta(seconds=left_s)} left"
        parts = [f"{done:,.0f} of {total:,.0f} {unit}".rstrip(), message, left]
        return f"{time.strftime('%H:%M:%S')} {', '.join(filter(None, parts))}"


@dataclass(frozen=True)
class StageContext:
    """Work folder as a stage process sees it. Only rank 0 of several processes writes the shared files."""

    work: Path
    name: str
    version: str
    inputs: dict[str, Path]
    leases: dict[str, Lease]
    cache: Path
    outside: dict[str, JsonValue] = dataclass_field(default_factory=dict)
    trial: Trial | None = None
    findings: list[LifecycleError] = dataclass_field(default_factory=list)
    progress_lines: ProgressLines = dataclass_field(default_factory=ProgressLines)

    @property
    def scratch(self) -> Path:
        """Scratch folder that is kept across retries of a stage, and removed when its artifact is committed."""
        folder = self.work / "scratch"
        folder.mkdir(exist_ok=True)
        return folder

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line to `metrics.jsonl`; a step may be logged again after a resume, the first one counts."""
        self._append(METRICS_FILE, {"step": step, "time_ms": time.time_ns() // 1_000_000, **metrics})

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None:
        """Report a stage's progress, and once a minute in its log; cheap enough to call every 100 milliseconds."""
        self._event("progress", message, done=done, total=total, unit=unit)
        line = self.progress_lines.line(time.monotonic(), done, total, unit, redact(message))
        if line and is_main_process():
            print(line, flush=True)

    def doing(self, message: str) -> None:
        """Report a stage's current activity where its duration is unknown; shown instead of progress."""
        self._event("progress", message)

    def milestone(self, message: str) -> None:
        """Report an event that people who watch the refresh want to know."""
        self._event("milestone", message)

    def warn(self, message: str) -> None:
        """Report a warning of a stage: not an error, but something to look at."""
        self._event("warning", message)

    def refuse(self, finding: LifecycleError) -> None:
        """Mark a stage's result as unusable: it is kept, but no other stage may use it.

        For checks at the end of slow work, whose result would be lost by raising: the artifact is committed with the
        finding as a tag, the refresh fails with it, and later runs repeat that instead of the work. To be called by
        rank 0, or by all ranks, with what lies whole in the work folder.
        """
        self.findings.append(finding)
        if is_main_process():
            print(f"finding: {finding}", flush=True)

    def _event(self, event: Literal["progress", "milestone", "warning"], message: str, **amounts: Any) -> None:
        now_ms = time.time_ns() // 1_000_000
        line = StageEvent(time_ms=now_ms, event=event, message=redact(message), **amounts)
        self._append("events.jsonl", line.model_dump(exclude_none=True))
        if event != "progress":
            print(f"{event}: {line.message}", flush=True)

    def _append(self, file: str, row: dict[str, Any]) -> None:
        if is_main_process():
            with (self.work / file).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")


def is_main_process() -> bool:
    """Return whether this is rank 0, or the only process of its stage."""
    return os.environ.get("RANK", "0") == "0"
