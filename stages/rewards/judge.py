"""Language model as a judge of answers, on any server with OpenAI's API: config, requests, and the file of its answers.

Every answer is appended to a file; after a kill the file is read first, so that nothing is asked twice. Pictures of a
question are shown to the judge; the file has their digests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from stages.core.errors import DataError, ServerError
from stages.core.fields import Seconds, StrictModel
from stages.core.files import read_json_lines, remove_cut_off_line
from stages.core.lines import counted
from stages.core.redaction import quoted, redact
from stages.data.media.images import as_png_address
from stages.data.messages import Conversation, PlainText
from stages.models.media import SHOWN_TO_ANY
from stages.remote.http import (
    Expected,
    RetryBackoff,
    ask_httpx,
    busy_from_status,
    busy_from_transport,
    httpx_client,
    key_in,
)
from stages.rewards.reward import Completion, Reward, RewardContext, Scores
from stages.serving.client import ChatChoice, Choices, Usage, answer_bytes

if TYPE_CHECKING:
    import httpx

RATE = """Rate an answer to a question, from {least} (useless) to {largest} (could not be better).
{reference}
The question:
{prompt}

The answer:
{completion}

Say in a few sentences what is good and bad about it. Then end with one line, "Rating: " and the number."""
COMPARE = """Which of two answers to a question is better?

The question:
{prompt}

Answer A:
{first}

Answer B:
{second}

Say in a few sentences what is good and bad about them. Then end with one line: "Better: A", "Better: B", or "Better:
equal"."""
PLACE = re.compile(r"\{([a-z]+)\}")
"""Pattern of a placeholder, such as {prompt}, in the question to a judge."""


Scale = tuple[float, float]
"""Least and largest number that a judge may give."""


class JudgeConfig(StrictModel, ABC):
    """Config of a language model as a judge: its server, the question, and limits on its cost."""

    url: str = Field(
        pattern=r"^https?://[^\s/@]+(/\S*)?$", description="Address of the judge's server, including `/v1`."
    )
    served_model: str = Field(min_length=1, description="Name of the judge's model on the server.")
    key_variable: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the server's API key; default: no key."
    )
    template: str | None = Field(
        None,
        min_length=1,
        description="Question to the judge: a text with {prompt} and {completion}, or {prompt}, {first} and {second} "
        "to compare; also {reference}, {least}, {largest}. It must ask for an end `Rating: NUMBER` or "
        "`Better: A`; default: a built-in one.",
    )
    max_requests: PositiveInt = Field(
        10_000,
        description="Limit on requests to the judge; judging that needs more is refused before the first.",
    )
    max_tokens: PositiveInt = Field(512, description="Largest number of tokens in one answer of the judge.")
    timeout_s: Seconds = Field(120.0, description="Time limit of one request to the judge, in seconds.")

    @property
    @abstractmethod
    def scale(self) -> Scale | None:
        """Least and largest rating that the judge may give; None for a judge that compares two answers."""

    @property
    def asked(self) -> str:
        """Text of the question to the judge, with placeholders: the recipe's, or a built-in one."""
        return self.template or (RATE if self.scale else COMPARE)

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.scale and self.scale[0] >= self.scale[1]:
            least, largest = self.scale
            raise ValueError(f"`least` is {least:g}; expected less than `largest`, {largest:g}")
        needed = {"completion"} if self.scale else {"first", "second"}
        known = needed | {"prompt", "reference"} | ({"least", "largest"} if self.scale else set())
        used = set(PLACE.findall(self.asked))
        if used - known or needed - used:
            raise ValueError(
                f"`template` has {', '.join(sorted(used)) or 'nothing'} in braces; expected "
                f"{', '.join(sorted(needed))}, and perhaps {', '.join(sorted(known - needed))}"
            )
        return self


class RatingConfig(JudgeConfig):
    """Config of a judge that rates each answer on a scale."""

    least: float = Field(1.0, allow_inf_nan=False, description="Lowest rating that the judge can give.")
    largest: float = Field(10.0, allow_inf_nan=False, description="Highest rating that the judge can give.")
    max_unjudged_fraction: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="Largest share of answers for which the judge may give no rating; more is an error.",
    )

    @property
    def scale(self) -> Scale:
        return self.least, self.largest


class PairsConfig(JudgeConfig):
    """Config of a judge that compares two answers, and is asked about them in both orders."""

    max_unjudged_fraction: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="Largest share of pairs for which the judge may name no better answer; more is an error.",
    )

    @property
    def scale(self) -> None:
        return None


