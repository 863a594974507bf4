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
from stages.core.lines import print_line
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
"""Relation of a model to the model that it was made from, in the words of the Hugging Face hub's model cards."""
NetworkInterface = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,14}$")]
"""Name of a network interface as Linux allows it, such as ib0."""
T = TypeVar("T")
MAKE_ABSOLUTE = "make_absolute"
"""Key in pydantic's validation context for the function that makes a recipe's relative paths absolute."""


def _made_absolute(path: Path, info: ValidationInfo) -> Path:
    make_absolute: Callable[[Path], Path] | None = (info.context or {}).get(MAKE_ABSOLUTE)
    return make_absolute(path) if make_absolute else path


OutsidePath = Annotated[Path, OutsideInput(), AfterValidator(_made_absolute)]
LINE_EVERY_S = 60.0
"""Seconds between lines about a stage's progress in its log."""
SYNCED_WEIGHTS = "weights"
"""Folder in a stage's scratch folder through which weights reach a sampling server; no other attempt reads them."""
FINDING_TAG = "finding"
"""Tag of an artifact that its own stage found to be unusable; its value is `ERROR_CLASS: MESSAGE`."""


class Execution(LauncherBlocks):
    """Options of a stage about where and how it runs, which do not identify its artifact: launcher, retries, limits."""

    nodes: PositiveInt = Field(
        1, description="Number of machines; more than one only for training or curation on a cluster. Default 1."
    )
    network_interface: NetworkInterface | None = Field(
        None,
        description="Network interface, such as ib0, between nodes' processes; default: chosen by the libraries.",
    )
    threads: PositiveInt | None = Field(
        None,
        description="Number of CPU threads of each process; default: the cores divided evenly among the processes.",
    )
    slots: PositiveInt | None = Field(
        None,
        description="Device slots (GPUs, or shares of the CPU) held; default: as many as the stage keeps busy.",
    )
    timeout_s: Seconds | None = Field(
        None, description="Time limit of the stage in seconds, after which it is stopped; default: none."
    )
    retries: int = Field(
        2,
        ge=0,
        le=1000,
        description="Number of further attempts after a transient error or the death of a process; default 2.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Environment variables added to those of the stage's processes."
    )

    def problems_here(self) -> Iterator[str]:
        """Yield `FIELD: PROBLEM` for each execution option that this machine cannot satisfy."""
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
    """Choice, for one kind of stage, of the metrics and files that reports show in tables and charts.

    measured: metric of the run → heading. under_load: METRIC of `METRIC_concurrency_N` → heading. counts_data: whether
    metrics named like a count say what the stage read, made or left out. not_data: those named so that are none.
    curves: whether `metrics.jsonl` shows how the stage learns, step by step.
    """

    measured: Mapping[str, str] = dataclass_field(default_factory=dict)
    under_load: Mapping[str, str] = dataclass_field(default_factory=dict)
    counts_data: bool = False
    not_data: tuple[str, ...] = ()
    curves: bool = False


@dataclass(frozen=True)
class ModelAtHand:
    """Config of a model that is on this machine when a refresh is planned, before any download.

    source: address that it is downloaded from. folder: its files, where all of them are downloaded from this machine.
    """

    source: str
    config: Mapping[str, Any]
    folder: Path | None


