"""Data model of a refresh's report, from which its HTML page is made; `reading.py` fills it."""

from pathlib import Path

from pydantic import Field

from flows.ledger.events import CompareBegan
from flows.report.layouts import Row
from flows.report.lineage import Node
from stages.core.fields import StrictModel


class StageReport(StrictModel):
    """Result of one stage in a refresh's report: its state, time, metrics and error.

    built_by: refresh that built the cached artifact. log_tail: last lines that a failed stage's processes printed.
    """

    name: str
    kind: str
    version: str
    state: str
    reason: str
    seconds: float
    upstream: tuple[str, ...] = ()
    built_by: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str | None = None
    error_class: str | None = None
    log_tail: tuple[str, ...] = ()


class Span(StrictModel):
    """Bar on the report's time line for an attempt to run a stage, `start_s` after the first that is shown.

    num_devices: None where unknown. retried: the refresh tried the stage again by itself.
    """

    stage: str
    number: int
    outcome: str
    start_s: float
    seconds: float
    num_devices: int | None
    retried: bool = False

    @property
    def end_s(self) -> float:
        """Return the end of the attempt, in seconds after the start of the first attempt on the time line."""
        return self.start_s + self.seconds


class Curve(StrictModel):
    """Curve of one training metric over optimizer steps; None in `values` is not finite.

    name: of the metric, and of the training if that is another refresh's. behind: it belongs to an earlier champion's
    training. every: one of so many points is kept.
    """

    metric: str
    name: str
    behind: bool
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    every: int = 1


class TrainingCurves(StrictModel):
    """Chart (`loss`, `reward`, …) of metrics that share a scale; own curves come before earlier champions'."""

    stage: str
    chart: str
    curves: tuple[Curve, ...]

    @property
    def title(self) -> str:
        """Return the chart's title: the stage's name, followed by the metric unless it is the loss."""
        return self.stage if self.chart == "loss" else f"{self.stage}: {self.chart}"


class Histogram(StrictModel):
    """Histogram of document lengths: bin k counts those of at most `(k + 1) × bin_tokens`. dataset: empty for one."""

    dataset: str
    bin_tokens: int
    counts: tuple[int, ...]


class Share(StrictModel):
    """Share (0 to 1) of a dataset in a training's mixture. asked: by the recipe. seen: of what was learned, or None."""

    dataset: str
    asked: float
    seen: float | None


class DataOfTraining(StrictModel):
    """Data that a training stage learned from: document lengths, and each dataset's share."""

    stage: str
    lengths: tuple[Histogram, ...]
    shares: tuple[Share, ...]


class Score(StrictModel):
    """Score of an evaluation, named TASK.METRIC. standard_error, interval (95%): None if the harness has none."""

    stage: str
    name: str
    value: float
    standard_error: float | None
    interval: tuple[float, float] | None = None


class Answer(StrictModel):
    """Answer of a model to a sample question, and its scores as text: `NAME VALUE, …`."""

    text: str
    scores: str


class QuestionPicture(StrictModel):
    """Picture of a sample question. thumbnail: `data:` address; None, with the reason in `said`, where it is gone."""

    said: str
    thumbnail: str | None


class AnsweredQuestion(StrictModel):
    """Sample question with every model's answer, in the order of evaluations; None where it was not asked.

    change: of the last answer to the first, such as "better than champion (version 3)"; empty for none.
    """

    number: str
    asked: str
    expected: str
    answers: tuple[Answer | None, ...]
    change: str = ""
    pictures: tuple[QuestionPicture, ...] = ()


class AnswersToTask(StrictModel):
    """Evaluation task with sample questions and answers. stages: the evaluations, the champion's or base's first.

    summary: a sentence on how many answers of the last are better and worse than the first's; empty for one evaluation.
    """

    task: str
    stages: tuple[str, ...]
    summary: str
    questions: tuple[AnsweredQuestion, ...]


class ReadEpisode(StrictModel):
    """Episode for people to read. step: optimizer step that first learned from it; None outside of training."""

    step: int | None
    asked: str
    transcript: str
    expected: str
    rewards: str


class EpisodesOfStage(StrictModel):
    """Some episodes of a stage whose model acts in an environment; of training, from its first and last rounds."""

    stage: str
    episodes: tuple[ReadEpisode, ...]


class ScoreDifference(StrictModel):
    """Score difference of the candidate to the model it is compared with, on the same samples. interval: 95%.

    nothing_solved: number of samples if both got none right; else None.
    """

    name: str
    difference: float
    interval: tuple[float, float]
    nothing_solved: int | None = None


class Promotion(StrictModel):
    """Result of a promotion stage: whether the candidate became champion, and which gates it missed.

    tables: the gates and the paired comparison, each a heading and rows; None where an old version kept them only in
    `verdict.md`. approval: what a person decided, or whom the promotion waits for.
    """

    stage: str
    name: str
    outcome: str
    against: str | None
    missed: tuple[str, ...]
    differences: tuple[ScoreDifference, ...]
    tables: tuple[tuple[tuple[str, ...], ...], ...] | None
    approval: str | None = None


class Cost(StrictModel):
    """Cost of a refresh: device hours, their price, and energy.

    device_hours: of all attempts and trials with a known number of devices. energy_kwh: of attempts whose GPUs were
    counted; None for none. price_per_device_hour: from the hardware file, if it has one. unknown: stages with attempts
    of unknown devices. damage: error of a hardware file that cannot be read, which hides no other part of a report.
    """

    device_hours: float
    price_per_device_hour: float | None
    damage: str = ""
    hardware_file: Path
    energy_kwh: float | None
    unknown: tuple[str, ...]

    @property
    def price(self) -> float | None:
        """Return the price of the device hours, in the currency of the hardware file."""
        return None if self.price_per_device_hour is None else self.device_hours * self.price_per_device_hour


class RefreshReport(StrictModel):
    """Content of a refresh's HTML report. happened, means: a sentence each. layouts: results of a comparison."""

    refresh: str
    recipe: str
    recipe_path: Path
    overrides: tuple[str, ...]
    state: str
    happened: str
    means: str
    started_ms: int
    seconds: float
    hardware: str
    git_commit: str | None
    num_tries: int
    stages: tuple[StageReport, ...]
    spans: tuple[Span, ...]
    comparison: CompareBegan | None
    layouts: tuple[Row, ...]
    trainings: tuple[TrainingCurves, ...]
    learned_from: tuple[DataOfTraining, ...]
    scores: tuple[Score, ...]
    answers: tuple[AnswersToTask, ...]
    episodes: tuple[EpisodesOfStage, ...]
    promotions: tuple[Promotion, ...]
    lineage: tuple[Node, ...]
    cost: Cost
    warnings: tuple[str, ...]
    links: dict[str, str]

    @property
    def is_all_cached(self) -> bool:
        return all(one.state == "cached" for one in self.stages)
