"""WebSocket server that speaks OpenEnv's protocol, of a guessing game in which some guesses make it misbehave.

The same game has a server in OpenEnv's own framework.
"""

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

ROOT = Path(__file__).parents[1]
THEIRS = ROOT / ".venv-openenv" / "bin" / "python"


def observed(text: Any = "odd", reward: Any = 0.0, done: Any = False, **other: Any) -> str:
    return json.dumps(
        {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done, **other}}
    )


ODD: dict[str, str | bytes] = {
    "nan": observed(reward=float("nan")),
    "infinite": observed(reward=float("inf")),
    "beyond": '{"type": "observation", "data": {"observation": {}, "reward": 1e999, "done": false}}',
    "large": observed("x" * (2 << 20)),
    "no JSON": "Guess again!",
    "bytes": b"\xff\xfe",
    "a list": "[]",
    "nested": "[" * 100_000,
    "half a character": observed("?").replace("?", "\\ud800"),
    "another type": '{"type": "state", "data": {}}',
    "no data": '{"type": "observation"}',
    "no reward": '{"type": "observation", "data": {"observation": {}, "done": false}}',
    "reward as text": observed(reward="1.0"),
    "done as number": observed(done=1),
    "observation as text": '{"type": "observation", "data": {"observation": "x", "reward": 0, "done": false}}',
    "another field": '{"type": "observation", "data": {"observation": {"words": "x"}, "reward": 0, "done": false}}',
    "an error": '{"type": "error", "data": {"message": "the game is broken", "code": "EXECUTION_ERROR"}}',
}
"""Answers of a server that is broken, by the guess that gets them."""


@dataclass
class Game:
    """State of the server, of `most` sessions at a time: the arguments of resets, and how many sessions there are."""

    most: int
    url: str = ""
    resets: list[dict[str, Any]] = field(default_factory=list)
    num_sessions: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, connection: ServerConnection) -> None:
        with self.lock:
            self.num_sessions += 1
            is_full = self.num_sessions > self.most
        try:
            if is_full:
                connection.send('{"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}')
                return
            for message in connection:
                asked = json.loads(message)
                if asked["type"] == "close":
                    return
                self.answer(connection, asked)
        except ConnectionClosed:
            return
        finally:
            with self.lock:
                self.num_sessions -= 1

    def answer(self, connection: ServerConnection, asked: dict[str, Any]) -> None:
        if asked["type"] == "reset":
            self.resets.append(asked["data"])
            connection.send(observed("Guess a digit.", None))
            return
        guess = asked["data"].get("guess")
        if guess is None:
            wrong = [{"loc": ["guess"], "msg": "Field required"}]
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": wrong}
            connection.send(json.dumps({"type": "error", "data": error}))
        elif guess == "hang":
            self.is_over.wait()
        elif guess == "gone":
            connection.close()
        else:
            number = str(self.resets[-1].get("number", 3))
            connection.send(ODD.get(guess, observed("No, another one.", float(guess == number), guess == number)))


@contextmanager
def guessing(most: int = 4) -> Iterator[Game]:
    """Serve the game while the context lasts."""
    game = Game(most)
    with serve(game.serve, "127.0.0.1", 0, max_size=None) as server:
        game.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield game
        finally:
            game.is_over.set()
            server.shutdown()
            thread.join()


@contextmanager
def their_server(most: int) -> Iterator[str]:
    """Serve the game by OpenEnv's own framework (`make openenv`); yield its address."""
    command = [THEIRS, ROOT / "tests" / "openenv_server.py", str(most)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()
