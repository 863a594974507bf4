"""Run of lm-eval's tasks against a served model, and reading of the texts of their samples.

Importing this module takes seconds: import it while a server starts. Every answer goes into a sqlite file as it
arrives, so an interrupted evaluation asks only for what is missing.
"""

import contextlib
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import httpx
import jinja2
import lm_eval.utils
import numpy as np
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS, DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from stages.core.errors import EvaluationError, LifecycleError, TransientError
from stages.core.redaction import shortened
from stages.data.config import DEFAULT_DATE
from stages.data.messages import Conversation, RowError
from stages.data.templates import ChatTemplate, load_chat_template
from stages.data.tokenizer import DocumentTokenizer, SpecialTokens
from stages.harnesses.harness import Evaluation, TaskItem
from stages.harnesses.lm_eval.picture_tasks import (
    ChatText,
    PictureQuestion,
    encoded_rows,
    keep_encoded,
    sample_of,
    show_pictures,
)
from stages.harnesses.lm_eval.task_files import strings_in
from stages.harnesses.lm_eval.tasks import TaskSelection
from stages.harnesses.pictures import QuestionPictures
from stages.models.recorded import noted_date
from stages.remote.http import server_headers
from stages.rollouts.asking import ask_chats
from stages.serving.client import ChatAnswer
from stages.serving.served_models import ServedModel

MAX_TRIES = 3
MAX_SHOWN = 400
"""Largest number of characters that an error message quotes, such as of lm-eval's own error or a task's columns."""
END_MARK = "qprobetext "
"""Marker after the given beginning of an answer, whose space shows whether the chat template trims texts."""
LM_EVAL_JINJA = lm_eval.utils.env
"""Jinja environment in which lm-eval renders task templates, with access to all of Python."""

SPLITS = {f"{name}_docs": f"{name}_split" for name in ("training", "validation", "test", "fewshot")}
"""Task-file field (`test_split`) by the lm-eval method that reads it (`test_docs`), for error messages."""

Report = Callable[[int, int], None]