class StageConfig(StrictModel, ABC):
    """Base class of all stage kinds' configs; every field except `execution` identifies the stage's artifact."""

    STAGE_VERSION: ClassVar[int]
    """Version of the stage kind's code, raised when the same config would give another artifact than before."""
    HAS_CHECK: ClassVar[bool] = False
    """True if `stages/kinds/<kind>/check.py` exists, which checks the stage's inputs before it runs."""
    LESS_MEMORY: ClassVar[str] = "raise its execution.slots, so that less runs beside it"
    """Advice for the user when the kernel kills the stage for lack of memory."""
    PRODUCTS: ClassVar[tuple[Product, ...]] = ()
    """Kinds of output that stages of this kind can have, such as a model or a dataset."""
    REPORTED: ClassVar[Reported] = Reported()
    """Choice of this stage kind's metrics and charts that reports show."""
    RELATION: ClassVar[Relation | None] = None
    """Relation of the stage's model to the one it was made from, for model cards, or None."""
    LEARNS: ClassVar[bool] = False
    """True if this kind of stage trains a model on the datasets that its config refers to."""
    SPANS_NODES: ClassVar[bool] = False
    """True if this kind of stage can run its processes on several nodes."""
    WAITS_FOR_GPUS: ClassVar[bool] = True
    """False if this kind of stage needs no GPU and may start while all GPUs are in use."""
    GPU_FOR_EACH_PROCESS: ClassVar[bool] = False
    """True if each process of the stage uses a GPU of its own, however many device slots the stage holds."""

    kind: str
    execution: Execution = Execution()

    @property
    def product(self) -> Product:
        """Kind of output of the stage, such as a model, for the stages that refer to it."""
        (only,) = self.PRODUCTS
        return only

    @property
    def own_chat_template(self) -> Path | None:
        """Chat template that the stage gives to the model it makes; None if the model keeps its input model's."""
        return None

    @property
    def processes(self) -> int:
        """Number of processes that the stage starts on each node."""
        return 1

    @property
    def devices(self) -> int:
        """Number of GPUs (or shares of the CPU) on each node that the stage keeps busy."""
        return self.processes

    def identity(self) -> dict[str, JsonValue]:
        """Return those config fields, with defaults filled in, that identify the stage's artifact and so its version.

        Left out are `execution`, fields marked `AddedLater` that have their default, references and outside paths: the
        versions of the referenced stages and the contents of the paths identify the artifact.
        """
        skipped = {path for path, _ in marked_values(self, Reference)}
        skipped |= {path for path, _ in marked_values(self, OutsideInput)}
        skipped |= set(unset_later(self))
        return without(self.model_dump(mode="json", exclude={"execution"}), skipped)

    def progress_kept(self, scratch: Path) -> int:
        """Return how far an interrupted run got, in any unit, to see whether retries make progress; 0 if unknown."""
        return 0

    def resume_identity(self) -> dict[str, JsonValue]:
        """Return the config fields that must be unchanged for a retry to resume an interrupted run of the stage."""
        return self.identity()

    def references(self) -> dict[str, str]:
        """Return the names of the stages that the config refers to, by the dotted path of the config field."""
        return {path: str(value) for path, value in marked_values(self, Reference)}

    def outside_paths(self) -> dict[str, Path]:
        """Return the paths that the config names outside the store, by the dotted path of the config field."""
        return {path: Path(value) for path, value in marked_values(self, OutsideInput)}

    @property
    def brings_media(self) -> bool:
        """Return whether the recipe alone shows that the stage's dataset has media, such as pictures."""
        return False

    ASKS_ALL_STAGES: ClassVar[bool] = False
    """True if `completed_among` needs the configs of all stages in the recipe, not only of referenced ones."""

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        """Return the config with values filled in from configs of other stages, such as an adapter's base model."""
        return self

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        """Yield an error for each conflict of the config with other stages; `Reference` finds those of wrong kinds."""
        return iter(())

    def planned_problems(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        """Yield `FIELD: PROBLEM` for errors found only by reading files, which a plan does, not every reading."""
        return iter(())

    def model_problems(self, read_config: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
        """Yield `FIELD: PROBLEM` for errors that the `config.json` of the stage's input model shows.

        read_config: returns it, empty where it cannot be known yet; it may ask a hub. Raises LifecycleError for a
        config that the download, or the check of its files, will refuse.
        """
        return iter(())

    def model_findings(
        self, find_model: Callable[[], ModelAtHand | None], gpu_type: str | None
    ) -> Iterator[tuple[str, LifecycleError | str]]:
        """Yield each problem that the input model's files show while a refresh is planned, with its config field.

        Notes are text. find_model: returns the start model; None where its config is not here; raises LifecycleError
        for an unreadable one. gpu_type: torch's name for this machine's GPUs; None for a stage that does not run on
        them.
        """
        return iter(())

    def first_problems(
        self, find_model: Callable[[], Path | None], find_dataset: Callable[[str], Path | None]
    ) -> Iterator[str]:
        """Yield `FIELD: PROBLEM` for errors that file headers and first rows of a dataset show before a run.

        find_model: returns the start model's folder; None where it is not here. find_dataset: returns the folder, or
        the only file, of the dataset of a stage.
        """
        return iter(())

    def target_problems(self, store: Path) -> Iterator[str]:
        """Yield `FIELD: PROBLEM` for the publishing target, from the environment and this machine's folders alone."""
        return iter(())

    def to_install(self) -> str | None:
        """Return the packages to install first, with their size, or None; ResourceError where it cannot be done."""
        return None

    def hint_for(self, recipe_folder: Path) -> str | None:
        """Return a hint for an unknown name in the config that a file beside the recipe defines; else None."""
        return None

    def device_roles(self, variable: str, devices: Sequence[str]) -> str | None:
        """Return in words how the stage divides its devices, or None. devices: those named in the recipe."""
        return None

    def missing_here(self, gpus: Sequence[str]) -> Iterator[str]:
        """Yield each requirement that the machine does not meet. gpus: torch's names of its GPUs."""
        return iter(())

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        """Yield each config field that has no effect given the other fields (dotted path), with the reason."""
        execution, is_server = self.execution, self.product == "server"
        for name, options in BLOCKS.items():
            if not isinstance(execution.options, options) and not (is_server and options.DESCRIBES_SERVERS):
                yield f"execution.{name}", f"the launcher is {execution.launcher}"

    def custom_code(self) -> tuple[str, ...]:
        """Return the config options that make the stage run or keep foreign code, such as Python files of a model."""
        trusted = (path for path, value in values_named(self, "trust_remote_code") if value)
        return tuple(f"{path}: Python files that come with the model" for path in trusted)

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return facts outside the store that decide the result, such as hub revisions and versions of programs.

        May ask the network; with limit_s once, for this long. Raises a `LifecycleError` for what cannot be resolved.
        """
        return {}


def base_of(name: str, stages: Mapping[str, StageConfig]) -> str:
    """Return the stage that makes an adapter's base model, through continued adapters; of a whole model, `name`."""
    while stages[name].product == "adapter":
        name = nearest_base(stages[name].references())
    return name


def nearest_base(by_field: Mapping[str, T]) -> T:
    """Return the value by field `base` (an adapter's base model), or without one, the value by field `model`."""
    return by_field.get("base") or by_field["model"]


class Lease(StrictModel):
    """Address and process of a server kept for later stages of a refresh; its API key is in the environment.

    engine_folder: of the engine's socket, by which stages on this machine reach it beside its proxy; None without one.
    """

    url: str
    pid: int
    engine_folder: Path | None = None


class Trial(StrictModel):
    """Options of a trial run, which measures a stage's first steps and makes no artifact.

    No part of a config: a recipe cannot ask for it, so it can enter no version and no store.
    """

    steps: PositiveInt = Field(description="Number of training steps of the trial run, whatever the config says.")


class StageInput(StrictModel):
    """Input of a stage's process: its config, input artifacts and cache, stored in `config.json`."""

    name: str
    kind: str
    version: str
    config: dict[str, JsonValue]
    inputs: dict[str, Path] = Field(description="Folder of each input artifact, by the name of its stage.")
    leases: dict[str, Lease] = Field(
        default_factory=dict, description="Running server of each serve stage that the stage uses, by name."
    )
    outside: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Facts outside the store that decide the result, such as a hub's revision, when planned.",
    )
    trial: Trial | None = Field(None, description="Options of a trial run, if the stage is only to be measured.")
    warnings: tuple[str, ...] = Field(
        (), description="Warnings about the inputs found before the stage started, which the stage reports again."
    )
    cache: Path = Field(description="Cache folder kept between runs, with content-dependent names, written atomically.")


class StageEvent(StrictModel):
    """Event that a running stage reports (progress, a milestone or a warning), one line of `events.jsonl`."""

    time_ms: int
    event: Literal["progress", "milestone", "warning"]
    message: str
    done: float | None = None
    total: float | None = None
    unit: str | None = None


class StageResult(StrictModel):
    """Result of a stage that succeeded, stored in `result.json`: final metrics, tags and files to upload.

    They go to MLflow; `files` are relative to the work folder. The first few metrics are shown to people. With a
    `lease` the artifact is complete although the process goes on, as a server, until it is stopped.
    """

    metrics: dict[str, float] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    files: list[str] = Field(default_factory=list)
    lease: Lease | None = None

    def refused_for(self, findings: Sequence[LifecycleError]) -> Self:
        """Return a copy with a tag of errors that marks the artifact as unusable; the first's class stands for all."""
        if not findings:
            return self
        messages = "\n".join(dict.fromkeys(map(str, findings)))
        return self.model_copy(update={"tags": {**self.tags, FINDING_TAG: f"{class_name(findings[0])}: {messages}"}})


def finding_of(tags: Mapping[str, str]) -> LifecycleError | None:
    """Return the error for which a stage marked its own artifact as unusable; None for a usable artifact."""
    if FINDING_TAG not in tags:
        return None
    name, _, message = tags[FINDING_TAG].partition(": ")
    return error_classes().get(name, LifecycleError)(message)


class StageFailure(StrictModel):
    """Error that ended a stage, stored in `error.json` for the process that started it."""

    error: str = Field(description="Name of the class of the error that ended the stage.")
    message: str
    died: bool = Field(False, description="True if a signal that no one requested killed a process of the stage.")

    @classmethod
    def of(cls, error: Exception) -> StageFailure:
        died = isinstance(error, LifecycleError) and error.died
        return cls(error=class_name(error), message=redact(str(error)), died=died)


@dataclass
class ProgressLines:
    """Writer of progress lines with the estimated time left for a stage's log, at most one a minute."""

    began: tuple[float, float] | None = None
    """Time in seconds and amount of work done when the stage's current run began. A resumed run does not begin at 0."""
    last_line_s: float = 0.0

    def line(self, now_s: float, done: float, total: float, unit: str, message: str) -> str | None:
        """Return a progress line if one is due, such as `120 of 600 steps, loss 0.31, 1:57 left`; else None."""
        # Less done than at the beginning: counting has begun again, for another part of the work.
        if self.began is None or done < self.began[1]:
            self.began, self.last_line_s = (now_s, done), now_s
        if now_s - self.last_line_s < LINE_EVERY_S:
            return None
        self.last_line_s = now_s
        began_s, first_done = self.began
        left = ""
        if done > first_done:
            # At the rate of this run: what an earlier attempt did took none of its time.
            left_s = round((total - done) / (done - first_done) * (now_s - began_s))
            left = f"{timedelta(seconds=left_s)} left"
        parts = [f"{done:,.0f} of {total:,.0f} {unit}".rstrip(), message, left]
        return f"{time.strftime('%H:%M:%S')} {', '.join(filter(None, parts))}"


@dataclass(frozen=True)
class StageContext:
    """Access of a stage's process to its work folder; only rank 0 of several processes writes."""

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
        """Scratch folder, kept when the stage is retried and removed when its artifact is stored."""
        folder = self.work / "scratch"
        folder.mkdir(exist_ok=True)
        return folder

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append metrics of a step to `metrics.jsonl`. A resumed stage may log a step again; the first value counts."""
        self._append(METRICS_FILE, {"step": step, "time_ms": time.time_ns() // 1_000_000, **metrics})

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None:
        """Report progress, which also appears once a minute in the stage's log; calls every 100 ms are cheap."""
        self._event("progress", message, done=done, total=total, unit=unit)
        line = self.progress_lines.line(time.monotonic(), done, total, unit, redact(message))
        if line and is_main_process():
            print_line(line)

    def doing(self, message: str) -> None:
        """Report the stage's current activity, shown instead of progress while its duration is unknown."""
        self._event("progress", message)

    def milestone(self, message: str) -> None:
        """Report a milestone, an event that people who watch the refresh want to see."""
        self._event("milestone", message)

    def warn(self, message: str) -> None:
        """Report a warning, which does not stop the stage but should be looked at."""
        self._event("warning", message)

    def refuse(self, finding: LifecycleError) -> None:
        """Mark the stage's artifact as unusable: it is stored with the error, but no other stage may use it.

        For checks at the end of slow work, whose result would be lost by raising: the artifact is committed with the
        finding as a tag, the refresh fails with it, and later runs repeat that instead of the work. Call it on rank 0,
        or all ranks, with all files whole.
        """
        self.findings.append(finding)
        if is_main_process():
            print_line(f"finding: {finding}")

    def _event(self, event: Literal["progress", "milestone", "warning"], message: str, **amounts: Any) -> None:
        now_ms = time.time_ns() // 1_000_000
        line = StageEvent(time_ms=now_ms, event=event, message=redact(message), **amounts)
        self._append("events.jsonl", line.model_dump(exclude_none=True))
        if event != "progress":
            print_line(f"{event}: {line.message}")

    def _append(self, file: str, row: dict[str, Any]) -> None:
        if is_main_process():
            with (self.work / file).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")


def is_main_process() -> bool:
    """Return whether this process is rank 0, or the only process of its stage."""
    return os.environ.get("RANK", "0") == "0"