class JudgeReward(JudgeConfig, Reward):
    """Rating of the completion by a language model; with `compare`, whether it is better than the reference answer.

    A comparison gives 1, 0.5 where they are equal, 0 where it is worse; it is the mean of both orders.
    """

    type: Literal["judge"]
    compare: bool = Field(
        False, description="Have the judge compare the completion with the reference answer, instead of rating it."
    )
    least: float = Field(1.0, allow_inf_nan=False, description="Lowest rating that the judge can give.")
    largest: float = Field(10.0, allow_inf_nan=False, description="Highest rating that the judge can give.")

    @property
    def scale(self) -> Scale | None:
        return None if self.compare else (self.least, self.largest)

    @property
    def bounds(self) -> Scale:
        return self.scale or (0.0, 1.0)

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        if reference is None and (self.compare or "reference" in PLACE.findall(self.template or "")):
            return "has no right answer"
        return None

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """Ask the judge about a trivial answer, to see that it works, and yield the function that scores completions.

        Raises ServerError for a refusal, or prose; TransientError for no answer; RecipeError for an unset variable.
        """
        with JudgeClient.opened(self, context.kept / f"{name}.jsonl") as judge:
            judge.try_out()
            yield judge.scores


CONCURRENT_REQUESTS = 8
PARAGRAPH = "\n\n"
NUM_TRIES = 3
"""Largest number of times that a judge is asked the same question while its answers contain no rating."""
# "Rating (1 to 10): **8**": a remark in brackets, Markdown around the colon and the number,
# a full-width colon and a true minus sign.
RATING = re.compile(r"\brating(?:\s*\([^)\n]{0,40}\))?[^\w\n]{0,5}[:：=]\W{0,5}?([-−]?\d+(?:\.\d+)?)", re.IGNORECASE)
BETTER = re.compile(
    # Group 1 takes part only within a line, and chooses in (?(1)…|…) what may follow the verdict.
    r"(?:^[^\w\n]*|(\b))better[^\w\n]{0,5}[:：=]\W{0,8}(?:answer\s+)?\b(A|B|equal)\b"
    r"(?(1)[^\w\n]*$|(?=[^\w\n/&?]*$|[*_\"'`)\]]*\s?[.,;:!(–—-]))",
    re.IGNORECASE | re.MULTILINE,
)
"""Pattern of a judge's decision, "Better: A"; not of "Answer B is better. A is wrong.", which lacks the colon.

At the beginning of a line a remark may follow the verdict; within a line it must be the end."""
TRIAL = Completion("What is 1 + 2?", "3", 1, "three", {}, PlainText("What is 1 + 2?", ""))
"""Question and answer that any judge can rate, to test that a judge works."""
TRIAL_PIXELS = 64
"""Width and height of the picture by which a judge shows that it sees."""
MAX_PICTURE_CHARACTERS = 48 << 20
"""Most characters of all pictures in one question to a judge, as base64; servers refuse larger requests."""
TOKENS = ("prompt", "completion")
"""Kinds of tokens in the `usage` of a judge's response, as the API names them."""
Messages = list[dict[str, Any]]
"""Messages to a judge in the form of OpenAI's API, with `sha256:…` in place of each picture's address."""
Content = str | list[dict[str, Any]]
"""Content of a message: text, or parts of which some are pictures."""
DIGEST = "sha256:"
Tokens = dict[str, int]
"""Number of tokens in a judge's request and response, by kind (`TOKENS`); 0 where the server does not say."""


@dataclass(frozen=True)
class JudgeAnswer:
    """One answer of a judge. number: its rating or verdict; None where it has none, though asked again."""

    text: str
    number: float | None


@dataclass(frozen=True)
class JudgeScore:
    """Judge's score for one completion, None without a number. answers: the judge's texts, one for each question."""

    score: float | None
    answers: tuple[str, ...]