class LmEvalModel(LocalCompletionsAPI):
    """Served model in the form of an lm-eval model, which sends lm-eval's requests to the server.

    Prompts are sent as token ids, so that they arrive as the tokenizer here made them. A server that takes none gets
    texts, and answers are cut here where a task ends them, as it may do so elsewhere, or nowhere. Questions with
    pictures are sent as chats, whose tokens the server makes: they are compared with ours.
    """

    add_bos_token: bool
    pictures: QuestionPictures | None = None

    def __init__(self, model: ServedModel, evaluation: Evaluation):
        client = self.client = model.client
        self.context_tokens = model.context_tokens
        super().__init__(
            base_url=f"{client.url}/v1/completions",
            header=server_headers(client.api_key),
            model=client.model,
            tokenizer=str(model.folder),
            tokenizer_backend="huggingface",
            tokenized_requests=model.takes_tokens,
            trust_remote_code=model.trust_remote_code,
            # A chat template writes its own special tokens; without one, the tokenizer adds what its model expects.
            add_bos_token=not evaluation.apply_chat_template,
            max_length=self.context_tokens,
            max_gen_toks=min(DEFAULT_MAX_GEN_TOKS, self.context_tokens // 2),
            num_concurrent=evaluation.concurrent_requests,
            max_retries=MAX_TRIES,
            seed=_seed(evaluation, DEFAULT_OTHER_SEED),
        )
        self.num_asked = 0
        self.num_truncated = 0
        self.num_cut = 0
        self.num_asked_otherwise = 0
        backend = getattr(self.tokenizer, "backend_tokenizer", None)  # those without one encode all as text themselves
        self.content = SpecialTokens(backend, "text") if backend and model.takes_tokens else None
        self.template_date = noted_date(model.folder) or DEFAULT_DATE
        self.folder = model.folder

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a prompt by the chat template as training does: same date and limits, and special tokens as text.

        Raises EvaluationError for messages that the template refuses, DataError for one that is bad or does not end.
        """
        shielded = self.content.shield(chat_history) if self.content else chat_history
        text = render_prompt(self.template, shielded, add_generation_prompt=add_generation_prompt)
        return ChatText.of(text, chat_history, continues=not add_generation_prompt)

    @cached_property
    def template(self) -> ChatTemplate:
        return load_chat_template(self.tokenizer, self.folder, None, self.template_date)

    def tok_encode(
        self, string: str | Sequence[str], left_truncate_len: int | None = None, **options: Any
    ) -> list[Any]:
        """Return token ids of a text, or a list of them for several texts."""
        tokens: list[Any]
        texts = [string] if isinstance(string, str) else string
        if not self.content or not any(map(self.content.is_shielded, texts)):
            tokens = super().tok_encode(string, left_truncate_len, **options)
        elif isinstance(string, str):
            tokens = self.content.encode(string)[0][-(left_truncate_len or 0) :]  # `[-0:]` is the whole list
        else:
            tokens = [self.tok_encode(text, left_truncate_len, **options) for text in texts]
        return tokens

    def generate_until(self, requests: list[Any], **options: Any) -> list[str]:
        self.num_asked += len(requests)
        answers: dict[int, str] = {}
        seeing = [number for number, one in enumerate(requests) if isinstance(one.args[0], PictureQuestion)]
        if seeing:
            answers |= zip(seeing, self._answers_to_chats([requests[number] for number in seeing]), strict=True)
        if texts := [number for number in range(len(requests)) if number not in answers]:
            asked = [requests[number] for number in texts]
            answers |= zip(texts, self._answers_to_texts(asked, **options), strict=True)
        return [answers[number] for number in range(len(requests))]

    def _answers_to_texts(self, requests: list[Any], **options: Any) -> list[str]:
        for prompt, options_of_task in (request.args for request in requests):
            self._count_if_truncated(prompt, options_of_task.get("max_gen_toks", self._max_gen_toks))
        answers: list[str] = super().generate_until(requests, **options)
        return [self.cut(answer, request.args[1]) for answer, request in zip(answers, requests, strict=True)]

    def _answers_to_chats(self, requests: list[Any]) -> list[str]:
        """Return the answers to questions with pictures, of which only those on their way are in memory.

        Raises EvaluationError for a question without room for its answer: a picture cannot be cut.
        """
        for request in requests:
            self._check_room(request)
        answers: dict[int, str] = {}

        def keep(number: int, _: dict[str, Any], answer: ChatAnswer) -> None:
            question, choice = requests[number].args[0], answer.choices[0]
            answers[number] = choice.message.content or ""
            self.num_cut += choice.finish_reason == "length"
            self.num_asked_otherwise += answer.prompt_token_ids not in (None, question.token_ids)
            self.cache_hook.add_partial("generate_until", requests[number].args, answers[number])

        asked = ((number, self._chat(*request.args[:2])) for number, request in enumerate(requests))
        ask_chats(self.client, asked, self._concurrent, keep)
        return [answers[number] for number in range(len(requests))]

    def _chat(self, question: PictureQuestion, options_of_task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request that asks a question with pictures."""
        assert self.pictures
        options = super()._create_payload([], generate=True, gen_kwargs={**options_of_task}, seed=self._seed)
        del options["prompt"]
        if question.continues:
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        messages = self.pictures.messages(question.conversation)
        return {**options, "messages": messages, "return_token_ids": True}

    def _check_room(self, request: Any) -> None:
        question, options = request.args[:2]
        needed = len(question.token_ids or ()) + options.get("max_gen_toks", self._max_gen_toks)
        if needed > self.context_tokens:
            raise EvaluationError(
                f"sample {request.doc_id} of the task {request.task_name} takes up to {needed} tokens with its "
                f"pictures and its answer, but the server takes {self.context_tokens}; raise serving.max_model_len"
            )

    def encode_chat(self, conversation: Conversation) -> tuple[str, list[int]]:
        """Return text and token ids of a question with pictures, as `DocumentTokenizer.encode_prompt`."""
        return self._tokenizer_of_chats.encode_prompt(conversation)

    @cached_property
    def _tokenizer_of_chats(self) -> DocumentTokenizer:
        return DocumentTokenizer(self.folder, None, "assistant", template_date=self.template_date)

    def parse_generations(self, outputs: Any, **options: Any) -> list[str]:
        """Return generated texts, and count those at their token limit, where the server takes stop texts."""
        if self.tokenized_requests:
            responses = outputs if isinstance(outputs, list) else [outputs]
            self.num_cut += sum(
                choice.get("finish_reason") == "length" for response in responses for choice in response["choices"]
            )
        answers: list[str] = super().parse_generations(outputs, **options)
        return answers

    def cut(self, answer: str, options_of_task: Mapping[str, Any]) -> str:
        """Cut an answer before its first stop text, where the server does not do so itself."""
        stops = options_of_task.get("until") or []
        ends = [answer.find(stop) for stop in ([stops] if isinstance(stops, str) else stops)]
        within = [end for end in ends if end >= 0]
        return answer[: min(within)] if within and not self.tokenized_requests else answer

    def _create_payload(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._create_payload(*arguments, **options)
        if not self.tokenized_requests:
            payload.pop("stop", None)
        return payload

    def loglikelihood(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        self.num_asked += len(requests)
        for prompt, continuation in (request.args for request in requests):
            self._count_if_truncated(prompt + continuation, 0)
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, **options)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], **options: Any) -> list[float]:
        """Return log-likelihoods of whole texts, without chat template, with the tokenizer's special tokens."""
        add_bos_token, self.add_bos_token = self.add_bos_token, True
        try:
            answers: list[float] = super().loglikelihood_rolling(requests, **options)
        finally:
            self.add_bos_token = add_bos_token
        return answers

    def _count_if_truncated(self, text: str, generated_tokens: int) -> None:
        """Count a prompt that is too long for the context: lm-eval cuts off its beginning, mostly silently."""
        tokens = self.tok_encode(text, add_special_tokens=self.add_bos_token)
        self.num_truncated += len(tokens) > self.max_length - generated_tokens


