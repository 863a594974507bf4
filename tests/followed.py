"""Champion and challenger behind a proxy as `serve --follow` runs them, for tests; a tiny engine replaces vLLM."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from flows.champion.follow import Follower, FollowSettings
from flows.champion.registrations import Registration
from flows.champion.registry import CHAMPION, Registry
from flows.champion.servers_folder import own_folder
from flows.champion.serving import RunningVersion, in_background, start_engine
from flows.ledger.home import store_root
from flows.store.store import Store
from stages.core.process_tree import descendants
from stages.serving import registry as engines
from stages.serving.proxy import Proxy, listening
from stages.serving.server import listening_socket
from stages.serving.waiting import RequestQueue
from tests.hub_repository import model_files
from tests.load import CutOffError, Load
from tests.promotion import NAME, commit, own_mlflow, planned_stages
from tests.serving import wait_for
from tests.tiny_engine import TinyEngine

KEY = "sk-of-the-test"
NUM_CLIENTS = 6
NUM_SESSIONS = 20


def tiny_registry(folder: Path, patch: pytest.MonkeyPatch) -> Registry:
    """Return an empty model registry, whose models the tiny engine serves; only one engine can start at a time."""
    (folder / "starting").touch()
    settings = {**own_mlflow(folder), "VLLM_API_KEY": KEY, "TINY_STARTING": str(folder / "starting")}
    for name, value in settings.items():
        patch.setenv(name, value)
    patch.setitem(engines.ENGINES, TinyEngine.name, TinyEngine())
    patch.setattr(engines, "DEFAULT_ENGINE", TinyEngine.name)
    return Registry()


def registration(mark: str, **files: str) -> Registration:
    """Store a model artifact, with more `files`, for the tiny engine; return its `Registration`."""
    store = Store(store_root())
    planned = planned_stages(store, {"model": {"kind": "download", "model": "builtin/qwen3-1m", "files": [mark]}})

    def write(work):
        for name, content in model_files(1000).items():
            path = work / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for name, content in {"README.md": mark, **files}.items():
            (work / "model" / name).write_text(content)

    built = commit(store, planned["model"], {}, write)
    return Registration(name=NAME, model=f"{built.kind}/{built.version}", digest=built.record.digest, evaluations=())


def engine_pid(serving: RunningVersion) -> int:
    """Return the process id of a server's engine, the only child of the server's supervisor."""
    (pid,) = descendants(serving.server.pid)
    return pid


def kill_engine(serving: RunningVersion) -> None:
    os.kill(engine_pid(serving), signal.SIGKILL)


def load_of(client: httpx.Client) -> Load:
    """Return concurrent clients that ask one question per session, and count the answers by model version."""
    return Load(partial(ask, client), NUM_CLIENTS)


def ask(client: httpx.Client, number: int) -> str:
    """Ask an arithmetic question in a new session, every second one streamed; return the version that answered."""
    is_stream = number % 4 < 2
    question = {"model": NAME, "messages": [{"role": "user", "content": f"{number} + 1"}], "stream": is_stream}
    headers = {"X-Session-Id": f"s{number}"}
    text = ""
    with client.stream("POST", "/v1/chat/completions", json=question, headers=headers) as answer:
        try:
            for part in answer.iter_text():
                text += part
        except httpx.RemoteProtocolError as error:
            assert text, "cut off before it had begun"
            raise CutOffError from error
    assert answer.status_code == 200, text
    if is_stream:
        assert text.endswith("data: [DONE]\n\n"), text
        assert f'"{number + 1}"' in text
    else:
        assert json.loads(text)["choices"][0]["message"]["content"] == str(number + 1)
    return answer.headers["x-lifecycle-version"]


class Followed:
    """Champion and challenger behind a proxy. A test calls `look` to apply changes of the registry's aliases."""

    def __init__(self, registry: Registry, stack: ExitStack, **options):
        self.folder = stack.enter_context(own_folder())
        champion = start_engine(registry.find(NAME), self.folder)
        self.proxy = Proxy(champion.backend, KEY, waiting=RequestQueue())
        following = FollowSettings(registry, NAME, CHAMPION, canary_share=0.5, **options)
        self.follower = stack.enter_context(Follower(following, champion, self.proxy, self.folder))
        public = stack.enter_context(listening_socket("127.0.0.1", None))
        stack.enter_context(listening(self.proxy, public))
        self.client = stack.enter_context(
            httpx.Client(
                base_url=f"http://127.0.0.1:{public.getsockname()[1]}",
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=300,
            )
        )

    @property
    def champion(self) -> RunningVersion:
        return self.follower.champion

    @property
    def challenger(self) -> RunningVersion | None:
        return self.follower.challenger

    def look_soon(self) -> None:
        """Make the next check of `serve --follow` read the registry's aliases, without waiting for its interval."""
        self.follower.aliases._looking, self.follower.aliases._next_look_s = None, 0.0

    def look(self) -> None:
        """Apply changes of the registry's aliases now, and wait until all affected servers have started or stopped."""
        self.look_soon()
        wait_for(self.follower.step, what="MLflow's answer")
        self.settle()

    def settle(self) -> None:
        def is_settled() -> bool:
            self.follower.step()
            return self.follower.is_settled

        wait_for(is_settled, what="the end of what is under way")

    def versions(self) -> set[str]:
        """Send requests of several chat sessions to the proxy, and return the model versions that answered."""
        return {ask(self.client, number) for number in range(NUM_SESSIONS)}

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Follow the registry's aliases in a thread, as `serve --follow` does, until the `with` block ends."""
        is_enough = threading.Event()
        outcome = in_background(lambda: self._go_on(is_enough))
        try:
            yield
        finally:
            is_enough.set()
            outcome.result()

    def _go_on(self, is_enough: threading.Event) -> None:
        while not is_enough.wait(0.02):
            self.follower.step()


@contextmanager
def following(registry, **options) -> Iterator[Followed]:
    registry.promote(registry.register(registration("first")), None)
    with ExitStack() as stack:
        yield Followed(registry, stack, **options)
