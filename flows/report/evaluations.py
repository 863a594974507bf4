"""Evaluation and promotion results for a refresh's report: scores, gates, score differences, sample answers."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.ledger.record import RefreshRecord, StageEntry
from flows.report.model import (
    Answer,
    AnsweredQuestion,
    AnswersToTask,
    Promotion,
    QuestionPicture,
    Score,
    ScoreDifference,
)
from stages.core.contract import StageInput
from stages.core.errors import DataError
from stages.core.files import read_json_lines
from stages.core.intervals import score_interval
from stages.core.lines import visible
from stages.core.redaction import redact, shortened
from stages.data.media.folder import MediaFolder
from stages.data.media.images import thumbnail
from stages.data.media_reference import MediaReference
from stages.harnesses.pictures import MEDIA
from stages.harnesses.scores import answer_and_expected, sample_prompt, samples_by_score
from stages.kinds.promote.verdict import VERDICT_FILE, Verdict, tables
from stages.kinds.registry import makes

ERROR = "_stderr"
DIFFERENCE = "_difference"
MOST_QUESTIONS = 10
"""Most sample questions that a report shows, over all tasks together."""
MOST_PICTURES = 4
"""Most pictures of one question that a report shows."""
SHOWN_CHARACTERS = 1000
ELLIPSIS = "… "


def scores(record: RefreshRecord) -> Iterator[Score]:
    """Yield the scores of all evaluation stages of a refresh, in the order of the recipe."""
    for stage, entry in record.stages.items():
        if not makes(entry.kind, "scores"):
            continue
        num_samples = samples_by_score(entry.artifact) if entry.artifact else {}
        for name, value in entry.metrics.items():
            if "." in name and not name.endswith(ERROR):
                error = entry.metrics.get(f"{name}{ERROR}")
                interval = None if error is None else score_interval(value, error, num_samples.get(name))
                yield Score(stage=stage, name=name, value=value, standard_error=error, interval=interval)


def promotions(record: RefreshRecord) -> Iterator[Promotion]:
    """Yield the results of a refresh's promotion stages that have decided whether to promote."""
    for name, entry in record.stages.items():
        if entry.verdict and entry.artifact and (entry.artifact / VERDICT_FILE).is_file():
            yield _promotion(name, entry, entry.artifact)


def _promotion(stage: str, entry: StageEntry, folder: Path) -> Promotion:
    verdict = Verdict.model_validate_json((folder / VERDICT_FILE).read_bytes())
    if verdict.differences is None:  # an old verdict kept them only as metrics
        differences = [
            ScoreDifference(
                name=name.removesuffix(DIFFERENCE),
                difference=value,
                interval=score_interval(value, entry.metrics[f"{name}{ERROR}"], None),
            )
            for name, value in entry.metrics.items()
            if name.endswith(DIFFERENCE) and f"{name}{ERROR}" in entry.metrics
        ]
    else:
        differences = [
            ScoreDifference(
                name=paired.name,
                difference=paired.difference,
                interval=paired.shown_interval,
                nothing_solved=paired.num_samples if paired.solved_by_neither else None,
            )
            for paired in verdict.differences
        ]
    return Promotion(
        stage=stage,
        name=verdict.name,
        outcome=verdict.outcome,
        against=verdict.against,
        missed=verdict.missed,
        differences=tuple(differences),
        tables=None if verdict.gates is None else tuple(tables(verdict)),
    )


