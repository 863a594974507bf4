"""Evaluation by a judge: the served model answers the questions of sets, and the judge rates the answers."""

import hashlib
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.core.contract import StageContext
from stages.core.errors import DataError, EvaluationError
from stages.core.files import remove_cut_off_line
from stages.data.files import find_files
from stages.data.media.requests import openai_messages
from stages.data.messages import PlainText
from stages.harnesses.harness import Evaluation, Results
from stages.harnesses.pictures import Address, QuestionPictures, media_of
from stages.harnesses.question_sets import (
    prompt_options,
    question_folder,
    question_text,
    sample_row,
    sampling_options,
)
from stages.rewards.judge import JudgeClient, JudgeScore, RatingConfig, bounded, cost_metrics
from stages.rewards.reward import Completion
from stages.rollouts.asking import Sample, ask_chats, sample_all
from stages.rollouts.options import SamplingOptions
from stages.rollouts.prompts import RenderedPrompt, check_room, read_prompts
from stages.serving.client import ChatAnswer, Client, Usage
from stages.serving.served_models import ServedModel

METRIC = "rating"
JUDGE_FILE = "judge.jsonl"
"""File in the artifact with every question to the judge, its answer, and the number of tokens of both."""
PROGRESS_EVERY = 10


@dataclass(frozen=True)
class AnsweredTask:
    """Questions of one set with the served model's answers."""

    prompts: Sequence[RenderedPrompt]
    answers: Sequence[Sample]

    def completions(self) -> Iterator[Completion]:
        """Yield the model's answers in the form that the judge rates, with the questions as plain text."""
        for asked, answer in zip(self.prompts, self.answers, strict=True):
            text = question_text(asked.prompt.document)
            yield replace(asked.completion(answer.text, answer.num_tokens), prompt=text)


def probe_judge(evaluation: Evaluation, cache: Path, num_images: int) -> None:
    """Ask the judge to rate a trivial answer, storing nothing; raises as `JudgeClient.try_out` does."""
    with JudgeClient.opened(_judge(evaluation), cache / JUDGE_FILE) as judge:
        judge.try_out(num_images)


def rated(evaluation: Evaluation, context: StageContext, model: ServedModel) -> Results:
    """Ask the served model all questions, let the judge rate its answers, and return scores and samples.

    Raises EvaluationError for bad questions or too few numbers; ServerError and TransientError.
    """
    kept = context.scratch / f"judge-{context.version}.jsonl"
    try:
        answered = {task: _answered(task, evaluation, context, model) for task in evaluation.tasks}
        with JudgeClient.opened(_judge(evaluation), kept) as judge:
            bound = _judge(evaluation).max_unjudged_fraction
            opinions = {task: _opinions(task, answers, judge, bound, context) for task, answers in answered.items()}
    except DataError as error:
        raise EvaluationError(str(error)) from error
    shutil.copyfile(kept, context.work / JUDGE_FILE)
    samples = {task: _rows(answered[task], opinions[task]) for task in evaluation.tasks}
    num_unjudged = sum(one.score is None for task in opinions.values() for one in task)
    metrics = {**cost_metrics(kept), "num_unjudged": float(num_unjudged)}
    return Results(_scores(evaluation, samples), samples, metrics)


def _judge(evaluation: Evaluation) -> RatingConfig:
    assert evaluation.judge, "`Judge.problems` has asked for one"
    return evaluation.judge


def _answered(task: str, evaluation: Evaluation, context: StageContext, model: ServedModel) -> AnsweredTask:
    folder, options = question_folder(evaluation), sampling_options(evaluation, num_samples=1, seed=0)
    pictures = QuestionPictures(folder, find_files(folder, task))
    prompts = read_prompts(folder, prompt_options(evaluation, task), model.folder, pictures)
    check_room(prompts, model.context_tokens, options.max_tokens)

    def report(num_done: int, num_all: int) -> None:
        if num_done % PROGRESS_EVERY == 0 or num_done == num_all:
            context.progress(num_done, num_all, "answers", f"asking {task}")

    kept = context.scratch / f"answers-{context.version}-{hashlib.sha256(task.encode()).hexdigest()[:12]}.jsonl"
    if any(media_of(one.prompt.document) for one in prompts):
        chats = sample_chats(model.client, prompts, options, kept, report)
        answers: Sequence[Sample] = chats
        if num_otherwise := sum(one.asked_otherwise for one in chats):
            context.warn(
                f"the server made other tokens of {num_otherwise} questions of {task} than training would: of special "
                "tokens in their texts, or by another chat template; their scores may be too low"
            )
    else:
        answers = sample_all(model.client, [one.token_ids for one in prompts], options, kept, report)
    if all(one.truncated for one in answers):
        context.warn(f"every answer to {task} was cut off at generation.max_tokens, {options.max_tokens}; raise it")
    return AnsweredTask(prompts, answers)


