"""Server of a guessing game in OpenEnv's own framework: `python openenv_server.py MOST_SESSIONS` prints its port.

Some guesses make it misbehave. With `letters` as an argument of `reset`, each of these in a guess counts. With `dies`,
the path of a file that does not exist, the first guess ends the server's process, and another takes its place. It runs
in an environment with openenv-core, and imports nothing of this project.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

PR_SET_PDEATHSIG = 1
DIED = 9


class Guess(Action):
    guess: str


class Shown(Observation):
    text: str = ""
    count: int = 0


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, number=None, letters=None, dies=None, **_):
        self.number, self.count = str(seed % 4 if number is None else number), 0
        self.letters, self.dies = letters, dies
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
        if self.dies and not Path(self.dies).exists():
            Path(self.dies).touch()  # it dies once
            os._exit(DIED)
        if self.letters:
            share = sum(letter in self.letters for letter in action.guess) / 10
            return Shown(text="Another one.", count=self.count, reward=share, done=self.count == 2)
        is_won = action.guess == self.number
        return Shown(text="No, another one.", count=self.count, reward=float(is_won), done=is_won)

    @property
    def state(self):
        return State(step_count=self.count)


if __name__ == "__main__":
    app = create_app(Game, Guess, Shown, env_name="game", max_concurrent_envs=int(sys.argv[1]))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)  # connections wait while another process is started
        print(listening.getsockname()[1], flush=True)
        while worker := os.fork():
            if os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) != DIED:
                sys.exit("the server has ended")
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])