def answers(record: RefreshRecord) -> Iterator[AnswersToTask]:
    """Yield each evaluation task with some questions and all models' answers, the base's (fewest ancestors) first."""
    evaluations = sorted(
        (name for name, entry in record.stages.items() if makes(entry.kind, "scores") and entry.artifact),
        key=lambda name: len(_ancestors(record, name)),
    )
    tasks: dict[str, dict[str, Path]] = {}
    for name in evaluations:
        folder = record.stages[name].artifact
        for file in sorted((folder / "samples").glob("*.jsonl")) if folder else ():
            tasks.setdefault(file.stem, {})[name] = file
    left = MOST_QUESTIONS
    for number, (task, files) in enumerate(tasks.items()):
        share = -(-left // (len(tasks) - number))
        if answered := _answers_to(task, files, share):
            left -= len(answered.questions)
            yield answered


def _answers_to(task: str, files: Mapping[str, Path], most: int) -> AnswersToTask | None:
    samples = {name: rows for name, file in files.items() if (rows := _samples(file))}
    if not samples or not most:
        return None
    # Questions that all models were asked; where evaluations have none in common, those of the last.
    common = set.intersection(*({*rows} for rows in samples.values()))
    *_, last = samples.values()
    questions = [key for key in last if key in common] or [*last]
    folder = _task_folder(files[[*samples][-1]].parents[1])
    return AnswersToTask(
        task=task,
        stages=tuple(samples),
        questions=tuple(
            _question(last[key], [rows.get(key) for rows in samples.values()], folder) for key in questions[:most]
        ),
    )


def _task_folder(evaluation: Path) -> Path | None:
    """Return the folder of an evaluation's tasks, with the pictures of its questions; None if none is recorded."""
    recorded = StageInput.read_or_none(evaluation / "config.json")
    named = recorded.config.get("task_folder") if recorded else None
    return Path(named) if isinstance(named, str) else None


def _samples(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the first sample of each question in an evaluation's file, by the question's number and hash."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with suppress(OSError, ValueError):  # damaged evaluations do not stop a report; `lifecycle verify` names them
        for row in read_json_lines(file):
            if "resps" in row:  # old evaluations did not keep answers
                rows.setdefault((str(row["doc_id"]), str(row.get("doc_hash"))), row)
    return rows


def _question(row: dict[str, Any], answered: list[dict[str, Any] | None], task_folder: Path | None) -> AnsweredQuestion:
    return AnsweredQuestion(
        number=str(row["doc_id"]),
        asked=_end(sample_prompt(row)),
        expected=_shown(answer_and_expected(row)[1]),
        answers=tuple(_answer(one) if one else None for one in answered),
        pictures=tuple(_pictures(row, task_folder)),
    )


def _pictures(row: dict[str, Any], task_folder: Path | None) -> Iterator[QuestionPicture]:
    """Yield a question's pictures, from where they lay when it was asked; those gone, or others now, are said."""
    found = row.get(MEDIA)
    references = found if isinstance(found, list) else []
    for number, one in enumerate(references[:MOST_PICTURES], 1):
        try:
            reference = MediaReference(**one)
            if task_folder is None or not reference.path:
                raise DataError(f"picture {number} of the question is kept nowhere but in the data of its task")
            image = MediaFolder.of(task_folder, ()).load_image(reference)
        except (DataError, ValueError, TypeError, OSError) as error:
            yield QuestionPicture(said=_shown(f"picture {number} cannot be shown: {error}"), thumbnail=None)
        else:
            yield QuestionPicture(said=f"picture {number}: {reference.path}", thumbnail=thumbnail(image))
    if len(references) > MOST_PICTURES:
        yield QuestionPicture(said=f"and {len(references) - MOST_PICTURES} more pictures", thumbnail=None)


def _answer(row: dict[str, Any]) -> Answer:
    values = ((name, row[name]) for name in row.get("metrics", ()) if name in row)
    scores = ", ".join(f"{name} {value:g}" for name, value in values if isinstance(value, int | float))
    return Answer(text=_shown(answer_and_expected(row)[0]), scores=scores)


def _shown(text: str) -> str:
    return visible(shortened(text, SHOWN_CHARACTERS))


def _end(text: str) -> str:
    """Return the end of a prompt that is too long to show. The question stands there, after the few-shot examples."""
    text = redact(text)
    return visible(text if len(text) <= SHOWN_CHARACTERS else f"{ELLIPSIS}{text[-SHOWN_CHARACTERS:]}")


def _ancestors(record: RefreshRecord, stage: str) -> set[str]:
    ancestors: set[str] = set()
    left = [stage]
    while left:
        entry = record.stages.get(left.pop())
        left += [name for name in (entry.upstream if entry else ()) if name not in ancestors]
        ancestors |= {*left}
    return ancestors
