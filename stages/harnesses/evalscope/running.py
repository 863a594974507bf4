"""Run of EvalScope's program for an evaluation: start, progress, and the scores and samples that it writes.

EvalScope leaves for each task `reviews/MODEL/BENCHMARK_SUBSET.jsonl`, a sample each, and
`reports/MODEL/BENCHMARK.json`.
"""

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from stages.core.cache import note_use
from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.core.files import read_json_lines
from stages.core.redaction import redact, shortened
from stages.core.supervised import SupervisedProcess, was_killed
from stages.data.any_rows import Prompt
from stages.data.files import find_files
from stages.data.media.folder import MediaFolder
from stages.data.media.images import from_data_address
from stages.data.media.requests import openai_messages
from stages.data.media.rows import TAG
from stages.data.media_reference import MediaReference
from stages.data.messages import PlainText, make_message
from stages.harnesses.evalscope.own_rows import OF_OWN_ROWS, WITH_OPTIONS
from stages.harnesses.harness import Evaluation, Results
from stages.harnesses.installation import InstalledHarness
from stages.harnesses.pictures import media_of
from stages.harnesses.question_sets import (
    asked_row,
    question_folder,
    question_sets,
    question_text,
    read_questions,
)
from stages.serving.interpreter import inherited_environment
from stages.serving.served_models import ServedModel

PROGRAM = Path(__file__).with_name("program.py")
LOG_FILE = "evalscope.log"
POLL_INTERVAL_S = 0.5
SHOWN_CHARACTERS = 500


USABLE = ("success", "fallback")
SUBSET_SIZE = 1_000_000
"""Offset between subsets: sample i of subset k has number k × 1000000 + i, whatever the `limit`."""


def evaluated(
    installed: InstalledHarness, evaluation: Evaluation, context: StageContext, model: ServedModel
) -> Results:
    """Run EvalScope's program against the served model and return scores and samples.

    Raises RuntimeError if the program fails, EvaluationError for a sample without a score.
    """
    # Of this version: a later attempt finds the answers there, and does not ask for them again.
    work = context.scratch / f"evalscope-{context.version}"
    work.mkdir(exist_ok=True)
    folders = {task: str(number) for number, task in enumerate(evaluation.tasks)}
    sets = {task: _write_questions(evaluation, task, work / f"questions-{folders[task]}") for task in folders}
    request = {
        "work": str(work),
        "url": model.client.url,
        "model": model.client.model,
        "tasks": [
            {
                "name": task,
                "folder": folder,
                "questions": str(sets[task]) if sets[task] else None,
                "benchmark": task if task in OF_OWN_ROWS else None,
                "metrics": OF_OWN_ROWS.get(task),
            }
            for task, folder in folders.items()
        ],
        "num_fewshot": evaluation.num_fewshot,
        "limit": evaluation.limit,
        "seed": evaluation.seed,
        "concurrent_requests": evaluation.concurrent_requests,
        "generation": evaluation.generation.model_dump(mode="json"),
        "dataset_folder": str(context.cache / "evalscope"),
    }
    (work / "request.json").write_text(json.dumps(request))
    own = [task for task, questions in sets.items() if questions is None]
    if own:
        note_use(context.cache / "evalscope")
    _run(installed, work, _environment(model.client.api_key, offline=not own), context)
    results = read_results({task: work / folder for task, folder in folders.items()}, evaluation)
    for task in question_sets(evaluation):
        for row, question in zip(results.samples[task], read_answered(evaluation, task), strict=True):
            if media_of(question.document):  # EvalScope knows them by the paths of copies
                row |= asked_row(question)
    return results


def read_answered(evaluation: Evaluation, task: str) -> list[Prompt]:
    """Read a question set; raise EvaluationError if it is empty, or a question lacks EvalScope's right answer."""
    questions = list(read_questions(evaluation, task))
    unanswered = [number for number, question in enumerate(questions, 1) if question.reference is None]
    if not questions or unanswered:
        found = f"question {unanswered[0]} has no right answer" if unanswered else "there is none"
        raise EvaluationError(
            f"reading the questions of {task}: {found}; expected a column `answer` in each row, which EvalScope "
            "compares with"
        )
    if task == WITH_OPTIONS:
        for number, question in enumerate(questions, 1):
            _check_options(number, question)
    return questions


