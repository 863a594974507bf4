"""People who ask a model server by keys of their own: who may ask now, how many tokens each has used, who asked what.

In a folder of the lifecycle home, beside the keys:

tokens-DAY-PROCESS.json  tokens by name that one proxy has counted on one day (UTC); a quota holds for the sum
audit-DAY-PROCESS.jsonl  one line for each request: when, who, model, route, status, tokens; no text of it. Requests
                         with keys that do not hold are counted: one line for equal ones of a quarter of a second

A thread reads and writes them, several times a second, so that answers wait for no disk; a killed proxy has lost what
came since. A disk that is full costs what could not be written, and the log says so.
"""

import json
import os
import secrets
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from aiohttp import web

from stages.core.errors import StoreError
from stages.core.files import write_atomically
from stages.core.lines import print_timed
from stages.serving.exchange import CLIENT_CLOSED, Exchange
from stages.serving.http_messages import error
from stages.serving.person_keys import PersonKey, name_in, read_keys

LOOK_INTERVAL_S = 0.25
MAX_UNWRITTEN = 10_000
"""Largest number of audit lines that wait for a disk; with more, the oldest are lost."""
BYTES_A_TOKEN = 4
"""Bytes of a request that are counted as one token where the engine has not counted them."""
MAX_NAME_CHARACTERS = 200
MAX_BYTES = 2**22
ABSENT = PersonKey("", "", "", "", revoked="always")


