"""Sample answers for a refresh's report: questions of each evaluation task with the answers of all models to them.

Questions whose score changed from the champion (or base) to the candidate come first, then wrong and right answers.
Stages that generate and train in an environment show some of their episodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from flows.ledger.record import RefreshRecord
from flows.report.evaluations import evaluations_of_champions
from flows.report.model import (
    Answer,
    AnsweredQuestion,
    AnswersToTask,
    EpisodesOfStage,
    QuestionPicture,
    ReadEpisode,
)
from stages.core.errors import DataError
from stages.core.files import read_json_lines
from stages.core.lines import visible
from stages.core.redaction import redact, shortened
from stages.data.media.folder import MediaFolder
from stages.data.media.images import thumbnail
from stages.data.media_reference import MediaReference
from stages.harnesses.pictures import MEDIA, task_folder_of
from stages.harnesses.scores import answer_and_expected, directions, sample_prompt
from stages.kinds.registry import makes
from stages.rollouts.episode_table import ShownEpisode, shown_episodes

MOST_QUESTIONS = 10
"""Most sample questions that a report shows, over all tasks together."""
MOST_EPISODES = 4
"""Most episodes that a report shows of each of a stage's files."""
MOST_PICTURES = 4
"""Most pictures of one question that a report shows."""
SHOWN_CHARACTERS = 1000
ELLIPSIS = "… "
Key = tuple[str, str]
"""Number and hash of a question."""


@dataclass(frozen=True)
class Answered:
    """Samples of one task in an evaluation. name: of the model's stage, or the champion's. evaluation: the artifact.

    higher_is_better: of each of the task's metrics, the main one first.
    """

    name: str
    evaluation: Path
    rows: Mapping[Key, dict[str, Any]]
    higher_is_better: Mapping[str, bool]

    def scores(self, key: Key) -> dict[str, float]:
        """Return the scores of an answer, the main one first; none if it was not asked, or has none of its own."""
        row = self.rows.get(key, {})
        names = [name for name in self.higher_is_better or row.get("metrics", ()) if name in row]
        return {name: row[name] for name in names if isinstance(row[name], int | float)}

    def worth(self, key: Key) -> float | None:
        """Return an answer's main score, signed so that more is better; None without."""
        for name, value in self.scores(key).items():
            return value if self.higher_is_better.get(name, True) else -value
        return None


