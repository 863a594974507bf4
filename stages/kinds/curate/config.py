"""Config of the curate stage: which rows of its datasets are dropped, masked or held out, and by which rules."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

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
"""ISO 639 codes of py3langid's languages, listed here since loading it takes a second; zxx: no language."""


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
"""Names of the curation steps (filters, masking, sampling, validation split), in the order in which they run."""


class Length(StrictModel):
    """Bounds on the length of a row, in characters, in messages or in both."""

    min_characters: NonNegativeInt = Field(
        0, description="Smallest number of characters in all texts of a row together; rows with fewer are dropped."
    )
    max_characters: PositiveInt | None = Field(
        None, description="Largest number of characters in all texts of a row together; rows with more are dropped."
    )
    min_turns: NonNegativeInt = Field(
        0,
        description="Smallest number of messages in a conversation, without system messages.",
    )
    max_turns: PositiveInt | None = Field(
        None,
        description="Largest number of messages in a conversation, without system messages.",
    )

    @property
    def counts_turns(self) -> bool:
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
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


RowPattern = Annotated[str, Field(min_length=1), AfterValidator(_compiled)]
PersonalData = Literal["email", "ip_address", "iban", "credit_card", "phone"]


class Patterns(StrictModel):
    """Regular expressions that rows must match or must not match, in all texts of a row, joined by newlines."""

    exclude: tuple[RowPattern, ...] = Field(
        (), description="Regular expressions; rows that match at least one of them are dropped."
    )
    require: tuple[RowPattern, ...] = Field(
        (), description="Regular expressions; rows that do not match all of them are dropped."
    )

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not (self.exclude or self.require):
            raise ValueError("names no pattern, so that it would leave out nothing; name some, or remove `patterns`")
        return self


class Language(StrictModel):
    """Language filter: drops rows in other languages, but keeps rows with too few letters to identify the language."""

    keep: tuple[LanguageCode, ...] = Field(
        min_length=1, description="Languages to keep, as ISO 639 codes, such as en, de, zh."
    )
    min_probability: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Smallest probability that a row is in one of the languages to keep; rows below it are dropped. "
        "Code and mixed languages have low probabilities.",
    )


class Quality(StrictModel):
    """Quality filter: drops rows whose answer does not get enough reward."""

    rewards: dict[RewardName, AnyReward] = Field(
        min_length=1,
        description="Rewards that score each row's answer, as in a generate stage; not `length`, which counts tokens.",
    )
    above: float = Field(
        allow_inf_nan=False, description="Threshold on the sum of a row's rewards; only rows above it are kept."
    )
    reference: str | None = Field(
        None, description="Name of the column with the right answer, for rewards that compare with it."
    )

    @model_validator(mode="after")
    def _can_judge(self) -> Self:
        for name, reward in self.rewards.items():
            if reward.type == "length":
                raise ValueError(f"the reward {name} counts tokens, which rows have not; bound characters by `length`")
            if reward.NEEDS_REFERENCE and self.reference is None:
                raise ValueError(f"the reward {name} compares with the right answer; name its column in `reference`")
        return self


class Sample(StrictModel):
    """Settings of the curation step that keeps a random sample of the rows.

    Rows are drawn by their content, so that added rows do not change which of the others come first.
    """

    rows: PositiveInt | None = Field(None, description="Number of rows to draw; all rows are kept if there are fewer.")
    fraction: float | None = Field(
        None, gt=0, lt=1, description="Share of the rows to draw, between 0 and 1, instead of `rows`."
    )

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.rows is None) == (self.fraction is None):
            raise ValueError("names both or neither of `rows` and `fraction`; expected one of the two")
        return self


class HeldOut(StrictModel):
    """Held-out validation rows, written to `data/validation.jsonl`; near-duplicates all go to the same split."""

    fraction: float = Field(
        gt=0,
        lt=1,
        description="Share of the rows to hold out, between 0 and 1; groups of near-duplicates are drawn as a whole.",
    )


class NearDuplicates(StrictModel):
    """Filter of near-duplicates: of rows with nearly the same words, only the first is kept."""

    similarity: float = Field(
        0.5,
        ge=0.2,
        le=1,
        description="Smallest Jaccard similarity of two rows' word n-grams at which they count as near-duplicates. "
        "Changing every 20th word leaves about 0.73.",
    )
    words: PositiveInt = Field(
        3, le=50, description="Length in words of the n-grams by which rows are compared for near-duplicates."
    )


