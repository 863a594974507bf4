"""Evaluate stage: runs benchmark tasks against a served model, and stores the scores and all answers.

In: a model's artifact, or a serve stage's with a lease. Out: `scores.json`, and `samples/TASK.jsonl` (every prompt,
answer and score; schema in `stages/harnesses/harness.py`).
"""

import contextlib
import json
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stages.core.contract import StageContext, StageResult
from stages.core.errors import EvaluationError, LifecycleError, TransientError
from stages.core.intervals import NUM_CUT, zero_score_warning
from stages.harnesses.harness import Harness, Results
from stages.harnesses.registry import harness_of
from stages.harnesses.scores import samples_by_score, samples_file, score_metrics, zero_scores
from stages.kinds.evaluate.check import check_chat_template
from stages.kinds.evaluate.config import EvaluateConfig
from stages.models.recorded import is_asked_as_chat, trained_on_conversations
from stages.serving.endpoint import Endpoint, endpoint_for

MISSING_FILE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Exceptions for missing or unreadable files: unlike after connection errors, the evaluation is not retried."""


def run(config: EvaluateConfig, context: StageContext) -> StageResult:
    """Run the evaluation, and write its scores and samples.

    Raises EvaluationError, ModelError or ResourceError for bad input before anything slow; ServerError when the server
    does not come up; TransientError when it goes away, where the next attempt continues.
    """
    # SystemExit leaves the contexts below, which end a server of ours.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    evaluation = config.evaluation
    harness = harness_of(evaluation)
    harness.prepare(evaluation, context.cache, context.doing)
    with endpoint_for(config, context) as endpoint:
        as_chat = _ask_as_chat(config, endpoint.asked_folder, context)
        limits = endpoint.spec.limits
        evaluation = replace(evaluation, apply_chat_template=as_chat, max_images=limits.most, media_kinds=limits.kinds)
        with _named_failures(harness, config, endpoint):
            results = harness.evaluate(evaluation, context, endpoint.await_model)
    files = _write(context.work, results)
    metrics = score_metrics(results.scores["results"])
    if not metrics:
        context.refuse(
            EvaluationError(f"{harness.title} gave no scores for {', '.join(config.tasks)}; read {files[0]} there")
        )
    else:
        context.milestone(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    num_samples = samples_by_score(context.work)
    for name in zero_scores(results.scores):
        num_cut = int(results.metrics.get(NUM_CUT, 0))
        context.warn(zero_score_warning(name, context.name, num_samples.get(name, 0), num_cut))
    tags = {**endpoint.spec.version_tag, f"{harness.name}_version": harness.version()}
    return StageResult(metrics={**metrics, **results.metrics}, tags=tags, files=files)


def _ask_as_chat(config: EvaluateConfig, model: Path, context: StageContext) -> bool:
    """Return whether questions are chats, by the recipe or the model's training; EvaluationError without a template."""
    trained, asked = trained_on_conversations(model), config.apply_chat_template
    as_chat = is_asked_as_chat(model) if asked is None else asked
    if asked is None:
        why = "as it has a chat template or not" if trained is None else "as the model was trained"
        context.milestone(f"asking {'as a user of a chat' if as_chat else 'in plain text'}, {why}")
    elif trained is not None and trained != as_chat:
        context.warn(
            f"apply_chat_template is {str(as_chat).lower()}, but the model was trained on "
            f"{'conversations' if trained else 'plain text'}: its scores may be far too low"
        )
    if as_chat:
        check_chat_template(model)
    return as_chat


@contextlib.contextmanager
def _named_failures(harness: Harness, config: EvaluateConfig, endpoint: Endpoint) -> Iterator[None]:
    """Translate a harness's exceptions: TransientError, which is retried, for a lost server, else EvaluationError."""
    try:
        yield
    except LifecycleError:
        raise
    except Exception as error:
        traceback.print_exc()
        endpoint.raise_if_gone()
        status = getattr(error, "status", None)
        if isinstance(error, OSError) and not isinstance(error, MISSING_FILE) and status is None:
            raise TransientError(f"the evaluation was interrupted: {type(error).__name__}: {error}") from error
        raise EvaluationError(
            f"{harness.title} could not run {', '.join(config.tasks)}: {type(error).__name__}: {error}"
        ) from error


def _write(work: Path, results: Results) -> list[str]:
    """Write an evaluation's scores and samples; returns the files' paths relative to `work`, `scores.json` first."""
    samples = work / "samples"
    samples.mkdir(exist_ok=True)
    (work / "scores.json").write_text(json.dumps(results.scores, indent=2, default=str))
    for task, rows in results.samples.items():
        lines = (json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows)
        samples_file(work, task).write_text("".join(lines), encoding="utf-8")
    return ["scores.json", *sorted(str(path.relative_to(work)) for path in samples.iterdir())]
