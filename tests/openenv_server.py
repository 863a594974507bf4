"""Server of a guessing game in OpenEnv's own framework: `python openenv_server.py MOST_SESSIONS` prints its port.

Some guesses make it misbehave. It runs in an environment with openenv-core, and imports nothing of this project.
"""

import socket
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Shown(Observation):
    text: str = ""
    count: int = 0


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, number=None, **_):
        self.number, self.count = str(seed % 4 if number is None else number), 0
        return Shown(text="Guess a digit.")

    def step(self, action):
        self.count += 1
        if action.guess == "hang":
            time.sleep(20)
        if action.guess == "raise":
            raise RuntimeError("the game is broken")
        if action.guess == "nan":
            return Shown(text="odd", reward=float("nan"))
        if action.guess == "large":
            return Shown(text="x" * (2 << 20))
        is_won = action.guess == self.number
        return Shown(text="No, another one.", count=self.count, reward=float(is_won), done=is_won)

    @property
    def state(self):
        return State(step_count=self.count)


if __name__ == "__main__":
    app = create_app(Game, Guess, Shown, env_name="game", max_concurrent_envs=int(sys.argv[1]))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])
