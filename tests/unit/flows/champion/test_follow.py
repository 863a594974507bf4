"""A champion and its challenger, served by an engine within the tests: who is started, asked and ended, and when."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from click.testing import CliRunner

from flows.champion.follow import Follower
from flows.champion.registrations import Registration
from flows.champion.registry import CHAMPION, Registry
from flows.champion.serving import Serving, begin_serving
from flows.cli.main import cli
from flows.ledger.home import home, store_root
from flows.store.store import Store
from stages.serving import registry as engines
from stages.serving.exchange import Exchange
from stages.serving.listening import listening
from stages.serving.proxy import Proxy
from stages.serving.server import listening_socket
from stages.serving.tally import ServedVersion
from tests.hub_repository import model_files
from tests.promotion import NAME, commit, own_mlflow, planned_stages
from tests.serving import wait_for
from tests.tiny_engine import TinyEngine

KEY = "sk-of-the-test"
NUM_SESSIONS = 20


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Registry:
    for name, value in {**own_mlflow(tmp_path), "VLLM_API_KEY": KEY}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(engines.ENGINES, TinyEngine.name, TinyEngine())
    monkeypatch.setattr(engines, "DEFAULT_ENGINE", TinyEngine.name)
    return Registry()


def registration(mark: str) -> Registration:
    """A model in the store that Tiny serves."""
    store = Store(store_root())
    planned = planned_stages(store, {"model": {"kind": "download", "model": "builtin/qwen3-1m", "files": [mark]}})

    def write(work):
        for name, content in model_files(1000).items():
            path = work / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (work / "model" / "README.md").write_text(mark)

    built = commit(store, planned["model"], {}, write)
    return Registration(name=NAME, model=f"{built.kind}/{built.version}", digest=built.record.digest, evaluations=())


class Followed:
    """What a follower serves; `look` is what it does every few seconds."""

    def __init__(self, registry: Registry, stack: ExitStack):
        self.follower = Follower(registry, NAME, CHAMPION, canary_share=0.5)
        servers = stack.enter_context(self.follower._servers)
        self.champion: Serving = begin_serving(registry.find(NAME), None, servers)
        self.challenger: Serving | None = None
        self.proxy = Proxy(self.champion.backend, KEY)
        public = stack.enter_context(listening_socket("127.0.0.1", None))
        stack.enter_context(listening(self.proxy, public))
        self.client = stack.enter_context(
            httpx.Client(
                base_url=f"http://127.0.0.1:{public.getsockname()[1]}",
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=60,
            )
        )

    def look(self) -> None:
        self.champion, self.challenger = self.follower._next(self.champion, self.challenger, self.proxy)

    def versions(self) -> set[str]:
        """Those that answer a few sessions, all of them rightly."""
        found = set()
        for number in range(NUM_SESSIONS):
            question = {"model": NAME, "messages": [{"role": "user", "content": f"{number} + 1"}]}
            headers = {"X-Session-Id": f"s{number}"}
            answer = self.client.post("/v1/chat/completions", json=question, headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == str(number + 1)
            found.add(answer.headers["x-lifecycle-version"])
        return found


@pytest.fixture
def followed(registry) -> Iterator[Followed]:
    registry.promote(registry.register(registration("first")), None)
    with ExitStack() as stack:
        yield Followed(registry, stack)


def test_a_challenger_gets_its_share_until_it_dies_is_withdrawn_or_becomes_champion(registry, followed, capsys):
    followed.look()
    assert followed.versions() == {"1"}

    second = registry.register(registration("second"))
    registry.challenge(second)
    followed.look()
    assert followed.versions() == {"1", "2"}

    dead = followed.challenger.server
    os.kill(dead.pid, signal.SIGKILL)
    wait_for(lambda: not (dead.alive() or dead.client.is_healthy()), what="the end of the challenger")
    assert followed.versions() == {"1"}
    followed.look()
    followed.look()
    assert followed.challenger is None
    said = capsys.readouterr().out
    assert "ended by itself" in said
    assert "all requests go to the champion" in said
    assert '"version": "2"' in said

    registry.withdraw_challenger(NAME)
    followed.look()
    registry.challenge(second)
    followed.look()
    assert followed.versions() == {"1", "2"}

    server, former = followed.challenger.server, followed.champion.server
    registry.promote_challenger(NAME)
    followed.look()
    assert (followed.champion.server, followed.challenger) == (server, None)
    assert followed.versions() == {"2"}
    assert not former.alive()

    registry.challenge(registry.find(NAME, "previous"))
    followed.look()
    assert followed.versions() == {"1", "2"}
    before = followed.challenger.server
    third = registry.register(registration("third"))
    registry.promote(third, "2")
    followed.look()  # what it was compared with is gone: it begins again beside the new champion
    assert not before.alive()
    assert followed.versions() == {"1", "3"}
    withdrawn = followed.challenger.server
    registry.withdraw_challenger(NAME)
    followed.look()
    assert followed.versions() == {"3"}
    assert not withdrawn.alive()


def shown() -> list[str]:
    """What `lifecycle canary` says after who is champion, previous and challenger."""
    said = CliRunner().invoke(cli, ["canary", NAME])
    assert said.exit_code == 0, said.output
    return said.stdout.splitlines()[3:]


def test_both_are_shown_side_by_side_while_they_are_served_and_at_the_end(registry, followed, capsys):
    registry.challenge(registry.register(registration("second")))
    assert shown() == []
    followed.look()
    followed.versions()
    followed.look()
    heading, titles, first, second = shown()
    assert heading.startswith("served side by side, 50.0% of the requests to version 2; ")
    assert titles.split()[:3] == ["version", "requests", "errors"]
    counts = {one["version"]: one["requests"] for one in followed.client.get("/versions").json()["versions"]}
    assert first.split()[:4] == ["1,", "champion", str(counts["1"]), "0"]
    assert second.split()[:4] == ["2,", "challenger", str(counts["2"]), "0"]
    assert counts["1"] + counts["2"] == NUM_SESSIONS
    asked = json.loads(CliRunner().invoke(cli, ["canary", NAME, "--json"]).stdout)["served"]
    assert [(one["champion"], one["challenger"], one["share"]) for one in asked] == [("1", "2", 0.5)]
    (file,) = (home() / "servers").glob("canary-*.json")
    gone = json.loads(file.read_text())
    gone["process"]["started_ticks"] += 1
    file.with_name(f"canary-{NAME}-1.json").write_text(json.dumps(gone))
    file.with_name(f"canary-{NAME}-too-1.json").write_text(file.read_text().replace(f'"{NAME}"', f'"{NAME}-too"', 1))
    assert len(shown()) == 4, "one whose server was killed, and one of another model"

    registry.promote_challenger(NAME)
    capsys.readouterr()
    followed.look()
    said = capsys.readouterr().out
    assert f'"version": "2", "requests": {counts["2"]}' in said
    assert shown() == []


def test_a_challenger_that_does_as_well_is_promoted_by_the_gate(registry, followed, capsys):
    followed.follower = Follower(registry, NAME, CHAMPION, canary_share=0.5, gate_requests=NUM_SESSIONS // 4)
    for version in ("1", "2") * NUM_SESSIONS:  # of an earlier canary, whose server died
        tally = followed.proxy.tallies.of(ServedVersion(NAME, version))
        tally.count("/v1/chat/completions", Exchange({}), seconds=1.0)
    registry.challenge(registry.register(registration("second")))
    with ExitStack() as servers:
        followed.follower._servers = servers
        followed.look()
        assert "after" not in capsys.readouterr().out
        assert followed.versions() == {"1", "2"}
        for tally in followed.proxy.tallies_of_canary._tallies.values():  # on a busy machine, one might well be slower
            tally.latencies_s.clear()
        followed.look()
        assert "after 5 requests, version 2 of adder is promoted" in capsys.readouterr().out
        followed.look()
        assert (followed.champion.version.number, followed.challenger) == ("2", None)
        assert followed.versions() == {"2"}


def test_a_challenger_that_does_not_start_changes_nothing(registry, followed, capsys, monkeypatch):
    registry.challenge(registry.register(Registration(name=NAME, model="train/b", digest="b", evaluations=())))
    followed.look()
    followed.look()
    assert followed.challenger is None
    assert followed.versions() == {"1"}
    assert capsys.readouterr().out.count("is tried again when challenger has been moved away and back") == 1
