"""Homes with disks and MLflow of their own, and one bucket: killed anywhere, they lose no artifact and no champion."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.champion import champions, promotion
from flows.champion.registry import CHAMPION, PREVIOUS, Registry
from flows.ledger.home import home, store_root
from flows.store.collect import verify
from flows.store.shared import agree
from flows.store.store import Store
from stages.core.errors import OutdatedVerdictError
from stages.kinds.promote.verdict import VERDICT_FILE, Verdict
from tests.promotion import NAME, commit, offer, own_mlflow, write_question
from tests.s3_server import BUCKET, running_s3

PROGRAM = Path(__file__).with_name("promotion_kills.py")


@pytest.fixture
def enter(monkeypatch, tmp_path):
    """Provide a function that makes this process one of a home, by its name."""
    known: dict[str, dict[str, str]] = {}

    def enter(name: str) -> Store:
        if name not in known:
            (tmp_path / name / "home").mkdir(parents=True)
            (tmp_path / name / "home" / "store.yaml").write_text(f"store: s3://{BUCKET}/team\n")
            known[name] = own_mlflow(tmp_path / name)
        for variable, value in known[name].items():
            monkeypatch.setenv(variable, value)
        return Store(store_root())

    with running_s3(monkeypatch):
        yield enter


def judged(mark: str, champion: str | None, store: Store) -> Path:
    """Store a candidate that was found better than a champion; return the artifact of its promotion."""
    planned, upstream = offer(store, mark, [1.0] * 10, max_regression_standard_errors=None)
    for built in upstream.values():
        digests = {field: entry.digest for field, entry in built.record.upstream.items()}
        assert agree(store, built.kind, built.version, digests)
    verdict = Verdict(outcome="promoted", name=NAME, champion_version=champion, against=None, missed=())

    def write(work: Path) -> None:
        write_question(work, planned, upstream)
        (work / VERDICT_FILE).write_text(verdict.model_dump_json())

    return commit(store, planned, upstream, write).artifact


def complete(artifact: Path) -> None:
    work = home() / "hook"
    work.mkdir(exist_ok=True)
    promotion.complete(artifact, work)


def standing() -> tuple[str, str | None]:
    """Return the models of champion and previous champion, as this home's MLflow has them after a look."""
    registry = Registry()
    previous = registry.find(NAME, PREVIOUS)
    return registry.find(NAME, CHAMPION).registration.model, previous.registration.model if previous else None


def test_homes_follow_one_champion_and_the_slower_of_two_promotions_is_judged_again(enter):
    first = enter("first")
    complete(judged("old", None, first))
    old = standing()[0]
    second = enter("second")
    assert standing() == (old, None), "a champion that another home crowned"
    champion = Registry().find(NAME)
    assert champions.artifact_of(champion, old).folder.is_relative_to(second.root)
    assert champion.registration.evaluations
    ours = judged("of the second", champion.number, second)
    first = enter("first")
    theirs = judged("of the first", Registry().find(NAME).number, first)
    complete(theirs)
    new = standing()
    assert new[1] == old != new[0]
    enter("second")
    with pytest.raises(OutdatedVerdictError, match="another became champion"):
        complete(ours)
    assert standing() == new
    with promotion.promotion_lock(NAME):
        Registry().rollback(NAME)
    assert standing() == (old, new[0])
    enter("first")
    assert standing() == (old, new[0]), "rolled back by the other home"
    assert champions.kept_versions() >= {one.rpartition("/")[2] for one in new}


@pytest.mark.nightly
def test_kills_at_random_moments_lose_no_shared_champion(enter):
    enter("first")
    done = subprocess.run([sys.executable, PROGRAM, "5", "12"], env={**os.environ}, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    moves = [json.loads(line) for line in done.stdout.splitlines()]
    assert {move["after"] == move["before"] for move in moves} == {True, False}
    models = standing()
    enter("second")
    assert standing() == models


SENDING = [
    *(("Objects.send", 1), ("Objects.send", 3), ("Objects.swap", 1), ("Objects.swap", 2), ("Objects.replace", 1)),
    *(("Store.commit", 1), ("flows.store.store._finish_commit", 1), ("Remote.send", 1), ("Lease.end", 1)),
]
RECEIVING = [
    *(("Remote.receive", 1), ("Objects.receive", 2), ("half",), ("Store.commit", 1)),
    *(("flows.store.store._finish_commit", 1), ("flows.store.store._sync_tree", 1)),
]


def run(store: Store, content: str, *moment: object) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("killed_sharing.py")
    command = [sys.executable, program, str(store.root), content, *map(str, moment)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])}, text=True, capture_output=True
    )


@pytest.mark.nightly
@pytest.mark.parametrize("sends", [True, False])
def test_a_kill_at_every_point_of_sending_and_receiving_leaves_whole_artifacts_or_none(tmp_path, monkeypatch, sends):
    with running_s3(monkeypatch) as server:
        for number, moment in enumerate(SENDING if sends else RECEIVING):
            server.empty()
            homes = []
            for name in ("first", "second"):
                folder = tmp_path / f"{number}-{name}"
                folder.mkdir()
                (folder / "store.yaml").write_text(f"store: s3://{BUCKET}/team\n")
                homes.append(Store(folder / "store"))
            first, second = homes
            if not sends:
                assert run(first, "of the first").stdout == "built\n"
            killed = run(first if sends else second, "of the first" if sends else "of the second", *moment)
            assert killed.returncode == -signal.SIGKILL, (moment, killed.stdout, killed.stderr)
            assert all(one.whole for home in homes for one in verify(home)), moment
            for home, content in ((first, "of the first"), (second, "of the second")):
                again = run(home, content)
                assert again.returncode == 0, (moment, again.stderr)
            contents = {
                (one.record.digest, (one.folder / "data" / "content").read_text())
                for home in homes
                for one in home.index().artifacts
            }
            assert [text for _, text in contents] == ["of the first"], moment
            assert all(one.whole for home in homes for one in verify(home)), moment