def answers(record: RefreshRecord) -> Iterator[AnswersToTask]:
    """Yield each evaluation task with some questions and all models' answers, the champion's or the base's first."""
    evaluations = sorted(
        (name for name, entry in record.stages.items() if makes(entry.kind, "scores") and entry.artifact),
        key=lambda name: len(_ancestors(record, name)),
    )
    folders = [*evaluations_of_champions(record)]
    folders += [(name, folder) for name in evaluations if (folder := record.stages[name].artifact)]
    tasks: dict[str, list[Answered]] = {}
    for name, folder in folders:
        for file in sorted((folder / "samples").glob("*.jsonl")):
            if rows := _samples(file):
                tasks.setdefault(file.stem, []).append(Answered(name, folder, rows, directions(folder, file.stem)))
    # Tasks of this refresh: an older champion may have answered others, too.
    own = {task: answered for task, answered in tasks.items() if answered[-1].name in evaluations}
    left = MOST_QUESTIONS
    for number, (task, answered) in enumerate(own.items()):
        if share := -(-left // (len(own) - number)):
            yield (found := _answers_to(task, answered, share))
            left -= len(found.questions)


def episodes(record: RefreshRecord) -> Iterator[EpisodesOfStage]:
    """Yield some episodes of each stage that keeps them; those of evaluations are among the answers."""
    for name, entry in record.stages.items():
        if entry.artifact and not makes(entry.kind, "scores"):
            with suppress(OSError, ValueError):  # as of damaged evaluations
                if shown := tuple(map(_read, shown_episodes(entry.artifact, MOST_EPISODES))):
                    yield EpisodesOfStage(stage=name, episodes=shown)


def _read(episode: ShownEpisode) -> ReadEpisode:
    return ReadEpisode(
        step=episode.step,
        asked=_end(episode.prompt),
        transcript=_shown(episode.transcript),
        expected=_shown(episode.reference or ""),
        rewards=", ".join(f"{name} {value:g}" for name, value in episode.rewards.items()),
    )


def _answers_to(task: str, answered: Sequence[Answered], most: int) -> AnswersToTask:
    # Questions that all models were asked; where evaluations have none in common, those of the last.
    first, last = answered[0], answered[-1]
    common = set.intersection(*({*one.rows} for one in answered))
    questions = [key for key in last.rows if key in common] or [*last.rows]
    changes = {key: _change(first, last, key) for key in questions} if len(answered) > 1 and common else {}
    folder = task_folder_of(last.evaluation)
    return AnswersToTask(
        task=task,
        stages=tuple(one.name for one in answered),
        summary=_summary(first, last, changes),
        questions=tuple(
            _question(key, answered, _named(changes.get(key, 0.0), first.name), folder)
            for key in _ordered(questions, changes, last)[:most]
        ),
    )


def _change(first: Answered, last: Answered, key: Key) -> float:
    """Return by how much the last model's answer is better than the first's; 0 where one has no score."""
    before, now = first.worth(key), last.worth(key)
    return 0.0 if before is None or now is None else now - before


def _summary(first: Answered, last: Answered, changes: Mapping[Key, float]) -> str:
    if not changes:
        return ""
    num_better, num_worse = (sum(sign * change > 0 for change in changes.values()) for sign in (1, -1))
    return (
        f"Of {len(changes):,} questions, {last.name} answered {num_better:,} better than {first.name}, {num_worse:,} "
        f"worse, and {len(changes) - num_better - num_worse:,} equally well."
    )


def _named(change: float, reference: str) -> str:
    return f"{'better' if change > 0 else 'worse'} than {reference}" if change else ""


def _ordered(questions: Sequence[Key], changes: Mapping[Key, float], last: Answered) -> list[Key]:
    """Return questions in the order in which they are shown: worse and better answers, then wrong and right ones."""
    by_change = {sign: sorted((key for key in questions if sign * changes.get(key, 0.0) > 0),
                              key=lambda key: -abs(changes[key])) for sign in (-1, 1)}  # fmt: skip
    rest = {key: last.worth(key) for key in questions if not changes.get(key)}
    best = max((worth for worth in rest.values() if worth is not None), default=None)
    wrong = [key for key, worth in rest.items() if worth is not None and worth != best]
    right = [key for key in rest if key not in {*wrong}]
    wrong.sort(key=lambda key: last.worth(key) or 0.0)
    return [*_in_turns(by_change[-1], by_change[1]), *_in_turns(wrong, right)]


def _in_turns(ours: Sequence[Key], others: Sequence[Key]) -> list[Key]:
    return [key for key in chain.from_iterable(zip_longest(ours, others)) if key is not None]


def _samples(file: Path) -> dict[Key, dict[str, Any]]:
    """Return the first sample of each question in an evaluation's file, by the question's number and hash."""
    rows: dict[Key, dict[str, Any]] = {}
    with suppress(OSError, ValueError):  # damaged evaluations do not stop a report; `lifecycle verify` names them
        for row in read_json_lines(file):
            if "resps" in row:  # old evaluations did not keep answers
                rows.setdefault((str(row["doc_id"]), str(row.get("doc_hash"))), row)
    return rows


def _question(key: Key, answered: Sequence[Answered], change: str, task_folder: Path | None) -> AnsweredQuestion:
    row = answered[-1].rows[key]
    return AnsweredQuestion(
        number=str(row["doc_id"]),
        asked=_end(sample_prompt(row)),
        expected=_shown(answer_and_expected(row)[1]),
        answers=tuple(_answer(one, key) for one in answered),
        change=change,
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


def _answer(answered: Answered, key: Key) -> Answer | None:
    row = answered.rows.get(key)
    if row is None:
        return None
    scores = ", ".join(f"{name} {value:g}" for name, value in answered.scores(key).items())
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