def _check_options(number: int, question: Prompt) -> None:
    options, document = question.row.get("options"), question.document
    letters = ascii_uppercase[: len(options)] if isinstance(options, list) else ""
    is_one = isinstance(document, PlainText) or [one["role"] for one in document.messages] == ["user"]
    if not (len(letters) > 1 and is_one and question.reference and question.reference in letters):
        raise EvaluationError(
            f"reading the questions of {WITH_OPTIONS}: question {number} is none with options; expected one message of "
            "a user, `options`, a list of texts, and as `answer` the letter of the right one, A for the first"
        )


def _write_questions(evaluation: Evaluation, task: str, folder: Path) -> Path | None:
    """Write a question set to a file for EvalScope's program; return None for a benchmark of EvalScope's own."""
    if task not in question_sets(evaluation):
        return None
    folder.mkdir(exist_ok=True)
    file = folder / "questions.jsonl"
    root = question_folder(evaluation)
    media = MediaFolder.of(root, find_files(root, task))
    with file.open("w", encoding="utf-8") as stream:
        for question in read_answered(evaluation, task):
            document = question.document
            if task == WITH_OPTIONS:
                stream.write(json.dumps(_with_options(question, media, folder), ensure_ascii=False) + "\n")
                continue
            chat = [make_message("user", document.prompt)] if isinstance(document, PlainText) else document.messages
            if not isinstance(document, PlainText) and document.media:
                chat = openai_messages(document, lambda one: str(_copy(media, one, folder)))
            row = {"messages": chat, "answer": question.reference}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    return file


def _with_options(question: Prompt, media: MediaFolder, folder: Path) -> dict[str, Any]:
    """Return a question with options in EvalScope's form, whose text has `<image 1>` where its first picture is."""
    numbers = count(1)
    text = TAG.sub(lambda _: f"<image {next(numbers)}>", question_text(question.document))
    copies = {
        f"image_{number}": str(_copy(media, one, folder)) for number, one in enumerate(media_of(question.document), 1)
    }
    return {"question": text, "options": question.row["options"], "answer": question.reference, **copies}


def _copy(media: MediaFolder, reference: MediaReference, folder: Path) -> Path:
    """Write a copy of a picture, named by its digest; return its path, of which EvalScope makes a `data:` address."""
    address = media.data_address(reference)
    copy = folder / f"{reference.sha256}.{address.partition(';')[0].rpartition('/')[2]}"
    copy.write_bytes(from_data_address(address))
    return copy


def _environment(api_key: str, *, offline: bool) -> dict[str, str]:
    quiet = {"DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    alone = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"} if offline else {}
    return {**inherited_environment(), **quiet, **alone, "EVALSCOPE_API_KEY": api_key}


def _run(installed: InstalledHarness, work: Path, environment: dict[str, str], context: StageContext) -> None:
    log = context.work / LOG_FILE
    with log.open("ab") as output:
        program = SupervisedProcess(
            [str(installed.python), str(PROGRAM), str(work / "request.json")],
            environment=environment,
            output=output,
            folder=work,
        )
    try:
        while (exit_code := program.poll()) is None:
            num_scored = sum(file.read_bytes().count(b"\n") for file in work.glob("*/reviews/*/*.jsonl"))
            context.doing(f"EvalScope has scored {num_scored} samples")
            time.sleep(POLL_INTERVAL_S)
    finally:
        program.stop()
    if exit_code:
        key = environment["EVALSCOPE_API_KEY"]
        last = redact(log.read_text(encoding="utf-8", errors="replace"), [key]).strip().splitlines()[-1:]
        reason = shortened("".join(last), SHOWN_CHARACTERS)
        failure = f"its program ended with exit code {exit_code}: {reason}; everything it printed is in {log}"
        if was_killed(exit_code):
            raise EvaluationError(f"EvalScope: {failure}", died=True)
        # Not one of our error classes: the stage then finds out whether the server went away.
        raise RuntimeError(failure)


