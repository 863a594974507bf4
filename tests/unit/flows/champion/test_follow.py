"""The serving program starts, queries and stops engines as MLflow's aliases `champion` and `challenger` change."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from flows.champion.registrations import Registration
from flows.champion.registry import Registry
from flows.cli.main import cli
from flows.ledger.home import home
from stages.serving.exchange import Exchange
from stages.serving.tally import ServedVersion
from tests.followed import NUM_SESSIONS, Followed, following, kill_engine, registration, tiny_registry
from tests.promotion import NAME
from tests.serving import wait_for


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Registry:
    return tiny_registry(tmp_path, monkeypatch)


@pytest.fixture
def followed(registry) -> Iterator[Followed]:
    with following(registry) as found:
        yield found


def test_a_challenger_gets_its_share_until_it_dies_is_withdrawn_or_becomes_champion(registry, followed, capsys):
    followed.look()
    assert followed.versions() == {"1"}

    second = registry.register(registration("second"))
    registry.challenge(second)
    followed.look()
    assert followed.versions() == {"1", "2"}

    dead = followed.challenger.server
    kill_engine(followed.challenger)
    wait_for(lambda: not dead.client.is_healthy(), what="the end of the challenger")
    assert followed.versions() == {"1"}
    assert followed.challenger.died.wait(60)
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
    followed.look()
    followed.look()  # what it was compared with is gone: it begins again beside the new champion
    assert not before.alive()
    assert followed.versions() == {"1", "3"}
    withdrawn = followed.challenger.server
    registry.withdraw_challenger(NAME)
    followed.look()
    assert followed.versions() == {"3"}
    assert not withdrawn.alive()


def shown() -> list[str]:
    """Return the lines of `lifecycle canary` without the first three, which name the model versions."""
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


def test_a_challenger_that_does_as_well_is_promoted_by_the_gate(registry, capsys):
    with following(registry, gate_requests=NUM_SESSIONS // 4) as followed:
        for version in ("1", "2") * NUM_SESSIONS:  # of an earlier canary, whose server died
            tally = followed.proxy.tallies.of(ServedVersion(NAME, version))
            tally.count("/v1/chat/completions", Exchange({}), seconds=1.0)
        registry.challenge(registry.register(registration("second")))
        followed.look()
        assert "after" not in capsys.readouterr().out
        assert followed.versions() == {"1", "2"}
        for tally in followed.proxy.tallies_of_canary._tallies.values():  # on a busy machine, one might well be slower
            tally.latencies_s.clear()
        followed.look()
        assert "after 5 requests, version 2 of adder is to be promoted" in capsys.readouterr().out
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


def test_a_champion_that_cannot_be_served_is_tried_again_when_the_alias_comes_back(registry, followed, capsys):
    def tries() -> int:
        """Read the champion's alias once, and return the number of failed attempts to serve its new version."""
        followed.look()
        assert followed.versions() == {"1"}
        return capsys.readouterr().out.count("still serving version 1")

    assert tries() == 0
    absent = registry.register(Registration(name=NAME, model="train/b", digest="b", evaluations=()))
    registry.promote(absent, "1")
    assert [tries(), tries(), tries()] == [1, 0, 0]
    registry.rollback(NAME)
    assert tries() == 0
    registry.promote(absent, "1")
    assert [tries(), tries()] == [1, 0]