class _ReportingHook(CacheHook):
    """Hook into lm-eval's cache that stores each answer as it arrives, and reports how many there are."""

    def __init__(self, answers: CachingLM, model: LmEvalModel, report: Report):
        super().__init__(answers)
        self.model = model
        self.report = report
        self.num_answered = 0

    def add_partial(self, attr: str, req: Iterable[Any] | None, res: Any) -> None:
        if req is not None:  # the windows of a rolling log-likelihood are kept as a whole
            if attr == "generate_until":
                res = self.model.cut(res, [*req][1])  # from the cache, an answer does not pass `generate_until`
            super().add_partial(attr, req, res)
            self.num_answered += 1
            self.report(self.num_answered, self.model.num_asked)


@contextlib.contextmanager
def named_mistakes(names: Iterable[str]) -> Iterator[None]:
    """Turn an error inside lm-eval into an EvaluationError that names the task, one of `names`, and the field at fault.

    A hub that does not answer becomes a TransientError.
    """
    try:
        yield
    except LifecycleError:
        raise
    except Exception as error:
        if _is_of_connection(error):
            raise TransientError(
                f"loading the samples of {', '.join(names)}: their hub does not answer: {type(error).__name__}: "
                f"{shortened(str(error), MAX_SHOWN)}"
            ) from error
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # lm-eval names neither: the innermost method of a task that was at work says both.
        inside = [frame for frame in frames if isinstance(frame.f_locals.get("self"), Task)]
        task = inside[-1].f_locals["self"] if inside else None
        name = getattr(getattr(task, "config", None), "task", None)
        method = inside[-1].f_code.co_name if inside else ""
        field = SPLITS.get(method) or (method if method.startswith(("doc_to_", "process_")) else None)
        where = f"the task {name}" if name else f"the tasks {', '.join(names)}"
        where += f", in `{field}`" if field else ""
        chain = [error, error.__cause__] if error.__cause__ else [error]
        reasons = ": ".join(f"{type(reason).__name__}: {' '.join(str(reason).split())}" for reason in chain)
        raise EvaluationError(f"{where}: {shortened(reasons, MAX_SHOWN)}{_samples_of(task)}; fix the task") from error