def read_results(folders: Mapping[str, Path], evaluation: Evaluation) -> Results:
    """Read the scores and samples of each task; raise EvaluationError if there are none, or unscored ones."""
    samples = {task: list(_rows(task, folder)) for task, folder in folders.items()}
    reports = {task: _report(task, folder) for task, folder in folders.items()}
    generation = evaluation.generation.model_dump(mode="json")
    own_shots = "the benchmark's own" if evaluation.num_fewshot is None else evaluation.num_fewshot
    scores = {
        "results": {task: _scores(rows, reports[task]) for task, rows in samples.items()},
        "configs": {task: {"generation_kwargs": generation} for task in folders},
        "versions": dict.fromkeys(folders, f"EvalScope, as user of a chat, seed {evaluation.seed}"),
        "n-shot": dict.fromkeys(folders, own_shots),
        "higher_is_better": {task: _directions(report) for task, report in reports.items()},
    }
    return Results(scores, samples)


def _rows(task: str, folder: Path) -> Iterator[dict[str, Any]]:
    files = sorted(folder.glob("reviews/*/*.jsonl"))
    if not any(file.stat().st_size for file in files):
        raise EvaluationError(f"EvalScope gave no samples for {task}; see evalscope.log")
    for subset, file in enumerate(files):
        for review in sorted(read_json_lines(file), key=lambda one: int(one["index"])):
            yield _row(task, subset * SUBSET_SIZE + int(review["index"]), review)


def _row(task: str, number: int, review: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an EvalScope sample to a row of `samples/TASK.jsonl`; EvaluationError if its metric failed (no 0)."""
    score = review["sample_score"]["score"]
    failed = (score["metadata"] or {}).get("metric_errors")  # of which EvalScope itself makes scores of 0
    if score["status"] not in USABLE or not score["value"] or failed:
        why = "; ".join(f"{name}: {value}" for name, value in (score["metadata"] or {}).items())
        raise EvaluationError(f"EvalScope could not score sample {number} of {task} ({score['status']}): {why}")
    asked = [(one["role"], one["content"]) for one in review["messages"] if one.get("source") != "generate"]
    hashed = {"doc": [asked, review["target"]], "prompt": asked, "target": review["target"]}
    return {
        "doc_id": number,
        "filter": "none",
        "doc": {"messages": asked, "target": review["target"]},
        "resps": [[score["prediction"]]],
        "filtered_resps": [score["extracted_prediction"]],
        **{f"{name}_hash": hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in hashed.items()},
        **{name: float(value) for name, value in score["value"].items()},
    }


def _report(task: str, folder: Path) -> dict[str, Any]:
    for file in folder.glob("reports/*/*.json"):
        report: dict[str, Any] = json.loads(file.read_bytes())
        return report
    raise EvaluationError(f"EvalScope wrote no report of {task}; see evalscope.log")


def _scores(rows: list[dict[str, Any]], report: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics' means over samples with standard errors s / √n, or EvalScope's own aggregate."""
    scores: dict[str, float] = {}
    for metric in report["metrics"]:
        name = _metric_name(metric)
        values = [row[name] for row in rows if name in row]
        scores[f"{name},none"] = statistics.fmean(values) if values else float(metric["score"])
        if len(values) > 1:
            scores[f"{name}_stderr,none"] = statistics.stdev(values) / math.sqrt(len(values))
    return scores


def _directions(report: Mapping[str, Any]) -> dict[str, bool]:
    return {_metric_name(one): one["semantics"].get("direction") != "lower_is_better" for one in report["metrics"]}


def _metric_name(metric: Mapping[str, Any]) -> str:
    """Return the name of an EvalScope metric, with its aggregation unless that is the mean over samples."""
    name, aggregation = metric["identity"]["name"], metric["identity"]["aggregation"]
    return str(name if aggregation == "mean" else f"{name}_{aggregation}")