class ChatSample(Sample):
    """Answer to a question asked as a chat, as stored. asked: digest of the request, with its pictures' digests.

    asked_otherwise: whether the server made other tokens of the question than training would.
    """

    asked: str
    asked_otherwise: bool


def sample_chats(
    client: Client,
    prompts: Sequence[RenderedPrompt],
    options: SamplingOptions,
    kept: Path,
    report: Callable[[int, int], None],
) -> list[ChatSample]:
    """Ask questions with pictures as chats; return the answers, also those that `kept` has from another attempt.

    Few pictures are in memory at once, and none is written. Raises as `sample_all` does; DataError for a picture that
    is gone.
    """
    remove_cut_off_line(kept)
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    answers = {one.asked: one for one in map(ChatSample.model_validate_json, lines)}
    bodies = [_chat(client.model, one, options, lambda medium: f"sha256:{medium.sha256}") for one in prompts]
    digests = [hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest() for one in bodies]
    with kept.open("a", encoding="utf-8") as stream:

        def keep(number: int, request: dict[str, Any], answer: ChatAnswer) -> None:
            choice, usage = answer.choices[0], answer.usage or Usage()
            answers[digests[number]] = sample = ChatSample(
                prompt=number,
                sample=0,
                seed=request["seed"],
                text=choice.message.content or "",
                num_tokens=usage.completion_tokens or 0,
                truncated=choice.finish_reason == "length",
                asked=digests[number],
                asked_otherwise=answer.prompt_token_ids not in (None, prompts[number].token_ids),
            )
            stream.write(sample.model_dump_json() + "\n")
            stream.flush()
            report(len(answers), len(digests))

        missing = {digest: number for number, digest in enumerate(digests) if digest not in answers}.values()
        asked = ((number, _chat(client.model, prompts[number], options, prompts[number].address)) for number in missing)
        ask_chats(client, asked, options.concurrent_requests, keep)
    return [answers[digest] for digest in digests]


def _chat(model: str, asked: RenderedPrompt, options: SamplingOptions, address: Address | None) -> dict[str, Any]:
    document = asked.prompt.document
    if isinstance(document, PlainText) or address is None:
        raise EvaluationError(
            f"{asked.place}: questions with pictures, and those beside them, are asked as a user of a chat, but the "
            "model is asked in plain text: it was trained so, has no chat template, or the recipe says "
            "`apply_chat_template: false`"
        )
    return {
        "model": model,
        "messages": openai_messages(document, address),
        **({"tools": list(document.tools)} if document.tools else {}),
        **({"chat_template_kwargs": document.variables} if document.variables else {}),
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stop": list(options.stop) or None,
        "seed": options.seed,
        "return_token_ids": True,
    }


def _opinions(
    task: str, answered: AnsweredTask, judge: JudgeClient, max_unjudged_fraction: float, context: StageContext
) -> list[JudgeScore]:
    completions = list(answered.completions())
    opinions = []
    for opinion in bounded(judge, completions, f"the answers to {task}", max_unjudged_fraction):
        opinions.append(opinion)
        if len(opinions) % PROGRESS_EVERY == 0 or len(opinions) == len(completions):
            context.progress(len(opinions), len(completions), "answers", f"judging {task}")
    return opinions


def _rows(answered: AnsweredTask, opinions: Sequence[JudgeScore]) -> list[dict[str, Any]]:
    together = zip(answered.prompts, answered.answers, opinions, strict=True)
    return [
        sample_row(
            number,
            asked.prompt,
            answer.text,
            {"truncated": answer.truncated, METRIC: opinion.score, "judge_answers": opinion.answers},
        )
        for number, (asked, answer, opinion) in enumerate(together)
    ]


def _scores(evaluation: Evaluation, samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the judge's scores in the harnesses' schema; `versions` names judge and scale, which pairs must share."""
    judge = _judge(evaluation)
    rubric = hashlib.sha256(json.dumps([judge.asked, judge.scale]).encode()).hexdigest()[:12]
    generation = evaluation.generation.model_dump(mode="json")
    return {
        "results": {task: _means([row[METRIC] for row in rows]) for task, rows in samples.items()},
        "configs": {task: {"generation_kwargs": generation, "judge": judge.served_model} for task in samples},
        "versions": dict.fromkeys(samples, f"{judge.served_model}, rubric {rubric}"),
        "n-shot": dict.fromkeys(samples, 0),
        "higher_is_better": {task: {METRIC: True} for task in samples},
    }


def _means(ratings: Sequence[float | None]) -> dict[str, float]:
    """Return the mean of the ratings that the judge gave, and its standard error, s / √n."""
    values = [rating for rating in ratings if rating is not None]
    mean = {f"{METRIC},none": statistics.fmean(values)}
    if len(values) > 1:
        mean[f"{METRIC}_stderr,none"] = statistics.stdev(values) / math.sqrt(len(values))
    return mean