@dataclass
class JudgeClient:
    """Judge in use: the connection to its server. answered: answers by the messages asked, as JSON.

    addresses: functions that return a picture's `data:` address, by its `sha256:…`.
    """

    config: JudgeConfig
    http: httpx.Client
    pool: ThreadPoolExecutor
    file: Path
    key: str
    answered: dict[str, JudgeAnswer]
    num_requests: int
    addresses: dict[str, Callable[[], str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, config: JudgeConfig, file: Path) -> Iterator[Self]:
        """Connect to the judge's server and read the answers in `file`, to which new answers are appended.

        Raises RecipeError for an environment variable that is not set.
        """
        key = key_in(config.key_variable, "key_variable")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        pool = ThreadPoolExecutor(CONCURRENT_REQUESTS)
        with httpx_client(base_url=config.url, headers=headers, timeout=config.timeout_s) as http:
            try:
                kept = kept_lines(file)
                yield cls(config, http, pool, file, key, _answered(kept), len(kept))
            finally:
                pool.shutdown(cancel_futures=True)

    def try_out(self, num_images: int = 0) -> None:
        """Ask the judge about a trivial answer, storing nothing; raises as `JudgeReward.opened` does.

        num_images: of the later question with the most; the judge must take as many. Raises DataError for one that
        takes a picture without reading it.
        """
        (text, *_) = questions = self._questions(TRIAL)
        for question in questions:
            self._number(question, keep=False)
        if num_images:
            self._try_out_pictures(text, num_images)

    def _try_out_pictures(self, text: Messages, num_images: int) -> None:
        """Ask a question with pictures before it. text: the same question without them."""
        from PIL import Image

        place = f"{DIGEST}of the trial"
        self.addresses[place] = lambda: as_png_address(Image.new("RGB", (TRIAL_PIXELS, TRIAL_PIXELS), "red"))
        parts = [*[_picture(place)] * num_images, _text(text[0]["content"])]
        what, pictures = f"{self.config.served_model} at {self.config.url}", counted(num_images, "picture")
        try:
            (_, without), (_, seen) = self._answer(text), self._answer([{"role": "user", "content": parts}])
        except ServerError as error:
            raise ServerError(
                f"{what} takes no question with {pictures}, as it will be asked: {error}; take a judge that sees, and "
                "a server that takes as many in a request"
            ) from error
        if 0 < seen["prompt"] <= without["prompt"]:
            raise DataError(
                f"{what} counts {seen['prompt']} tokens in a question with {pictures}, and {without['prompt']} in it "
                "without: it leaves them out; take a judge that sees"
            )

    def scores(self, completions: Sequence[Completion]) -> Iterator[float]:
        """Return the judge's score of each completion, asking for those that it has not judged yet.

        Raises DataError beyond `max_requests`, and at a completion without a number; ServerError, TransientError.
        """
        self._check_cost(completions)
        # starts all at once, and yields in the order of the completions
        return self.pool.map(self._score, completions)

    def opinions(self, completions: Sequence[Completion]) -> Iterator[JudgeScore]:
        """Return the judge's score of each completion, None without a number, and its answers; else as `scores`."""
        self._check_cost(completions)
        return self.pool.map(self._opinion, completions)

    def _check_cost(self, completions: Sequence[Completion]) -> None:
        asked = {json.dumps(one) for completion in completions for one in self._questions(completion)}
        if len(new := asked - self.answered.keys()) + self.num_requests > self.config.max_requests:
            raise DataError(
                f"judging {len(completions)} completions takes {len(new)} requests to {self.config.url}, beside "
                f"{self.num_requests} before; `max_requests` is {self.config.max_requests}: raise it, or judge fewer"
            )

    def _opinion(self, completion: Completion) -> JudgeScore:
        answers = [self._answer_to(messages) for messages in self._questions(completion)]
        # A comparison with one verdict missing has no score: one order alone would keep the judge's bias for a place.
        numbers = [one.number for one in answers if one.number is not None]
        score = self._combined(numbers) if len(numbers) == len(answers) else None
        return JudgeScore(score, tuple(one.text for one in answers))

    def _score(self, completion: Completion) -> float:
        return self._combined([self._number(messages) for messages in self._questions(completion)])

    def _combined(self, numbers: Sequence[float]) -> float:
        """Return the score from a judge's numbers: the one rating, or the mean over both orders of a comparison."""
        if self.config.scale:
            return numbers[0]
        first, second = numbers  # as A, then as B
        return (first + 1 - second) / 2

    def _questions(self, completion: Completion) -> list[Messages]:
        config = self.config
        reference = completion.reference or ""
        least, largest = config.scale or (0, 1)
        values = {
            "prompt": self._asked(completion),
            "completion": completion.text,
            "least": f"{least:g}",
            "largest": f"{largest:g}",
            "reference": f"\nA right answer:\n{reference}\n" if reference and not config.template else reference,
        }
        orders = [(completion.text, reference), (reference, completion.text)]
        return [
            [{"role": "user", "content": _filled(config.asked, {**values, "first": first, "second": second})}]
            for first, second in orders[: 1 if config.scale else 2]
        ]

    def _asked(self, completion: Completion) -> Content:
        """Return a completion's prompt as the judge sees it. Raises DataError for pictures that are not at hand."""
        document = completion.document
        if isinstance(document, PlainText) or not document.media:
            return completion.prompt
        if completion.address is None or {one.kind for one in document.media} - SHOWN_TO_ANY:
            kinds = ", ".join(sorted({f"{medium.kind}s" for medium in document.media}))
            raise DataError(f"has {kinds}, which are not shown to a judge here; leave out the judge, or these rows")
        places = []
        for medium in document.media:
            places.append(f"{DIGEST}{medium.sha256}")
            self.addresses[places[-1]] = functools.partial(completion.address, medium)
        return question_parts(document, places)

    def _number(self, messages: Messages, *, keep: bool = True) -> float:
        """Return the judge's rating or choice as a number; raise DataError if several requests give none."""
        answer = self._answer_to(messages, keep=keep)
        if answer.number is None:
            raise DataError(
                f"{self.config.served_model} at {self.config.url} answers with prose, {NUM_TRIES} times "
                f"({_end_of(answer.text)}); expected {self._expected}; take another model or `template`, or raise "
                "`max_tokens`"
            )
        return answer.number

    def _answer_to(self, messages: Messages, *, keep: bool = True) -> JudgeAnswer:
        """Ask the judge until its answer contains a number or the tries run out; return the last answer."""
        question, asked, text = json.dumps(messages), messages, ""
        if known := self.answered.get(question):
            return known
        for _ in range(NUM_TRIES):
            text, usage = self._answer(asked)
            answer = JudgeAnswer(text, self.read_number(text))
            if keep:
                self._keep(question, answer, usage)
            if answer.number is not None:
                return answer
            remark = f"That did not end with {self._expected}. Write that line alone."
            asked = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": remark}]
        return JudgeAnswer(text, None)

    @property
    def _expected(self) -> str:
        if self.config.scale is None:
            return 'a line "Better: A", "Better: B" or "Better: equal"'
        least, largest = self.config.scale
        return f'a line "Rating: " and a number from {least:g} to {largest:g}'

    def read_number(self, answer: str) -> float | None:
        """Return the rating in a judge's answer, or its choice: 1 for A, 0 for B, 0.5 for equal; None if without."""
        if self.config.scale is None:
            # the last one counts: before it the judge may quote the question, or weigh both sides
            verdicts = [match[2].lower() for match in BETTER.finditer(answer)]
            return {"a": 1.0, "b": 0.0, "equal": 0.5}[verdicts[-1]] if verdicts else None
        ratings = [float(number.replace("−", "-")) for number in RATING.findall(answer)]
        least, largest = self.config.scale
        return ratings[-1] if ratings and least <= ratings[-1] <= largest else None

    def _answer(self, messages: Messages) -> tuple[str, Tokens]:
        """Send one request to the judge, repeating it while the server is busy; return its text and token usage.

        Raises ServerError for a refusal, TransientError when the server is gone, DataError beyond `max_requests`.
        """
        import httpx  # a recipe is read without it

        with self.lock:
            # counted here too: `_check_cost` knows no repeats after answers without a number
            self.num_requests += 1
            if self.num_requests > self.config.max_requests:
                raise DataError(f"the judge was asked `max_requests` times, {self.config.max_requests}; raise it")
        options = {"max_tokens": self.config.max_tokens, "temperature": 0}
        request = {"model": self.config.served_model, "messages": self._shown(messages), **options}
        server = f"the judge at {self.config.url}"
        expected = Expected(server, answer_bytes(request), self.config.timeout_s, key=self.key)
        backoff = RetryBackoff(f"asking {server}")
        while True:
            try:
                answer = ask_httpx(self.http, expected, "POST", "chat/completions", json=request)
                busy = busy_from_status(answer.status, answer.headers)
                if busy is None:
                    return self._read(answer.parsed(Choices[ChatChoice]))
            except (httpx.TransportError, TimeoutError) as error:
                busy = busy_from_transport(error)
            backoff.wait(busy)

    def _shown(self, messages: Messages) -> Messages:
        """Return messages with the pictures themselves. Raises DataError for too much, or a picture that is gone."""
        addresses: dict[str, str] = {}

        def shown(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] == "text":
                return part
            place = part["image_url"]["url"]
            addresses.setdefault(place, self.addresses[place]())
            return _picture(addresses[place])

        whole = [
            {**one, "content": [*map(shown, one["content"])]} if isinstance(one["content"], list) else one
            for one in messages
        ]
        if (num := sum(map(len, addresses.values()))) > MAX_PICTURE_CHARACTERS:
            raise DataError(
                f"a question to {self.config.served_model} has {counted(len(addresses), 'picture')} of {num:,} "
                f"characters in base64; expected at most {MAX_PICTURE_CHARACTERS:,}: scale them down"
            )
        return whole

    def _read(self, answer: Choices[ChatChoice]) -> tuple[str, Tokens]:
        used = answer.usage or Usage()
        usage = {"prompt": used.prompt_tokens or 0, "completion": used.completion_tokens or 0}
        return redact(answer.choices[0].message.content or "", [self.key] if self.key else []), usage

    def _keep(self, question: str, answer: JudgeAnswer, usage: Tokens) -> None:
        """Append a judge's answer to its file, even one without a number, since its tokens count as cost."""
        with self.lock:
            # Two threads may have asked the same question at once; the first number is kept.
            if question in self.answered:
                return
            if answer.number is not None:
                self.answered[question] = answer
            self.file.parent.mkdir(parents=True, exist_ok=True)
            line = {"messages": json.loads(question), "answer": answer.text, "number": answer.number, "tokens": usage}
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def bounded(
    judge: JudgeClient, completions: Sequence[Completion], what: str, max_fraction: float
) -> Iterator[JudgeScore]:
    """Yield a judge's scores of all completions; raise DataError once more than `max_fraction` are missing."""
    unjudged: list[JudgeScore] = []
    for opinion in judge.opinions(completions):
        unjudged += [opinion] if opinion.score is None else []
        if len(unjudged) > max_fraction * len(completions):
            raise DataError(
                f"judging {what}: {judge.config.served_model} at {judge.config.url} gave no number for {len(unjudged)} "
                f"of {len(completions)}, such as {_end_of(unjudged[-1].answers[-1])}; `max_unjudged_fraction` is "
                f"{max_fraction:g}: take another model or `template`, or raise `max_tokens`"
            )
        yield opinion


def cost_metrics(file: Path) -> dict[str, float]:
    """Return the cost of a judge over all attempts, its requests and tokens, from the file of its answers."""
    lines = kept_lines(file)
    tokens = {f"judge_{name}_tokens": float(sum(line["tokens"][name] for line in lines)) for name in TOKENS}
    return {"judge_requests": float(len(lines)), **tokens}


def _end_of(answer: str) -> str:
    """Return the last line of a judge's answer, where a rating or verdict should be, for an error message."""
    return quoted(answer.strip().rpartition("\n")[2], 200)


def question_parts(document: Conversation, addresses: Sequence[str]) -> list[dict[str, Any]]:
    """Return a conversation's texts, and its pictures in their places. addresses: of its pictures, in their order."""
    remaining = iter(addresses)
    parts: list[dict[str, Any]] = []
    for number, message in enumerate(document.messages):
        role = f"{message['role']}: " if len(document.messages) > 1 else ""
        content = message["content"]
        parts.append(_text(f"{PARAGRAPH if number else ''}{role}{'' if isinstance(content, list) else content}"))
        for part in content if isinstance(content, list) else ():
            parts.append(part if part["type"] == "text" else _picture(next(remaining)))
    return _joined(parts)


def _picture(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _joined(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parts with neighbouring texts in one, and without empty ones."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = _text(joined[-1]["text"] + part["text"])
        elif part["type"] != "text" or part["text"]:
            joined.append(part)
    return joined


def _filled(template: str, values: Mapping[str, Content]) -> Content:
    """Return a template with values in its places: a text, or parts if one of the values has pictures."""
    if isinstance(prompt := values["prompt"], str):
        return PLACE.sub(lambda match: str(values[match[1]]), template)
    pieces = PLACE.split(template)  # texts, and between them the places' names
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        if number % 2 and piece == "prompt":
            parts += prompt
        else:
            parts.append(_text(str(values[piece]) if number % 2 else piece))
    return _joined(parts)


def kept_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a judge's file of answers; remove the last line if a killed process wrote it only partly."""
    remove_cut_off_line(file)
    return read_json_lines(file) if file.exists() else []


def _answered(lines: Sequence[Mapping[str, Any]]) -> dict[str, JudgeAnswer]:
    """Return those of a judge's stored answers that contain a number, by the messages sent to the judge (as JSON)."""
    numbered = (line for line in lines if line["number"] is not None)
    return {json.dumps(line["messages"]): JudgeAnswer(line["answer"], line["number"]) for line in numbered}
