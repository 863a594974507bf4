"""The evaluate stage: runs lm-eval tasks against the server of a serve stage, or one of its own for a model.

In: a model's artifact, or a serve stage's with a lease. Out: `scores.json` (lm-eval's results), `samples/TASK.jsonl`
(every prompt, answer and score), and the scores as metrics.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from stages.core.contract import StageContext, StageResult
from stages.core.errors import EvaluationError, LifecycleError, TransientError
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.endpoint import Endpoint, endpoint_for
from stages.evaluate.revisions import check_loaded
from stages.evaluate.scores import score_metrics
from stages.evaluate.tasks import TaskSelection, select_tasks

PROGRESS_EVERY = 10
KEPT_RESULTS = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


def run(config: EvaluateConfig, context: StageContext) -> StageResult:
    """Raises EvaluationError, ModelError or ResourceError for bad input before anything slow; ServerError when the
    server does not come up; TransientError when it goes away: the next attempt continues where this one was.
    """
    signal.signal(signal.SIGTERM, _end)
    selection = select_tasks(config.tasks, config.task_folder)
    _prepare_environment(selection, context.cache)
    with endpoint_for(config, context) as endpoint:
        if config.apply_chat_template:
            _check_chat_template(endpoint.spec.model)
        results = _evaluate(config, context, selection, endpoint)
        version_tag = endpoint.spec.version_tag
    files = _write(context.work, results)
    metrics = score_metrics(results["results"])
    if not metrics:
        raise EvaluationError(f"lm-eval gave no scores for {', '.join(config.tasks)}; see {context.work / files[0]}")
    context.milestone(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    tags = {**version_tag, "lm_eval_version": version("lm_eval")}
    return StageResult(metrics=metrics, tags=tags, files=files)


def _prepare_environment(selection: TaskSelection, cache: Path) -> None:
    """Settings that Hugging Face libraries read when they are imported."""
    os.environ.setdefault("HF_DATASETS_CACHE", str(cache / "datasets"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if selection.offline:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def _check_chat_template(model: Path) -> None:
    tokenizer_config = model / "tokenizer_config.json"
    in_config = tokenizer_config.is_file() and json.loads(tokenizer_config.read_text()).get("chat_template")
    if not in_config and not (model / "chat_template.jinja").is_file():
        raise EvaluationError(
            f"apply_chat_template is on, but {model} has no chat template (chat_template.jinja, or in "
            "tokenizer_config.json); switch it off, or evaluate a model that has one"
        )


def _evaluate(
    config: EvaluateConfig, context: StageContext, selection: TaskSelection, endpoint: Endpoint
) -> dict[str, Any]:

    def tell(answered: int, asked: int) -> None:
        if answered % PROGRESS_EVERY == 0 or answered == asked:
            context.progress(answered, asked, "answers", "evaluating")

    with _named_failures(config, endpoint):
        from stages.evaluate import harness  # while the server starts: this takes about as long

        tasks = harness.load_tasks(selection, config)
        check_loaded(tasks["tasks"].values(), context.outside)
        endpoint.wait_until_ready()
        model = harness.ServedModel(
            endpoint.client,
            endpoint.context_tokens(),
            endpoint.spec.model,
            config,
            trust_remote_code=endpoint.spec.serving.trust_remote_code,
        )
        answers = context.scratch / f"answers-{context.version}"
        results = harness.evaluate_tasks(model, tasks, config, answers, tell)
        if model.num_truncated:
            context.warn(
                f"{model.num_truncated} of {model.num_asked} prompts were cut at their beginning to fit into "
                f"{model.context_tokens} tokens with the answer; raise serving.max_model_len, or lower num_fewshot"
            )
        return results


@contextlib.contextmanager
def _named_failures(config: EvaluateConfig, endpoint: Endpoint) -> Iterator[None]:
    """Turn what lm-eval raises into our errors: a server that went away is worth another try, a bad task is not."""
    try:
        yield
    except LifecycleError:
        raise
    except Exception as error:
        traceback.print_exc()
        endpoint.raise_if_gone()
        status = getattr(error, "status", None)
        if isinstance(error, OSError | TimeoutError) and status is None:
            raise TransientError(f"the evaluation was interrupted: {type(error).__name__}: {error}") from error
        raise EvaluationError(
            f"lm-eval could not run {', '.join(config.tasks)}: {type(error).__name__}: {error}"
        ) from error


def _write(work: Path, results: dict[str, Any]) -> list[str]:
    """Write scores and samples; returns their paths relative to `work`, the scores first."""
    samples = work / "samples"
    samples.mkdir(exist_ok=True)
    scores = {key: results[key] for key in KEPT_RESULTS if key in results}
    (work / "scores.json").write_text(json.dumps(scores, indent=2, default=str))
    for task, rows in results["samples"].items():
        lines = (json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows)
        (samples / f"{task.replace('/', '_')}.jsonl").write_text("".join(lines), encoding="utf-8")
    return ["scores.json", *sorted(str(path.relative_to(work)) for path in samples.iterdir())]


def _end(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
