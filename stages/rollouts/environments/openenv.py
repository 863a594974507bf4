"""Environment behind a server of the OpenEnv protocol, whose episodes are sessions of its WebSocket.

A session is a connection to `/ws`. Messages are JSON objects, `{"type": …, "data": …}`: `reset` and `step` are answered
by `observation` (observation, reward, done) or `error`; `close` ends the session.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json

from stages.core.errors import DataError, TransientError
from stages.core.fields import Seconds
from stages.core.redaction import quoted, shortened
from stages.data.messages import RowError, make_message
from stages.rollouts.environments.environment import Action, MakeEnvironment, Step
from stages.rollouts.environments.led import Failures, LedEnvironment, LedEpisode, NumTogether

if TYPE_CHECKING:  # half a megabyte of modules, which plans do without
    from websockets.sync.client import ClientConnection

RESET = "reset"
"""Column of a row with the arguments that the server's `reset` gets."""
MOST_MESSAGE_BYTES = 1 << 20
"""Largest size of a message of the server; a larger one is not read to its end."""
CLOSE_TIMEOUT_S = 2.0
RETRY_S = 0.2
MAX_SHOWN = 200


class SessionError(Exception):
    """A session of a server failed; the text says how."""


class RefusedActionError(SessionError):
    """The server refused an action, as it is none of the environment's."""


class FullServerError(SessionError):
    """The server has as many sessions as it allows."""


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["observation", "error"]
    data: dict[str, Any]


class Observed(BaseModel):
    """Observation that a server sent: fields by name, the reward of the action, and whether the episode is over."""

    model_config = ConfigDict(strict=True)

    observation: dict[str, Any]
    reward: Annotated[float, Field(allow_inf_nan=False)] | bool | None
    done: bool


class OpenEnvEnvironment(LedEnvironment):
    """Environment of a running OpenEnv server: `{openenv: http://127.0.0.1:8000, action: message}`."""

    openenv: Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")] = Field(
        description="Address of the environment's server, such as http://127.0.0.1:8000, which others started."
    )
    action: str | None = Field(
        None,
        min_length=1,
        description="Field of an action that gets the text of the model's turn. Default: the turn is a JSON object "
        "with the action's fields.",
    )
    observation: str | None = Field(
        None,
        min_length=1,
        description="Field of an observation that the model reads. Default: the whole observation, as JSON.",
    )
    timeout_s: Seconds = Field(
        60.0, description="Time limit of an answer of the server, in seconds; a later one fails the episode."
    )
    num_together: NumTogether = Field(
        1, description="Largest number of episodes at a time; servers allow one session unless they say otherwise."
    )

    @property
    def gives_rewards(self) -> bool:
        return True

    def check_row(self, row: Mapping[str, Any]) -> None:
        if not isinstance(row.get(RESET, {}), dict):
            raise RowError(f"has {quoted(str(row[RESET]), MAX_SHOWN)} as `{RESET}`; expected an object, or none")

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[MakeEnvironment]:
        failures = Failures(_leader(self), "fix the server, or raise timeout_s")
        sessions: set[Session] = set()
        try:
            first = Session(self, sessions)  # also when the recipe is checked, before anything slow starts
            first.close()
            yield lambda: OpenEnvEpisode(self, sessions, failures)
        finally:
            for session in [*sessions]:  # those that an error has left
                session.end()


