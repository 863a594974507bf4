"""Evaluation by BFCL: the served model answers its questions, turn by turn, and its own checkers judge the answers.

A model whose chat template writes calls of tools in a known format gets the tools there (BFCL's function-calling mode);
another one reads them in BFCL's system prompt, and answers with calls in Python (its prompt mode).
"""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stages.core.contract import StageContext
from stages.core.errors import DataError, EvaluationError
from stages.core.fields import StrictModel
from stages.core.files import read_json_lines, remove_cut_off_line
from stages.core.intervals import NUM_CUT
from stages.core.program import Program, ProgramEndedError, ProgramError
from stages.data.config import DEFAULT_DATE
from stages.data.messages import Conversation, Message, RowError, Tool, make_message, parse_tools
from stages.data.templates import TemplateLimitError
from stages.data.tokenizer import DocumentTokenizer
from stages.harnesses.bfcl.categories import METRIC
from stages.harnesses.harness import Evaluation, Results
from stages.harnesses.installation import InstalledHarness
from stages.harnesses.question_sets import hashes, sampling_options
from stages.models.call_formats import call_format
from stages.models.model_folder import end_tokens
from stages.models.recorded import noted_date
from stages.rollouts.acting import PLAYED_TOGETHER, sample_turns
from stages.rollouts.asking import request_seed
from stages.rollouts.environments.calls import PARSERS
from stages.rollouts.environments.calls import action as read_action
from stages.rollouts.environments.continuation import call_id
from stages.rollouts.environments.environment import Action
from stages.rollouts.environments.episodes import SampledTurn, TurnRequest
from stages.serving.served_models import ServedModel

PROGRAM = "stages.harnesses.bfcl.program"
QUESTION_S = 20.0
"""Time limit of what is done with one answer: running its calls, or checking it."""
READING_S = 300.0
MEMORY_BYTES = 2 << 30
TOOLS_MODE, PROMPT_MODE = "tools", "prompt"
THOUGHTS_END = "</think>"


class BoundError(Exception):
    """Raised where an answer cannot be judged: it takes too much time or memory, or breaks what reads it."""