def _is_of_connection(error: Exception) -> bool:
    """Return whether an error means that a hub did not answer. "No such dataset" is an answer."""
    if isinstance(error, HfHubHTTPError):
        return error.response is None or error.response.status_code in (408, 429, *range(500, 600))
    return isinstance(error, ConnectionError | TimeoutError | httpx.TransportError | LocalEntryNotFoundError)


def _samples_of(task: Any) -> str:
    """Return a description of a task's splits and columns for an error message; empty if its data were not read."""
    splits = getattr(task, "dataset", None)
    if not isinstance(splits, dict) or not splits:
        return ""
    columns = {str(name): getattr(split, "column_names", None) or [] for name, split in splits.items()}
    shown = "; ".join(f"the split {name} with {', '.join(map(str, names))}" for name, names in columns.items())
    return f" (its data have {shortened(shown, MAX_SHOWN)})"


def render_prompt(template: ChatTemplate, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    """Render messages by the chat template; without `add_generation_prompt`, the last stays open to continue.

    Raises EvaluationError for messages that the template refuses, DataError for one that is bad or does not end.
    """
    try:
        if add_generation_prompt:
            return template.render_text(Conversation(messages), add_generation_prompt=True)
        *before, last = messages  # `last` is the beginning of an answer, which the model continues
        text = template.render_text(Conversation([*before, {**last, "content": last["content"] + END_MARK}]))
    except RowError as error:
        raise EvaluationError(f"a prompt for the model {error}; or say `apply_chat_template: false`") from error
    # Without its space, which a template that trims texts has removed; only the mark kept it from trimming the
    # beginning, too.
    begun, _, rest = text.rpartition(END_MARK.strip())
    return begun if rest.startswith(" ") else begun.rstrip()


def load_tasks(selection: TaskSelection, evaluation: Evaluation) -> dict[str, Any]:
    """Load lm-eval's tasks with datasets, few-shot examples and seeds, in the form that its `evaluate` takes."""
    # Both ways: this process may load trusted tasks and others, one after the other.
    lm_eval.utils.env = LM_EVAL_JINJA if evaluation.trust_task_code else _sandboxed(LM_EVAL_JINJA)
    folder = selection.folder.path.resolve() if selection.folder else None
    # Task files name their data files relative to the task folder, and `datasets` relative to where we are.
    with contextlib.chdir(folder or Path.cwd()), _hub_asked(asked=not selection.offline), encoded_rows():
        manager = TaskManager(include_path=folder, include_defaults=selection.needs_builtin)
        loaded: dict[str, Any] = manager.load(list(selection.names))
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        # A task that says 0 has its examples in the prompt already.
        if own is None or (own != 0 and evaluation.num_fewshot is not None):
            task.set_config(key="num_fewshot", value=evaluation.num_fewshot or 0)
        task.set_fewshot_seed(seed=_seed(evaluation, DEFAULT_OTHER_SEED))
        keep_encoded(task)
    return loaded


@contextlib.contextmanager
def _hub_asked(*, asked: bool) -> Iterator[None]:
    """Allow or forbid requests of `datasets` to the hub, which reads the environment only once, in this context."""
    forbidden = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = forbidden or not asked
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _sandboxed(environment: jinja2.Environment) -> ImmutableSandboxedEnvironment:
    """Return a sandboxed version of lm-eval's Jinja environment, so that task templates cannot run Python code."""
    sandbox = ImmutableSandboxedEnvironment(
        loader=environment.loader,
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    sandbox.filters |= environment.filters
    return sandbox


def evaluate_tasks(
    model: LmEvalModel, tasks: dict[str, Any], evaluation: Evaluation, answers: Path, report: Report
) -> dict[str, Any]:
    """Run lm-eval's tasks against the model, and return its results with a log of each sample.

    answers: file that keeps answers; those in it are not asked again. report: called as report(answered, asked) after
    each answer. Raises EvaluationError if a task leaves no room for a prompt; errors of the connection pass through.
    """
    _check_room(model, tasks)
    model.pictures = show_pictures(tasks["tasks"], evaluation, lambda: model.encode_chat)
    # `evaluate` leaves the global generators to its caller: lm-eval's own `simple_evaluate` would seed them.
    random.seed(_seed(evaluation, DEFAULT_RANDOM_SEED))
    np.random.seed(_seed(evaluation, DEFAULT_OTHER_SEED))
    keeping = CachingLM(model, str(answers))
    model.set_cache_hook(_ReportingHook(keeping, model, report))
    try:
        results: dict[str, Any] = evaluate(
            lm=keeping,
            task_dict=tasks,
            limit=evaluation.limit,
            apply_chat_template=evaluation.apply_chat_template,
            fewshot_as_multiturn=evaluation.apply_chat_template,
        )
    finally:
        keeping.dbdict.close()
    results["samples"] = {task: [*map(sample_of, rows)] for task, rows in results["samples"].items()}
    return results


def _seed(evaluation: Evaluation, default: int) -> int:
    """Return the recipe's evaluation seed, or else `default`, the seed that lm-eval itself gives a random generator."""
    return default if evaluation.seed is None else evaluation.seed


def _check_room(model: LmEvalModel, tasks: dict[str, Any]) -> None:
    for name, task in tasks["tasks"].items():
        generated = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 0)
        if generated >= model.context_tokens - 1:
            raise EvaluationError(
                f"task {name} generates up to {generated} tokens, but the server takes {model.context_tokens} "
                "for prompt and answer together; raise serving.max_model_len"
            )


def items_of(tasks: Mapping[str, Any]) -> Iterator[TaskItem]:
    """Yield the texts of all samples; raise EvaluationError for one that its task cannot write down."""
    for name, task in tasks.items():
        for number, document in enumerate(task.eval_docs):
            try:
                yield _item(name, number, task, document)
            except Exception as error:
                raise EvaluationError(
                    f"reading sample {number} of the task {name}: {type(error).__name__}: {error}; fix the task, or "
                    "leave it out"
                ) from error


def _item(name: str, number: int, task: Any, document: dict[str, Any]) -> TaskItem:
    """Return the texts of one sample: the rendered question, alone and with each answer, and the sample's fields."""
    choices = task.doc_to_choice(document) if task.OUTPUT_TYPE == "multiple_choice" else []
    question, answers = _chosen(task.doc_to_text(document), choices), task.doc_to_target(document)
    answers = [_chosen(answer, choices) for answer in (answers if isinstance(answers, list) else [answers])]
    texts = [text for text in strings_in(document) if not text.startswith("data:")]  # pixels
    within = [text for text in texts if text.strip() and text in question]
    questions = dict.fromkeys([question, *(f"{question} {answer}" for answer in answers), *within])
    return TaskItem(name, number, tuple(questions), tuple(texts))


def _chosen(value: object, choices: list[str]) -> str:
    """Return the text of the answer option that a number stands for, or the value itself as text."""
    if isinstance(value, int) and 0 <= value < len(choices):
        return str(choices[value])
    return str(value)