class Session:
    """Session of an episode: a connection to the server, used by one thread at a time. Raises SessionError."""

    def __init__(self, config: OpenEnvEnvironment, opened: set[Session]) -> None:
        """Connect; raise TransientError without a server. opened: sessions that are open, which gets this one."""
        from websockets.exceptions import InvalidHandshake
        from websockets.sync.client import connect

        self._config, self._opened = config, opened
        url = "ws" + config.openenv.removeprefix("http").rstrip("/") + "/ws"
        try:
            # Without compression and proxies: what is bounded is what is sent, and by the server that is named.
            self._connection: ClientConnection = connect(
                url,
                open_timeout=config.timeout_s,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=MOST_MESSAGE_BYTES,
                compression=None,
                proxy=None,
            )
        except InvalidHandshake as error:
            raise DataError(
                f"{config.openenv} is no server of OpenEnv: {url} answered {shortened(str(error), MAX_SHOWN)}; correct "
                "`openenv`"
            ) from error
        except (OSError, TimeoutError) as error:
            raise TransientError(
                f"the environment's server {config.openenv} was not reached: {error or 'no answer in time'}; start it, "
                "or correct `openenv`"
            ) from error
        opened.add(self)

    def ask(self, kind: Literal["reset", "step"], data: Mapping[str, JsonValue]) -> Observed:
        """Send a message and return the observation that answers it."""
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed):  # a full server says so, and closes before it is asked
                self._connection.send(json.dumps({"type": kind, "data": data}))
            raw = self._connection.recv(self._config.timeout_s)
        except TimeoutError as error:
            raise SessionError(f"gave no answer within timeout_s, {self._config.timeout_s:g} s") from error
        except ConnectionClosed as error:
            # code 1009 is ours: the message was larger than it may be
            sent = error.sent and error.sent.code == 1009
            why = f"answered with more than {MOST_MESSAGE_BYTES} bytes" if sent else "ended the session"
            raise SessionError(why) from error
        except OSError as error:
            raise SessionError(f"cannot be asked: {error}") from error
        try:
            message = _Message.model_validate(from_json(raw, allow_inf_nan=False))
            if message.type == "error":
                raise _error_of(message.data)
            return Observed.model_validate(message.data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = quoted(".".join(map(str, first["loc"])) or "the message", MAX_SHOWN)
            raise SessionError(f"answered in another form ({place}: {first['msg']})") from error
        except ValueError as error:  # NaN, or no JSON
            raise SessionError(f"answered with something else than JSON ({error})") from error

    def close(self) -> None:
        """End the session, and wait a moment until the server has, which has room for few."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed, OSError):  # a TimeoutError among them
            self._connection.send(json.dumps({"type": "close"}))
            end_s = time.monotonic() + CLOSE_TIMEOUT_S
            while (left_s := end_s - time.monotonic()) > 0:  # what it still sends is not read
                self._connection.recv(left_s)
        self.end()

    def end(self) -> None:
        """Close the connection, also while another thread waits for an answer."""
        self._opened.discard(self)
        self._connection.close()


def _error_of(data: Mapping[str, Any]) -> SessionError:
    """Return the error for a message of the server that says one."""
    code, text = (shortened(str(data.get(name, "")), MAX_SHOWN) for name in ("code", "message"))
    if code == "CAPACITY_REACHED":
        return FullServerError("has no room for another session; lower num_together to what it allows")
    if code != "VALIDATION_ERROR":
        return SessionError(f"answered with the error {code}: {text}")
    wrong = data.get("errors")
    details = [one for one in wrong if isinstance(one, dict)] if isinstance(wrong, list) else []
    shown = "; ".join(f"{one.get('loc')}: {one.get('msg')}" for one in details[:3])
    return RefusedActionError(shortened(shown or text, MAX_SHOWN))


class OpenEnvEpisode(LedEpisode):
    """Episode in a session of its own. What its server does wrong ends it, without a further reward."""

    def __init__(self, config: OpenEnvEnvironment, sessions: set[Session], failures: Failures) -> None:
        """Create the episode. sessions: those that are open. failures: counter of the server's."""
        super().__init__(failures)
        self._config, self._sessions = config, sessions
        self._session: Session | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        # Episodes of a group are compared, so they begin in one world: the seed is of the row, not of the episode.
        drawn = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).digest()
        arguments = {"seed": int.from_bytes(drawn[:4], "big") >> 1, **row.get(RESET, {})}
        end_s = time.monotonic() + self._config.timeout_s
        while True:
            self._session = Session(self._config, self._sessions)
            try:
                observed = self._session.ask("reset", arguments)
                if observed.done:
                    raise SessionError("says that the episode is over when it begins")
                return self._shown(observed)
            except FullServerError as error:  # perhaps since it has not noticed the end of another session
                self._session.end()
                if time.monotonic() > end_s:
                    raise self._error(error) from error
                time.sleep(RETRY_S)
            except SessionError as error:
                raise self._error(error) from error

    def step(self, action: Action) -> Step:
        assert self._session, "`reset` has begun it"
        try:
            data = {self._config.action: action.text} if self._config.action else _object(action.text)
            observed = self._session.ask("step", data)
            text = "" if observed.done else self._shown(observed)
        except RefusedActionError as error:
            return Step((make_message("user", f"error: the action is refused: {error}"),), num_failed=1)
        except SessionError as error:
            return self._failed(str(error))
        self._failures.succeeded()
        messages = () if observed.done else (make_message("user", text),)
        return Step(messages, float(observed.reward or 0.0), done=observed.done)

    def close(self) -> None:
        if self._session:
            self._session.close()

    def _shown(self, observed: Observed) -> str:
        """Return the text of an observation that the model reads."""
        name, fields = self._config.observation, observed.observation
        if name and name not in fields:
            raise SessionError(f"sent an observation without {name}; it has {shortened(', '.join(fields), MAX_SHOWN)}")
        value = fields[name] if name else fields
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _error(self, error: SessionError) -> DataError:
        return DataError(f"{_leader(self._config)} {error}")


def _leader(config: OpenEnvEnvironment) -> str:
    return f"the environment's server {config.openenv}"


def _object(text: str) -> dict[str, Any]:
    """Return the JSON object that a turn is; RefusedActionError for another."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise RefusedActionError(f"it is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise RefusedActionError("expected a JSON object with the action's fields")
    return value
