"""Config of a curation: which rows of datasets are left out, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import regex
from pydantic import AfterValidator, Field, JsonValue, NonNegativeInt, PositiveInt, model_validator

from stages.core.contract import DatasetReference, OutsidePath, Reported, StageConfig
from stages.core.fields import AddedLater, SplitName, StrictModel
from stages.data.config import same_datasets
from stages.harnesses.harness import Evaluation
from stages.harnesses.registry import DEFAULT_HARNESS, HarnessName, harness_of
from stages.rewards.registry import AnyReward, RewardName

_CODES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr fuv fy
ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko ku ky la lb lg
lij ln lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om or pa pcm pl ps pt qu ro ru rw sa sdh se si sk sl
sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
LANGUAGES = frozenset(_CODES.split())
"""ISO 639 codes that the library distinguishes; zxx is no language. Asking the library takes a second."""


def _known_language(code: str) -> str:
    if code not in LANGUAGES:
        raise ValueError(
            f"found {code!r}, expected an ISO 639 code such as en, de or zh: {', '.join(sorted(LANGUAGES))}"
        )
    return code


LanguageCode = Annotated[str, AfterValidator(_known_language)]


STEPS = (
    "length",
    "patterns",
    "language",
    "decontaminate",
    "redact",
    "exact_duplicates",
    "near_duplicates",
    "quality",
    "sample",
    "held_out",
)
"""Curation steps in the order in which they are done."""


class Length(StrictModel):
    """Bounds on the length of rows; both bounds may be set."""

    min_characters: NonNegativeInt = Field(0, description="Smallest number of characters in all texts of a row.")
    max_characters: PositiveInt | None = Field(None, description="Largest number of characters in all texts of a row.")
    min_turns: NonNegativeInt = Field(0, description="Smallest number of messages in a conversation, without system's.")
    max_turns: PositiveInt | None = Field(None, description="Largest number of messages, without the system's.")

    @property
    def counts_turns(self) -> bool:
        """Return whether a bound counts turns, so that rows must be conversations."""
        return bool(self.min_turns or self.max_turns)

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if not (self.min_characters or self.max_characters or self.counts_turns):
            raise ValueError("names no bound, so that it would leave out nothing; set one, or remove `length`")
        for unit in ("characters", "turns"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if most is not None and least > most:
                raise ValueError(f"`min_{unit}` is {least}, more than `max_{unit}`, {most}: no row is both")
        return self


def _compiled(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


RowPattern = Annotated[str, Field(min_length=1), AfterValidator(_compiled)]
PersonalData = Literal["email", "ip_address", "iban", "credit_card", "phone"]


class Patterns(StrictModel):
    """Regular expressions that are searched in the texts of a row, each on its lines together."""

    exclude: tuple[RowPattern, ...] = Field(
        (), description="Regular expressions: leave out rows that match one of them."
    )
    require: tuple[RowPattern, ...] = Field(
        (), description="Regular expressions: leave out rows that do not match all of them."
    )

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not (self.exclude or self.require):
            raise ValueError("names no pattern, so that it would leave out nothing; name some, or remove `patterns`")
        return self


class Language(StrictModel):
    """Language filter: languages to keep; rows with too few letters to tell are kept as well."""

    keep: tuple[LanguageCode, ...] = Field(min_length=1, description="Languages to keep, as ISO 639 codes: en, de, zh.")
    min_probability: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Smallest probability that a row is in one of the languages; it is low for code and mixed "
        "languages.",
    )


class Quality(StrictModel):
    """Threshold on rewards of this repository; rows with a lower sum are left out."""

    rewards: dict[RewardName, AnyReward] = Field(
        min_length=1, description="Rewards as in `generate`, but without `length`, which counts tokens."
    )
    above: float = Field(allow_inf_nan=False, description="Keep rows with a larger sum of rewards.")
    reference: str | None = Field(None, description="Column of the right answer, for rewards that need it.")

    @model_validator(mode="after")
    def _can_judge(self) -> Self:
        for name, reward in self.rewards.items():
            if reward.type == "length":
                raise ValueError(f"the reward {name} counts tokens, which rows have not; bound characters by `length`")
            if reward.NEEDS_REFERENCE and self.reference is None:
                raise ValueError(f"the reward {name} compares with the right answer; name its column in `reference`")
        return self


class Sample(StrictModel):
    """A random part of the rows, drawn by their content: further rows do not change which of these are drawn first."""

    rows: PositiveInt | None = Field(None, description="Number of rows to draw; all if there are fewer.")
    fraction: float | None = Field(None, gt=0, lt=1, description="Share of the rows to draw, instead of `rows`.")

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.rows is None) == (self.fraction is None):
            raise ValueError("names both or neither of `rows` and `fraction`; expected one of the two")
        return self


class HeldOut(StrictModel):
    """Rows to evaluate on, in `data/validation.jsonl`; near-duplicates are all on one side."""

    fraction: float = Field(gt=0, lt=1, description="Share of the groups of near-duplicates that are held out.")


class NearDuplicates(StrictModel):
    """Rows that say nearly the same; only the first is kept."""

    similarity: float = Field(
        0.5,
        ge=0.2,
        le=1,
        description="Jaccard similarity of two rows' runs of `words` words from which on they are near-duplicates. "
        "Changing every 20th word leaves about 0.73.",
    )
    words: PositiveInt = Field(3, le=50, description="Number of words in a run that near-duplicates are compared by.")


class BenchmarkTasks(StrictModel):
    """Benchmark tasks whose questions rows are compared with."""

    harness: Annotated[HarnessName, AddedLater()] = Field(
        DEFAULT_HARNESS, description="Harness of the tasks, as in `evaluate`."
    )
    tasks: tuple[str, ...] = Field(
        min_length=1, description="Names of benchmark tasks, the harness's own or of `task_folder`."
    )
    task_folder: OutsidePath | None = Field(None, description="Folder of local tasks (YAML and JSONL).")
    trust_task_code: bool = Field(False, description="Run the code in `task_folder`, as in `evaluate`.")

    @property
    def evaluation(self) -> Evaluation:
        """Request to the harness for the tasks' samples."""
        return Evaluation(self.harness, self.tasks, self.task_folder, trust_task_code=self.trust_task_code)