class BenchmarkTasks(StrictModel):
    """Benchmark tasks whose questions must not be in the training data."""

    harness: Annotated[HarnessName, AddedLater()] = Field(
        DEFAULT_HARNESS, description="Evaluation harness that provides the benchmark tasks, such as lm_eval."
    )
    tasks: tuple[str, ...] = Field(
        min_length=1, description="Names of benchmark tasks in the harness or in `task_folder`."
    )
    task_folder: OutsidePath | None = Field(None, description="Folder with tasks of your own (YAML and JSONL files).")
    trust_task_code: bool = Field(False, description="Allow the Python code of tasks in `task_folder` to run.")

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation(self.harness, self.tasks, self.task_folder, trust_task_code=self.trust_task_code)


class Decontaminate(StrictModel):
    """Decontamination: drops rows with benchmark questions, so that benchmark scores do not measure memorization."""

    words: int = Field(
        13, ge=5, le=50, description="Length in words of the n-grams that a row may not share with a benchmark sample."
    )
    min_shared: PositiveInt = Field(
        1, description="Number of n-grams that a row must share with benchmark samples to be dropped."
    )
    benchmarks: dict[str, BenchmarkTasks] = Field(
        default_factory=dict,
        description="Benchmark tasks to compare rows with, in named blocks; default: those of all `evaluate` stages "
        "of the recipe.",
    )


class CurateConfig(StageConfig):
    """Config of the curate stage: writes the rows worth training on to `data/`, and lists dropped rows with reasons."""

    STAGE_VERSION: ClassVar[int] = 2  # `redact` finds addresses beside Chinese and Japanese, and Parquet has no nulls
    PRODUCTS = ("dataset",)
    REPORTED = Reported(counts_data=True)
    SPANS_NODES = True

    ASKS_ALL_STAGES: ClassVar[bool] = True  # the tasks of all evaluations are benchmarks

    kind: Literal["curate"]
    datasets: tuple[DatasetReference, ...] = Field(
        min_length=1,
        description="Datasets to curate together, all of one format; of duplicate rows, the first in "
        "this order is kept.",
    )
    split: SplitName = Field("train", description="Split to curate: files whose name or folder begins with this text.")
    on_bad_rows: Literal["fail", "drop"] = Field(
        "fail",
        description="Treatment of rows that cannot be parsed: fail the stage, or drop and list them in dropped.jsonl.",
    )
    max_bad_row_fraction: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Largest share of rows that may be dropped as unparsable; above it the stage fails.",
    )
    length: Length | None = Field(None, description="Curation step: drop rows that are too short or too long.")
    decontaminate: Decontaminate | None = Field(
        None, description="Curation step: drop rows that contain questions of a benchmark."
    )
    patterns: Patterns | None = Field(None, description="Curation step: drop rows by regular expressions.")
    language: Annotated[Language | None, AddedLater()] = Field(
        None, description="Curation step: drop rows in languages other than the listed ones."
    )
    redact: tuple[PersonalData, ...] = Field(
        (),
        description="Curation step: mask these kinds of personal data in all texts, such as e-mail addresses by "
        "`[EMAIL]`.",
    )
    exact_duplicates: bool = Field(
        False,
        description="Curation step: drop exact duplicates, which would teach a model exactly what an earlier "
        "row teaches.",
    )
    near_duplicates: NearDuplicates | None = Field(
        None, description="Curation step: drop rows that nearly repeat an earlier row."
    )
    quality: Quality | None = Field(None, description="Curation step: drop rows whose answer gets too little reward.")
    sample: Sample | None = Field(None, description="Curation step: keep only a random sample of the rows.")
    held_out: HeldOut | None = Field(
        None, description="Curation step: move some rows to a validation split; no row is dropped."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed for drawing the rows of `sample` and `held_out`.")

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the curation steps that the recipe asks for, in the order in which they run."""
        return tuple(name for name in STEPS if getattr(self, name))

    @property
    def compared(self) -> NearDuplicates | None:
        """Settings for finding near-duplicate rows, also for `held_out`, to keep them in one split; else None."""
        return self.near_duplicates or (NearDuplicates() if self.held_out else None)

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        if not self.decontaminate or self.decontaminate.benchmarks:
            return self
        benchmarks = {str(number): one for number, one in enumerate(_benchmarks_of(stages), 1)}
        return self.model_copy(
            update={"decontaminate": self.decontaminate.model_copy(update={"benchmarks": benchmarks})}
        )

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return the versions of the harnesses and of the benchmark datasets, which are part of the cache key."""
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
        """Describe custom code in rewards and task folders, for the user's consent; EvaluationError: unknown task."""
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
    """Return the benchmark tasks of all `evaluate` stages, without stage names, which are no part of the identity."""
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