class Checker:
    """Client of BFCL's program, for one thread at a time."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def questions(self, category: str, limit: int | None) -> list["Question"]:
        found = self._ask({"questions": [category, limit]}, READING_S)
        return [Question.of(category, one) for one in found]

    def steps(self, question: "Question", answers: Sequence[Any]) -> list[str] | None:
        """Return what tools answer to the last answer's calls; None if it calls nothing. Raises BoundError."""
        found = self._alone({"steps": [question.category, question.identity, list(answers)]})
        results: list[str] | None = found["results"]
        return results

    def verdict(self, question: "Question", answer: Any) -> dict[str, Any]:
        """Return the verdict of BFCL's checker: `valid`, `error_type` and `error`. Raises BoundError."""
        return self._alone({"verdict": [question.category, question.identity, answer]})

    def _alone(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = self._ask(asked, 2 * QUESTION_S)
        if "failed" in found:
            raise BoundError(found["failed"])
        answer: dict[str, Any] = found["answer"]
        return answer

    def _ask(self, asked: dict[str, Any], timeout_s: float) -> Any:
        try:
            return self._program.ask(asked, timeout_s)
        except TimeoutError as error:
            raise EvaluationError(f"BFCL's program gave no answer within {timeout_s:g} s") from error
        except (ProgramError, ProgramEndedError) as error:
            raise EvaluationError(f"BFCL's program: {error}; expected an answer to {next(iter(asked))}") from error


@dataclass(frozen=True)
class Question:
    """Question of BFCL. turns: messages of the user by turn. tools: by the number of the turn from which they count.

    most_steps: answers with calls in a turn, after which it is broken off; 0 for one answer whose calls are not run.
    expected: the right answers, as the checkers read them; None where none is right, or any call.
    """

    category: str
    identity: str
    turns: list[list[Message]]
    tools: dict[int, tuple[Tool, ...]]
    most_steps: int
    expected: Any

    @classmethod
    def of(cls, category: str, found: dict[str, Any]) -> "Question":
        tools = {int(number): parse_tools({"tools": tools}) for number, tools in found["tools"].items()}
        return cls(category, found["id"], found["turns"], tools, found["most_steps"], found["expected"])

    @property
    def asked(self) -> dict[str, Any]:
        return {"id": self.identity, "turns": self.turns, "tools": self.tools}


class Answered(StrictModel):
    """Answers to a question, as stored. answer: as BFCL's checkers read it. texts: of each answer of the model.

    problem: the reason why it was broken off, and cannot be right. num_cut: answers cut off at `max_tokens`.
    """

    category: str
    identity: str
    answer: Any
    texts: list[str]
    problem: str | None = None
    num_cut: int = 0


@dataclass
class Talk:
    """Conversation about one question, as far as it has come."""

    question: Question
    messages: list[Message] = field(default_factory=list)
    tools: tuple[Tool, ...] = ()
    answers: list[list[Any]] = field(default_factory=list)
    """Answers by turn, as BFCL's checkers read them."""
    run: list[Any] = field(default_factory=list)
    """Answers whose calls were run, of all turns."""
    texts: list[str] = field(default_factory=list)
    num_cut: int = 0
    problem: str | None = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.begin_turn()

    def begin_turn(self) -> None:
        """Let the user say what comes next, or end the conversation if that was all."""
        number = len(self.answers)
        if number == len(self.question.turns):
            self.is_over = True
            return
        self.messages += self.question.turns[number]
        self.tools = self.question.tools.get(number, self.tools)
        self.answers.append([])

    def add(self, turn: SampledTurn, action: Action | None, steps: Callable[[Sequence[Any]], list[str] | None]) -> None:
        """Add an answer of the model, and what its calls give. action: what was read in it; None of one cut off."""
        self.texts.append(turn.text)
        self.num_cut += action is None
        action = action or Action(turn.text)
        answer = [{call.name: json.dumps(call.arguments)} for call in action.calls] or action.text
        self.answers[-1].append(answer)
        if not self.question.most_steps:
            self.is_over = True
            return
        try:
            results = steps([*self.run, answer])
        except BoundError as error:
            self.break_off(str(error))
            return
        message, shown = _with_identifiers(action)
        self.messages.append(message)
        if results is None:
            self.begin_turn()
            return
        self.run.append(answer)
        if shown:
            self.messages += [{**one, "content": result} for one, result in zip(shown, results, strict=True)]
        else:
            self.messages += [make_message("user", result) for result in results]
        # As BFCL counts them. Its checker refuses an answer with fewer turns than the question has.
        self.is_over = len(self.answers[-1]) > self.question.most_steps

    def break_off(self, problem: str) -> None:
        self.problem, self.is_over = problem, True

    @property
    def outcome(self) -> Answered:
        answer = self.answers if self.question.most_steps else self.answers[0][0]
        return Answered(
            category=self.question.category,
            identity=self.question.identity,
            answer=answer,
            texts=self.texts,
            problem=self.problem,
            num_cut=self.num_cut,
        )


def _with_identifiers(action: Action) -> tuple[Message, list[Message]]:
    """Return a turn's message whose calls have identifiers, and the beginnings of the messages that answer them."""
    message = action.message
    if not action.calls:
        return message, []
    calls = [{"id": call_id(number), **call} for number, call in enumerate(message["tool_calls"])]
    shown = [
        {"role": "tool", "name": call.name, "tool_call_id": call_id(number)} for number, call in enumerate(action.calls)
    ]
    return {**message, "tool_calls": calls}, shown


def asked(
    installed: InstalledHarness, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
) -> Results:
    """Ask the served model the questions of all categories, and return BFCL's verdicts as scores and samples.

    Raises EvaluationError for questions that the model's context or template cannot hold, ServerError, TransientError.
    """
    model = await_model()
    try:
        asking = Asking(evaluation, context, model)
        context.milestone(f"asking in BFCL's {asking.mode} mode: {asking.why}")
        work = context.scratch / f"bfcl-{context.version}"
        (work / "package").mkdir(parents=True, exist_ok=True)
        limits = {
            "folder": str(work / "package"),
            "with_tools": asking.mode == TOOLS_MODE,
            "timeout_s": QUESTION_S,
            "memory_bytes": MEMORY_BYTES,
        }
        context.doing("importing BFCL")
        with Program(PROGRAM, json.dumps(limits), python=installed.python) as program:
            samples, num_cut = {}, 0
            for task in evaluation.tasks:
                checker = Checker(program)
                questions = checker.questions(task, evaluation.limit)
                answers = asking.answered(questions, checker, work / f"{task}.jsonl")
                samples[task] = list(_judged(checker, questions, answers, context))
                num_cut += sum(one.num_cut for one in answers)
    except (DataError, RowError, TemplateLimitError) as error:
        raise EvaluationError(f"asking BFCL's questions: {error}") from error
    shared = f"bfcl-eval {installed.version}, {asking.mode} mode, seed {evaluation.seed or 0}"
    return Results(_scores(evaluation, samples, shared), samples, {NUM_CUT: float(num_cut)})


class Asking:
    """Asker of one served model. mode: how it is shown tools. why: the reason, for people."""

    def __init__(self, evaluation: Evaluation, context: StageContext, model: ServedModel) -> None:
        """Load the model's tokenizer. Raises DataError for a chat template that cannot be used."""
        self._model, self._context = model, context
        self._options = sampling_options(evaluation, num_samples=1, seed=evaluation.seed or 0)
        date = noted_date(model.asked_folder) or DEFAULT_DATE
        self._tokenizer = DocumentTokenizer(model.asked_folder, None, "assistant", template_date=date)
        self._special = frozenset(self._tokenizer.special_tokens)
        self._ends = end_tokens(model.folder)
        self._form = call_format(self._tokenizer.template.source, self._special)
        name = self._tokenizer.template.name
        if self._form in PARSERS:
            self.mode, self.why = TOOLS_MODE, f"{name} shows tools, and calls as {self._form} reads them"
        elif self._form:
            self.mode = PROMPT_MODE
            self.why = f"{name} writes calls as vLLM's parser {self._form} reads them; expected {', '.join(PARSERS)}"
        else:
            self.mode, self.why = PROMPT_MODE, f"{name} shows no known format of calls"

    def answered(self, questions: Sequence[Question], checker: Checker, kept: Path) -> list[Answered]:
        """Return the answers to questions in order, some at a time. kept: file with those of an earlier attempt."""
        remove_cut_off_line(kept)
        lines = read_json_lines(kept) if kept.exists() else []
        outcomes = {one.identity: one for one in map(Answered.model_validate, lines)}
        missing = [one for one in questions if one.identity not in outcomes]
        size = self._options.concurrent_requests * PLAYED_TOGETHER
        with kept.open("a", encoding="utf-8") as stream:
            for begin in range(0, len(missing), size):
                for outcome in self._talked([Talk(one) for one in missing[begin : begin + size]], checker):
                    outcomes[outcome.identity] = outcome
                    stream.write(outcome.model_dump_json() + "\n")
                stream.flush()
                self._context.progress(len(outcomes), len(questions), "answers", f"asking {questions[0].category}")
        return [outcomes[one.identity] for one in questions]

    def _talked(self, talks: Sequence[Talk], checker: Checker) -> Iterator[Answered]:
        while going := [talk for talk in talks if not talk.is_over]:
            requests = {number: request for number, talk in enumerate(going) if (request := self._request(talk))}
            turns = sample_turns(self._model, self._options, list(requests.values()))
            for number, turn in zip(requests, turns, strict=True):
                talk = going[number]
                talk.add(turn, self._read(talk, turn), partial(checker.steps, talk.question))
        yield from (talk.outcome for talk in talks)

    def _read(self, talk: Talk, turn: SampledTurn) -> Action | None:
        """Return what the model did in a turn, after its thoughts; None for a turn that was cut off."""
        if turn.truncated or not turn.token_ids or turn.token_ids[-1] not in self._ends:
            return None
        text = self._tokenizer.decode(turn.token_ids[:-1])
        if THOUGHTS_END in text:
            text = text.rpartition(THOUGHTS_END)[2].lstrip("\n")
        parse = PARSERS[self._form](talk.tools, self._special) if self._form and self.mode == TOOLS_MODE else None
        return read_action(text, parse)

    def _request(self, talk: Talk) -> TurnRequest | None:
        """Return the request for the next answer; None where a conversation has outgrown the context, which ends it."""
        identity, most = talk.question.identity, self._options.max_tokens
        try:
            _, token_ids = self._tokenizer.encode_prompt(Conversation(talk.messages, tools=talk.tools))
        except RowError as error:
            if not talk.texts:
                raise EvaluationError(f"asking {identity} of BFCL: the chat template {error}") from error
            talk.break_off(f"the chat template {error}")
            return None
        room = self._model.context_tokens - len(token_ids)
        if room < most and not talk.texts:
            raise EvaluationError(
                f"asking {identity} of BFCL: it has {len(token_ids)} tokens, which leave {room} of the server's "
                f"{self._model.context_tokens} for an answer; expected generation.max_tokens, {most}: raise "
                "serving.max_model_len, or lower that"
            )
        if room < 1:
            talk.break_off(f"the conversation has outgrown the server's {self._model.context_tokens} tokens")
            return None
        place = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
        return TurnRequest(token_ids, request_seed(self._options.seed, place, len(talk.texts)), min(most, room))


def _judged(
    checker: Checker, questions: Sequence[Question], answers: Sequence[Answered], context: StageContext
) -> Iterator[dict[str, Any]]:
    """Yield a row for each question, with the verdict on its answer."""
    for number, (question, answered) in enumerate(zip(questions, answers, strict=True)):
        verdict: dict[str, Any] = {"valid": False, "error_type": "broken_off", "error": answered.problem}
        try:
            if answered.problem is None:
                verdict = checker.verdict(question, answered.answer)
        except BoundError as error:
            verdict = {"valid": False, "error_type": "unreadable", "error": str(error)}
        context.progress(number + 1, len(questions), "answers", f"judging {question.category}")
        yield {
            "doc_id": number,
            "filter": "none",
            "doc": question.asked,
            "question": "\n\n".join(str(one["content"]) for turn in question.turns for one in turn),
            "target": question.expected,
            "resps": [[text] for text in answered.texts],
            "filtered_resps": answered.answer,
            **hashes({"doc": question.asked, "prompt": question.asked, "target": question.expected}),
            METRIC: float(verdict["valid"]),
            "error_type": verdict["error_type"],
            "error": verdict["error"],
        }


def _scores(evaluation: Evaluation, samples: dict[str, list[dict[str, Any]]], shared: str) -> dict[str, Any]:
    """Return mean accuracies in the harnesses' schema. shared: what paired evaluations must have in common."""
    generation = evaluation.generation.model_dump(mode="json")
    return {
        "results": {task: _means([row[METRIC] for row in rows]) for task, rows in samples.items()},
        "configs": {task: {"generation_kwargs": generation} for task in samples},
        "versions": dict.fromkeys(samples, shared),
        "n-shot": dict.fromkeys(samples, 0),
        "higher_is_better": {task: {METRIC: True} for task in samples},
    }


def _means(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over questions, and its standard error, s / √n."""
    scores = {f"{METRIC},none": statistics.fmean(values)}
    if len(values) > 1:
        scores[f"{METRIC}_stderr,none"] = statistics.stdev(values) / math.sqrt(len(values))
    return scores
