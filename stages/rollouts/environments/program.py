"""Environment that is an agent program of the recipe's author, which asks a gateway for the model's turns."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PositiveInt, field_validator

from stages.core.contract import OutsidePath
from stages.core.errors import DataError
from stages.core.fields import AddedLater
from stages.core.redaction import shortened
from stages.data.messages import Conversation
from stages.rewards import code_program
from stages.rollouts.environments.environment import Action, MakeEnvironment, Step
from stages.rollouts.environments.led import Failures, LedEnvironment, LedEpisode, NumTogether

if TYPE_CHECKING:  # an HTTP server, which plans do without
    from stages.rollouts.environments.agent_process import AgentCommand, AgentProcess, Ended
    from stages.rollouts.environments.gateway import Gateway

MAX_SHOWN = 300
MOST_PROCESSES = 512
"""Largest number of processes and threads of an episode at a time."""


class ProgramFailedError(Exception):
    """A program ended without the reward that it owes; the text says how."""


class ProgramEnvironment(LedEnvironment):
    """Agent program that asks for the model's turns by OpenAI's API: `{program: python a.py, files: [a.py]}`."""

    IS_EXACT: ClassVar[bool] = True

    program: str = Field(
        min_length=1,
        description="Command line of the agent program, in words as a shell splits them; it runs where the first of "
        "`files` lies. `python` is the pipeline's own.",
    )
    files: tuple[OutsidePath, ...] = Field(
        min_length=1,
        description="Files and folders that the program consists of, which it may read; a change of their content "
        "builds the stage again.",
    )
    gives_reward: bool = Field(
        True, description='The last line that the program prints is its reward, as JSON: `{"reward": 1.0}`.'
    )
    metrics: tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], ...] = Field(
        (), description='Names of numbers in that line, such as `{"reward": 1.0, "metrics": {"guesses": 3}}`.'
    )
    max_answer_bytes: PositiveInt = Field(
        65_536, description="Largest number of bytes of a request's new messages; a request with more is refused."
    )
    memory_gib: float = Field(
        4.0, ge=0.125, le=1024, description="Limit on the address space of each of the program's processes, in GiB."
    )
    own_servers: Annotated[bool, AddedLater()] = Field(
        False,
        description="Let the program start servers on ports that the system chooses, and connect to such ports, as "
        "`verifiers` does; other programs of this machine may have some.",
    )
    num_together: NumTogether = Field(
        16, description="Largest number of episodes at a time, each with a program of its own."
    )

    @field_validator("program")
    @classmethod
    def _is_a_command(cls, command: str) -> str:
        if not shlex.split(command):  # ValueError for a quotation without an end
            raise ValueError("the command line is empty")
        return command

    @property
    def gives_rewards(self) -> bool:
        return self.gives_reward

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[MakeEnvironment]:
        from stages.rollouts.environments.agent_process import AgentCommand
        from stages.rollouts.environments.gateway import listening

        first = self.files[0]
        if missing := [path for path in self.files if not path.exists()]:
            raise DataError(f"the agent program's file {missing[0]} does not exist; correct `files`")
        homes = folder / "agents"
        shutil.rmtree(homes, ignore_errors=True)  # of an attempt that was killed
        homes.mkdir(parents=True)
        with listening(self.num_together) as gateway:
            episodes: set[ProgramEpisode] = set()
            failures = Failures(self.custom_code(), "fix it")
            limits = {
                "memory_bytes": int(self.memory_gib * 2**30),
                "most_processes": MOST_PROCESSES,
                "own_servers": self.own_servers,
                "readable": [str(path.resolve()) for path in self.files],
            }
            place = first if first.is_dir() else first.parent
            command = AgentCommand(shlex.split(self.program), place, homes, limits)

            def make() -> ProgramEpisode:
                episodes.add(episode := ProgramEpisode(self, failures, gateway, command, episodes.discard))
                return episode

            try:
                yield make
            finally:
                for episode in [*episodes]:  # those that an error has left
                    episode.close()
                shutil.rmtree(homes, ignore_errors=True)

    def warnings(self) -> Iterator[str]:
        if code_program.landlock_version() < code_program.NETWORK_VERSION:
            yield (
                f"{self.custom_code()} can open connections and read files on this machine: its kernel's Landlock "
                "restricts no ports (Linux 6.7 and later)"
            )
        if not code_program.can_report_new_processes():
            yield f"{self.custom_code()} can start processes without end on this machine: libseccomp cannot bound them"

    def custom_code(self) -> str:
        return f"the program {self.program}"


class ProgramEpisode(LedEpisode):
    """Episode that a process of the program leads. One that fails after its first request ends the episode."""

    def __init__(
        self,
        config: ProgramEnvironment,
        failures: Failures,
        gateway: Gateway,
        command: AgentCommand,
        on_close: Callable[[ProgramEpisode], None],
    ) -> None:
        """Create the episode, whose program `reset` starts."""
        super().__init__(failures)
        self._config, self._gateway, self._command, self._on_close = config, gateway, command, on_close
        self._session = gateway.session(config.max_answer_bytes)
        self._process: AgentProcess | None = None
        self._deadline_s = math.inf
        self._num_turns = 0
        self._printed: dict[str, float] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def reset(self, row: Mapping[str, Any], seed: int) -> Conversation:
        from stages.rollouts.environments.agent_process import AgentProcess, Ended
        from stages.rollouts.environments.chats import MODEL

        self._deadline_s = time.monotonic() + self._config.max_episode_s
        names = {
            "OPENAI_BASE_URL": f"http://127.0.0.1:{self._session.port}/v1",
            "OPENAI_API_KEY": self._session.key,
            "OPENAI_MODEL": MODEL,
        }
        with self._lock:
            if self._is_closed:
                raise self._error("was ended before it began")
            question = {"row": row, "seed": seed}
            self._process = AgentProcess(self._command, self._session.port, names, question, self._session.events.put)
        event = self._next()
        if event is None:
            raise self._error(f"asked for no turn within max_episode_s, {self._config.max_episode_s:g} s")
        if isinstance(event, Ended):
            raise self._error(f"ended with exit code {event.exit_code} before it asked for a turn{_shown(event)}")
        return Conversation(event.messages, tools=event.tools)

    def step(self, action: Action) -> Step:
        from stages.rollouts.environments.agent_process import Ended
        from stages.rollouts.environments.chats import ChatAnswer

        self._session.answer(ChatAnswer.of(action, self._num_turns))
        self._num_turns += 1
        event = self._next()
        if event is None:  # which ends the episode
            return Step(())
        if isinstance(event, Ended):
            try:
                reward = self._reward(event)
            except ProgramFailedError as error:
                return self._failed(str(error))
            self._failures.succeeded()
            return Step((), reward, done=True)
        return Step(tuple(event.messages))

    def cut_short(self, last: Action | None) -> float:
        from stages.rollouts.environments.agent_process import Ended
        from stages.rollouts.environments.chats import ChatAnswer

        if last:
            message = {"role": "assistant", "content": last.text}
            self._session.answer(ChatAnswer(message, "length", last.num_tokens))
        self._session.end("the episode is at a bound of turns, tokens or seconds: it gets no further turn")
        event = self._next()
        try:
            reward = self._reward(event) if isinstance(event, Ended) else 0.0
        except ProgramFailedError:  # it may, when it is refused a turn
            return 0.0
        self._failures.succeeded()
        return reward

    @property
    def metrics(self) -> dict[str, float]:
        own = {f"program_{name}": self._printed.get(name, 0.0) for name in self._config.metrics}
        return {**super().metrics, "refused_requests": float(self._session.num_refused), **own}

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._process:
                self._process.close()
        self._gateway.close(self._session)
        self._session.events.put(None)  # for a thread that waits, once another episode has failed
        self._on_close(self)

    def _next(self) -> Any:
        """Return the program's next request, or its end; None when the episode's time is over."""
        try:
            return self._session.events.get(timeout=max(0.0, self._deadline_s - time.monotonic()))
        except queue.Empty:
            return None

    def _reward(self, ended: Ended) -> float:
        """Return the reward in a program's last line, and keep its metrics; ProgramFailedError without one."""
        if ended.exit_code:
            raise ProgramFailedError(f"ended with exit code {ended.exit_code}{_shown(ended)}")
        if not self._config.gives_reward and not self._config.metrics:
            return 0.0
        line = (ended.printed.strip().splitlines() or [""])[-1]
        try:
            result = json.loads(line)
            printed = {name: result["metrics"][name] for name in self._config.metrics}
            reward = result["reward"] if self._config.gives_reward else 0.0
        except (ValueError, TypeError, KeyError, RecursionError):
            printed, reward = {}, None
        if reward is None or not all(_is_number(value) for value in (reward, *printed.values())):
            expected: dict[str, Any] = {"reward": 1.0} if self._config.gives_reward else {}
            expected |= {"metrics": dict.fromkeys(self._config.metrics, 0.5)} if self._config.metrics else {}
            shown = shortened(line, MAX_SHOWN) or "nothing"
            raise ProgramFailedError(
                f"printed {shown} as its last line; expected finite numbers as in {json.dumps(expected)}"
            )
        self._printed = printed
        return float(reward)

    def _error(self, problem: str) -> DataError:
        return DataError(f"{self._config.custom_code()} {problem}")


def _shown(ended: Ended) -> str:
    """Return the last of what a program complained about, to end a sentence."""
    complaint = ended.complaint.strip()
    return f": {shortened(complaint.splitlines()[-1], MAX_SHOWN)}" if complaint else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