class Decontaminate(StrictModel):
    """Leave out rows that hold questions of a benchmark, so that its scores are not of memory."""

    words: int = Field(
        13, ge=5, le=50, description="Length of the runs of words (n-grams) that a row may not share with a sample."
    )
    min_shared: PositiveInt = Field(1, description="Number of shared runs of words from which on a row is left out.")
    benchmarks: dict[str, BenchmarkTasks] = Field(
        default_factory=dict,
        description="Benchmark tasks by name; default: those of all `evaluate` stages of the recipe.",
    )


class CurateConfig(StageConfig):
    """Leave out rows of datasets that should not be learned from, each for a listed reason (→ `data/`)."""

    STAGE_VERSION: ClassVar[int] = 2  # `redact` finds addresses beside Chinese and Japanese, and Parquet has no nulls
    PRODUCTS = ("dataset",)
    REPORTED = Reported(counts_data=True)

    ASKS_ALL_STAGES: ClassVar[bool] = True  # the tasks of all evaluations are benchmarks

    kind: Literal["curate"]
    datasets: tuple[DatasetReference, ...] = Field(
        min_length=1, description="Datasets of one format; of rows that repeat one another, the first is kept."
    )
    split: SplitName = Field("train", description="Files of the datasets whose name or folder begins with this.")
    on_bad_rows: Literal["fail", "drop"] = Field(
        "fail", description="Treatment of bad rows. drop: list them and skip them."
    )
    max_bad_row_fraction: float = Field(0.01, ge=0, le=1, description="Largest share of bad rows that may be dropped.")
    length: Length | None = Field(None, description="Step: leave out rows that are too short or too long.")
    decontaminate: Decontaminate | None = Field(
        None, description="Step: leave out rows that hold questions of a benchmark."
    )
    patterns: Patterns | None = Field(None, description="Step: leave out rows with or without a pattern.")
    language: Annotated[Language | None, AddedLater()] = Field(
        None, description="Step: leave out rows in other languages."
    )
    redact: tuple[PersonalData, ...] = Field(
        (), description="Step: personal data to mask in all texts of rows, as `[EMAIL]` and so on."
    )
    exact_duplicates: bool = Field(False, description="Step: leave out rows that teach the same again.")
    near_duplicates: NearDuplicates | None = Field(None, description="Step: leave out rows that say nearly the same.")
    quality: Quality | None = Field(None, description="Step: leave out rows with a bad answer.")
    sample: Sample | None = Field(None, description="Step: keep a random part of the rows.")
    held_out: HeldOut | None = Field(None, description="Step: hold out rows to evaluate on; drops none.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of `sample` and `held_out`.")

    @property
    def steps(self) -> tuple[str, ...]:
        """Steps of a curation that are asked for, in the order in which they are done."""
        return tuple(name for name in STEPS if getattr(self, name))

    @property
    def compared(self) -> NearDuplicates | None:
        """Settings for comparing rows with one another, to be left out or to be held out together."""
        return self.near_duplicates or (NearDuplicates() if self.held_out else None)

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        if not self.decontaminate or self.decontaminate.benchmarks:
            return self
        benchmarks = {str(number): one for number, one in enumerate(_benchmarks_of(stages), 1)}
        return self.model_copy(
            update={"decontaminate": self.decontaminate.model_copy(update={"benchmarks": benchmarks})}
        )

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return the version of each harness, and what its tasks' datasets hold now."""
        if not self.decontaminate:
            return {}
        outside: dict[str, JsonValue] = {}
        for benchmark in self.decontaminate.benchmarks.values():
            harness = harness_of(benchmark.evaluation)
            outside[f"{harness.name}_version"] = harness.version()
            for name, value in harness.resolve_outside(benchmark.evaluation, limit_s).items():
                before = outside.get(name)
                outside[name] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
        return outside

    def custom_code(self) -> tuple[str, ...]:
        """Describe the code that the stage runs, also that of tasks in a folder, which the evaluation trusts.

        Raises EvaluationError for unknown tasks.
        """
        benchmarks = self.decontaminate.benchmarks.values() if self.decontaminate else ()
        of_tasks = (code for one in benchmarks for code in harness_of(one.evaluation).custom_code(one.evaluation))
        own = ((name, reward.custom_code()) for name, reward in self.quality.rewards.items()) if self.quality else ()
        return (*super().custom_code(), *of_tasks, *(f"quality.rewards.{name}: {code}" for name, code in own if code))

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        if self.on_bad_rows == "fail":
            yield "max_bad_row_fraction", "`on_bad_rows: fail` drops none"
        if not (self.sample or self.held_out):
            yield "seed", "neither `sample` nor `held_out` draws"

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        if self.decontaminate and not self.decontaminate.benchmarks:
            yield (
                "decontaminate: the recipe has no `evaluate` stage whose tasks rows could be compared with; name tasks "
                "in `benchmarks`, or remove `decontaminate`"
            )
        for first, name in same_datasets(self.datasets, stages):
            yield f"datasets: {first} and {name} are the same dataset, whose rows would all be there twice; name one"

    @model_validator(mode="after")
    def _names_each_dataset_once(self) -> Self:
        if twice := [name for number, name in enumerate(self.datasets) if name in self.datasets[:number]]:
            raise ValueError(f"`datasets` names {twice[0]} twice, whose rows would all be there twice; name it once")
        if not self.steps:
            raise ValueError(f"names no step, so that it would leave out nothing; expected some of {', '.join(STEPS)}")
        return self


def _benchmarks_of(stages: Mapping[str, StageConfig]) -> list[BenchmarkTasks]:
    """Return the tasks of all evaluations, one entry for each task folder.

    Names of stages are left out: they are no part of the identity.
    """
    tasks: dict[tuple[str, Path | None, bool], set[str]] = {}
    for stage in stages.values():
        evaluation = getattr(stage, "evaluation", None)
        if isinstance(evaluation, Evaluation):
            key = (evaluation.harness, evaluation.task_folder, evaluation.trust_task_code)
            tasks.setdefault(key, set()).update(evaluation.tasks)
    return [
        BenchmarkTasks(harness=harness, tasks=tuple(sorted(names)), task_folder=folder, trust_task_code=trusted)
        for (harness, folder, trusted), names in tasks.items()
    ]
