"""Completions → what a judge, a model of a server with OpenAI's API, says of them; every answer is kept in a file.

What was answered before a kill is not asked again: the file is read first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from stages.core.errors import DataError, RecipeError, ServerError
from stages.core.redaction import redact
from stages.data.documents import PlainText
from stages.hubs.retry import RetryBackoff, busy_from_status, busy_from_transport
from stages.rewards.judge import PLACE, JudgeReward
from stages.rewards.reward import Completion, RewardContext

CONCURRENT_REQUESTS = 8
NUM_TRIES = 3
"""Of a judge that answers with prose, and is asked for a number again."""
RATING = re.compile(r"rating\W{0,5}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
BETTER = re.compile(r"better\W{0,5}\b(A|B|equal)\b", re.IGNORECASE)
TRIAL = Completion("What is 1 + 2?", "3", 1, "three", {}, PlainText("What is 1 + 2?", ""))
Messages = list[dict[str, str]]


@dataclass
class AskedJudge:
    """One judge, and what it said so far: of the messages that it was asked, as JSON."""

    config: JudgeReward
    http: httpx.Client
    pool: ThreadPoolExecutor
    file: Path
    key: str
    answered: dict[str, str]
    num_requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, config: JudgeReward, name: str, context: RewardContext) -> Iterator[Self]:
        """Raises RecipeError for a variable that is not set."""
        key = os.environ.get(config.key_variable, "") if config.key_variable else ""
        if config.key_variable and not key:
            raise RecipeError(
                f"the environment has no {config.key_variable}, which `key_variable` names; set it, for instance in "
                "`execution.environment`"
            )
        file = context.kept / f"{name}.jsonl"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        pool = ThreadPoolExecutor(CONCURRENT_REQUESTS)
        with httpx.Client(base_url=config.url, headers=headers, timeout=config.timeout_s) as http:
            try:
                yield cls(config, http, pool, file, key, _read(file))
            finally:
                pool.shutdown(cancel_futures=True)

    def try_out(self) -> None:
        """Ask it of an answer that everybody can judge. Raises as `opened` of the reward says."""
        for messages in self._questions(TRIAL):
            self._number(messages, keep=False)

    def scores(self, completions: Sequence[Completion]) -> Iterator[float]:
        """Raises DataError for more requests than the recipe lets it make, and at a completion that the judge gives no
        number; ServerError, TransientError.
        """
        asked = {json.dumps(one) for completion in completions for one in self._questions(completion)}
        if len(new := asked - self.answered.keys()) + self.num_requests > self.config.max_requests:
            raise DataError(
                f"judging {len(completions)} completions takes {len(new)} requests to {self.config.url}, beside "
                f"{self.num_requests} before; `max_requests` is {self.config.max_requests}: raise it, or judge fewer"
            )
        return self.pool.map(self._score, completions)

    def _score(self, completion: Completion) -> float:
        numbers = [self._number(messages) for messages in self._questions(completion)]
        if not self.config.compare:
            return numbers[0]
        first, second = numbers  # as A, then as B
        return (first + 1 - second) / 2

    def _questions(self, completion: Completion) -> list[Messages]:
        config = self.config
        reference = completion.reference or ""
        values = {
            "prompt": completion.prompt,
            "completion": completion.text,
            "least": f"{config.least:g}",
            "largest": f"{config.largest:g}",
            "reference": f"\nA right answer:\n{reference}\n" if reference and not config.template else reference,
        }
        orders = [(completion.text, reference), (reference, completion.text)] if config.compare else [("", "")]
        return [
            [{"role": "user", "content": _filled(config.asked, {**values, "first": first, "second": second})}]
            for first, second in orders
        ]

    def _number(self, messages: Messages, *, keep: bool = True) -> float:
        """What the judge says. Raises DataError when it gives no number, however often it is asked for one."""
        question, asked = json.dumps(messages), messages
        answer = self.answered.get(question)
        for _ in range(NUM_TRIES):
            answer = self._answer(asked) if answer is None else answer
            number = self._read_number(answer)
            if number is not None:
                if keep:
                    self._keep(question, answer, number)
                return number
            remark = f"That did not end with {self._expected}. Write that line alone."
            asked = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": remark}]
            last, answer = answer, None
        raise DataError(
            f"{self.config.served_model} at {self.config.url} answers with prose, {NUM_TRIES} times ({last[-200:]!r}); "
            f"expected {self._expected}; take another model or `template`, or raise `max_tokens`"
        )

    @property
    def _expected(self) -> str:
        if self.config.compare:
            return 'a line "Better: A", "Better: B" or "Better: equal"'
        return f'a line "Rating: " and a number from {self.config.least:g} to {self.config.largest:g}'

    def _read_number(self, answer: str) -> float | None:
        if self.config.compare:
            said = BETTER.findall(answer)
            return {"a": 1.0, "b": 0.0, "equal": 0.5}[said[-1].lower()] if said else None
        ratings = [float(number) for number in RATING.findall(answer)]
        least, largest = self.config.bounds
        return ratings[-1] if ratings and least <= ratings[-1] <= largest else None

    def _answer(self, messages: Messages) -> str:
        """Raises ServerError for a refusal, TransientError when it is gone for good, DataError for one request more
        than `max_requests`.
        """
        with self.lock:
            self.num_requests += 1
            if self.num_requests > self.config.max_requests:
                raise DataError(f"the judge was asked `max_requests` times, {self.config.max_requests}; raise it")
        request = {"model": self.config.served_model, "messages": messages, "max_tokens": self.config.max_tokens}
        backoff = RetryBackoff(f"asking the judge at {self.config.url}")
        while True:
            try:
                response = self.http.post("chat/completions", json={**request, "temperature": 0})
            except httpx.TransportError as error:
                backoff.wait(busy_from_transport(error))
                continue
            if response.is_success:
                return self._said(response)
            busy = busy_from_status(response.status_code, response.headers)
            if busy is None:
                said = self._without_key(response.text)[:500]
                raise ServerError(f"the judge at {self.config.url} answered {response.status_code}: {said!r}")
            backoff.wait(busy)

    def _said(self, response: httpx.Response) -> str:
        try:
            return self._without_key(str(response.json()["choices"][0]["message"]["content"] or ""))
        except (ValueError, LookupError, TypeError) as error:
            said = self._without_key(response.text)[:200]
            raise ServerError(
                f"the judge at {self.config.url} answered {said!r}; expected a chat completion as of OpenAI's API"
            ) from error

    def _without_key(self, text: str) -> str:
        return redact(text, [self.key] if self.key else [])

    def _keep(self, question: str, answer: str, number: float) -> None:
        with self.lock:
            if self.answered.get(question) == answer:
                return
            self.answered[question] = answer
            self.file.parent.mkdir(parents=True, exist_ok=True)
            line: dict[str, Any] = {"messages": json.loads(question), "answer": answer, "number": number}
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def _filled(template: str, values: dict[str, str]) -> str:
    return PLACE.sub(lambda match: values[match[1]], template)


def _read(file: Path) -> dict[str, str]:
    """Answers by what was asked; a kill may have torn the last line, which is taken out of the file."""
    if not file.exists():
        return {}
    whole = file.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    file.write_bytes(whole)
    lines = [json.loads(line) for line in whole.splitlines()]
    return {json.dumps(line["messages"]): line["answer"] for line in lines}