class People:
    """Keys, quotas and audit log of one proxy; a context manager, whose thread keeps them in step with the folder."""

    def __init__(self, folder: Path) -> None:
        """Read the keys. Raises StoreError for a damaged file."""
        self._folder = folder
        self._keys = read_keys(folder)
        self._process = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._used: dict[str, Counter[str]] = {}  # day → tokens by name, of this process
        self._written: dict[str, dict[str, int]] = {}
        self._used_by_others: Counter[str] = Counter()  # today
        self._lines: deque[tuple[str, str]] = deque(maxlen=MAX_UNWRITTEN)
        self._wrong_keys: Counter[tuple[str | None, str | None]] = Counter()  # by name and route
        self._under_way: set[tuple[PersonKey, Callable[[], object]]] = set()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="people", daemon=True)
        self._trouble = ""

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    def of(self, authorization: bytes) -> PersonKey | None:
        """Return the key of a person that a request's `Authorization` carries; None if no such key holds."""
        scheme, _, sent = authorization.decode("latin-1").partition(" ")
        name, secret = name_in(sent)
        key = self._keys.get(name, ABSENT)
        return key if key.opens(secret) and scheme == "Bearer" else None

    def refusal(self, name: str, route: str) -> web.Response | None:
        """Return the answer for a person whose tokens of today are used up; None for others."""
        key = self._keys.get(name, ABSENT)
        used = self._used.get(today(), Counter())[name] + self._used_by_others[name]
        if key.tokens_a_day is None or used < key.tokens_a_day:
            return None
        now = datetime.now(UTC)
        renewal = datetime.combine(now.date() + timedelta(days=1), datetime.min.time(), UTC)
        message = (
            f"the key of {name} has used {used:,} of its {key.tokens_a_day:,} tokens a day; "
            f"it renews at {renewal:%Y-%m-%dT%H:%M:%SZ}"
        )
        wait_s = int((renewal - now).total_seconds()) + 1
        return error(429, message, {"Retry-After": str(wait_s)}, kind="insufficient_quota")

    def note_refusal(self, name: str, route: str | None, status: int) -> None:
        """Note in the audit log a person's request that no engine has answered. route: None for an unknown one."""
        self._note(name, None, route, status)

    def note_wrong_key(self, authorization: bytes, route: str | None) -> None:
        """Count a request whose key does not hold, under the name in it if there is a key of that name."""
        name, _ = name_in(authorization.decode("latin-1").partition(" ")[2])
        with self._lock:
            self._wrong_keys[name if name in self._keys else None, route] += 1

    @contextmanager
    def answering(self, key: PersonKey, stop: Callable[[], object]) -> Iterator[None]:
        """Hold a request under way; `stop`, which is called in any thread, ends it when the key is revoked."""
        request = key, stop
        with self._lock:
            self._under_way.add(request)
            holds = self._holds(key)
        if not holds:  # since it was looked at
            stop()
        try:
            yield
        finally:
            with self._lock:
                self._under_way.discard(request)

    def count(self, name: str, route: str, exchange: Exchange, num_bytes: int) -> None:
        """Count an answer's tokens and note it in the audit log. num_bytes: of the request's body.

        Where the engine gave no counts, or only those of a client that left early, which may be of one choice of many,
        they are estimated: of the request by its bytes, of the answer by its events, or by its bytes once it is whole.
        """
        prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
        if exchange.status == CLIENT_CLOSED or (exchange.status == 200 and not prompt):
            prompt = max(prompt, -(-num_bytes // BYTES_A_TOKEN))
            uncounted = exchange.num_bytes // BYTES_A_TOKEN if exchange.status == 200 else 0
            completion = max(completion, exchange.num_events, uncounted)
        self._used.setdefault(today(), Counter())[name] += prompt + completion
        self._note(name, str(exchange.asked.get("model")), route, exchange.status, prompt, completion)

    def _note(
        self, name: str | None, model: str | None, route: str | None, status: int, *tokens: int, number: int = 1
    ) -> None:
        now = datetime.now(UTC)
        prompt, completion = tokens or (0, 0)
        line = {
            "time": now.isoformat(timespec="milliseconds"),
            "who": name,
            "model": model and model[:MAX_NAME_CHARACTERS],
            "route": route,
            "status": status,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "requests": number,
        }
        self._lines.append((f"{now:%Y-%m-%d}", json.dumps(line)))

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        """Read the keys and what other proxies have counted; write what this one has."""
        trouble = ""
        with self._lock:
            wrong, self._wrong_keys = self._wrong_keys, Counter()
        for (name, route), number in wrong.items():
            self._note(name, None, route, 401, number=number)
        try:
            self._take(read_keys(self._folder))
        except StoreError as problem:
            # Closed rather than open: a revocation may be what cannot be read.
            self._take({})
            trouble = f"no person's key is taken: {problem}"
        try:
            self._write_tokens()
            self._write_lines()
            self._used_by_others = tokens_of(self._folder, without=self._process)
        except OSError as problem:
            trouble = trouble or f"tokens and requests of people are not written: {problem}"
        if trouble and trouble != self._trouble:
            print_timed(trouble)
        self._trouble = trouble

    def _take(self, keys: dict[str, PersonKey]) -> None:
        with self._lock:
            self._keys = keys
            stopped = [stop for key, stop in self._under_way if not self._holds(key)]
        for stop in stopped:
            stop()

    def _holds(self, key: PersonKey) -> bool:
        """Return whether a key is still that of its person, and not revoked."""
        now = self._keys.get(key.name, ABSENT)
        return now.digest == key.digest and now.revoked is None

    def _write_tokens(self) -> None:
        for day, used in [*self._used.items()]:
            counts = dict(used)
            if counts != self._written.get(day):
                write_atomically(self._folder / f"tokens-{day}-{self._process}.json", json.dumps(counts))
                self._written[day] = counts
            elif day != today():
                del self._used[day], self._written[day]

    def _write_lines(self) -> None:
        while self._lines:
            day, line = self._lines[0]
            name = self._folder / f"audit-{day}-{self._process}.jsonl"
            with open(name, "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
                stream.write(f"{line}\n")
            self._lines.popleft()


def today() -> str:
    """Return the date in UTC, by which quotas renew."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def tokens_of(folder: Path, without: str = "") -> Counter[str]:
    """Return the tokens of today by name, summed over all proxies but one, which is named by its process."""
    total: Counter[str] = Counter()
    for file in folder.glob(f"tokens-{today()}-*.json"):
        if without and file.stem.endswith(without):
            continue
        with suppress(FileNotFoundError, ValueError, AttributeError), file.open("rb") as stream:
            counts = json.loads(stream.read(MAX_BYTES))
            total.update({name: tokens for name, tokens in counts.items() if type(tokens) is int and tokens > 0})
    return total
