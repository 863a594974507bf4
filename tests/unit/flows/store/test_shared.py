"""Homes with disks of their own and one bucket: each artifact is built once, received whole or not at all."""

import asyncio
import json
import logging
import random
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
from click.testing import CliRunner

from flows.champion import shared_champions
from flows.champion.registrations import Registration
from flows.cli.main import cli
from flows.planning.plan import Plan
from flows.report.lineage import node_of
from flows.running.refresh_run import RefreshRun
from flows.running.request import PlannedRefresh, RefreshRequest
from flows.store import lease as leases
from flows.store import objects, upkeep
from flows.store.collect import verify
from flows.store.ledgers import copy_ledger
from flows.store.shared import with_shared
from flows.store.store import Store
from stages.core import errors
from tests.azurite_server import KEY, running_azurite
from tests.faults import tiny
from tests.s3_server import BUCKET, running_s3


@pytest.fixture(scope="module", params=["s3", pytest.param("az", marks=pytest.mark.nightly)])
def server(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        running = running_s3(environment)
        if request.param == "az":
            running = running_azurite(environment, tmp_path_factory.mktemp("azurite"))
        with running as server:
            yield server


@pytest.fixture
def address(server):
    return f"{server.scheme}://{BUCKET}/team"


@pytest.fixture
def home(server, address, tmp_path):
    """Provide a function that makes a home, by its name, with a disk of its own and one bucket in common."""
    server.empty()

    def make(name: str) -> Store:
        (tmp_path / name).mkdir()
        (tmp_path / name / "store.yaml").write_text(f"store: {address}\n")
        return Store(tmp_path / name / "store")

    return make


def build(store: Store, content: str = "content", **options) -> tuple[tiny.BuiltStage, list[str]]:
    """Build the stand-in's dataset in a home, with content of its own; return it and what its observer saw."""
    notes = options.setdefault("notes", tiny.Notes())
    return tiny.build(store, "ok", environment={"TINY_CONTENT": content}, **options), notes.said


def bytes_of(built: tiny.BuiltStage) -> dict[str, bytes]:
    return {name: (built.artifact / name).read_bytes() for name in built.record.files}


def test_what_one_home_has_built_is_planned_and_found_cached_in_another(home, address):
    first, second = home("first"), home("second")
    built, _ = build(first, "of the first")
    planned = tiny.planned_stages(second, {"rows": tiny.stage("ok")})["rows"]
    assert planned.action == "run", "the local store alone has nothing"
    shared = with_shared(second, second.index()).find(built.kind, built.version)
    assert (shared.record, shared.elsewhere) == (built.record, address)
    received, said = build(second, "of the second")
    assert (received.state, said) == ("cached", [])
    assert bytes_of(received) == bytes_of(built)
    assert (received.artifact / "data" / "content").read_text() == "of the first"
    assert all(one.whole for one in verify(second))
    assert build(second)[0].state == build(first)[0].state == "cached"


def test_what_was_built_before_the_setting_is_shared_once_it_is_found_cached(home, address, tmp_path):
    alone = Store(tmp_path / "alone" / "store")
    built, _ = build(alone, "of before")
    (tmp_path / "alone" / "store.yaml").write_text(f"store: {address}\n")
    assert build(Store(alone.root))[0].state == "cached"
    received, _ = build(home("second"))
    assert bytes_of(received) == bytes_of(built)


def test_a_forced_build_replaces_the_artifact_for_all_homes(home):
    first, second = home("first"), home("second")
    build(first, "old")
    build(second)
    build(first, "new", force=True)
    received, said = build(second)
    assert (received.state, (received.artifact / "data" / "content").read_text(), said) == ("cached", "new", [])


def test_a_forced_build_that_could_not_be_sent_is_sent_by_the_next_attempt(home, monkeypatch):
    first, second = home("first"), home("second")
    build(first, "old")
    with monkeypatch.context() as away:

        def refuse(*_):
            raise errors.TransientError("the storage is away")

        away.setattr(objects.Objects, "send", refuse)
        with pytest.raises(errors.TransientError, match="is away"):
            build(first, "new", force=True)
    tree = {"rows": tiny.stage("ok", environment={"TINY_CONTENT": "not built"})}
    planned, notes = tiny.planned_stages(first, tree, force=("rows",))["rows"], tiny.Notes()
    sent = tiny.run_stage(planned, {}, first, notes, attempt=2, launch=tiny.launch)
    assert (sent.state, notes.said) == ("cached", [])
    assert (build(second)[0].artifact / "data" / "content").read_text() == "new"
    assert (build(first)[0].artifact / "data" / "content").read_text() == "new"


def test_a_missing_bucket_is_said(home, address):
    store = home("first")
    (store.root.parent / "store.yaml").write_text(f"store: {address.replace(BUCKET, 'no-such-bucket')}\n")
    with pytest.raises(errors.StoreError, match="there is no such bucket"):
        build(Store(store.root))


def test_contents_other_than_their_names_are_refused_and_leave_no_artifact(home, server):
    build(home("first"))
    second = home("second")
    for key, content in server.objects().items():
        if "/blobs/" in key:
            server.put({key: b"X" * len(content)})
    with pytest.raises(errors.StoreError, match="has other bytes than its name says"):
        build(second)
    assert not second.index().artifacts
    assert not second.index().leftovers


def test_a_lost_content_and_a_short_one_are_refused(home, server):
    build(home("first"))
    blobs = [key for key, content in server.objects().items() if "/blobs/" in key and content]
    server.put({blobs[0]: b""})
    with pytest.raises(errors.StoreError, match="other bytes than its name"):
        build(home("second"))
    for key in blobs:
        server.delete(key)
    with pytest.raises(errors.TransientError, match=r"does not have blobs/[0-9a-f]{64}, which a record names"):
        build(home("third"))


def test_a_record_that_contradicts_itself_or_names_files_elsewhere_is_refused(home, server):
    built, _ = build(home("first"))
    (key,) = [key for key in server.objects() if "/records/" in key]
    good = json.loads(server.objects()[key])
    entry = good["files"]["data/content"]
    changes = [{"version": "0" * 12}, {"digest": "0" * 64}, {"schema_number": 2}, {"stage": "a/b"}, {"files": {}}]
    names = ["../out", "/etc/out", "data/../../out", ".hook", "record.json", "data", "data/a\nb"]
    remote = home("second").remote
    for change in [*changes, *({"files": good["files"] | {name: entry}} for name in names)]:
        server.put({key: json.dumps(good | change).encode()})
        with pytest.raises(errors.StoreError, match=r"records/download/.*|nothing was downloaded"):
            remote.find(built.kind, built.version)
    server.put({key: json.dumps(good).encode()})
    assert remote.find(built.kind, built.version).record == built.record


def test_a_second_home_waits_while_the_first_builds_and_takes_what_it_built(home, monkeypatch):
    monkeypatch.setattr(leases, "LOOK_S", 0.1)
    first, second = home("first"), home("second")
    slow = partial(tiny.build, first, "wait", environment={"TINY_CONTENT": "of the first"})
    builder = threading.Thread(target=slow, daemon=True)  # nothing waits for it if the second home fails
    builder.start()
    ready = tiny.eventually(lambda: next(first.root.glob(".work/*/*/scratch/ready"), None), "no start")

    class Releaser(tiny.Notes):
        def waiting(self):
            super().waiting()
            if ready.exists():
                ready.with_name("release").touch()

    received, said = build(second, notes=Releaser())
    builder.join()
    assert (received.state, set(said)) == ("cached", {"waiting"})
    assert (received.artifact / "data" / "content").read_text() == "of the first"


def test_the_lease_of_a_dead_home_is_taken_over_and_its_own_at_once(home, monkeypatch):
    monkeypatch.setattr(leases, "LOOK_S", 0.1)
    first, second = home("first"), home("second")
    left = leases._take(first.remote.objects, "leases/a", first.identity(), pytest.fail)
    assert leases._take(first.remote.objects, "leases/a", first.identity(), pytest.fail).tag != left.tag
    monkeypatch.setattr(leases, "LEASE_S", 0.5)
    waits = []
    since_s = time.monotonic()
    leases._take(second.remote.objects, "leases/a", second.identity(), lambda: waits.append(1))
    assert time.monotonic() - since_s > 0.5
    assert waits


def test_who_has_lost_the_lease_commits_nothing(home, server):
    first, second = home("first"), home("second")

    class Robbed(tiny.Notes):
        def ended(self, outcome):
            super().ended(outcome)

        def tick(self):
            if "tick" not in self.said:  # as a home does that saw no renewal for a minute
                name = next(key for key in server.objects() if "/leases/" in key).removeprefix("team/")
                held = second.remote.objects.read(name)
                assert second.remote.objects.replace(name, leases._note(second.identity()), held)
            super().tick()

    with pytest.raises(errors.TransientError, match=r"took over leases/download-.*; nothing was committed"):
        build(first, notes=Robbed())
    assert not first.index().artifacts
    assert not [key for key in server.objects() if "/records/" in key]


def test_a_renewal_whose_answer_was_lost_loses_no_lease(home):
    store = home("first")
    with leases.lease(store.remote.objects, "leases/a", store.identity(), pytest.fail) as held:
        known = held._held
        held.check()
        held._held = known  # as if the answer had not come
        held.check()


def registration(mark: str, artifact: str) -> Registration:
    return Registration(name="adder", model=artifact, digest=mark, evaluations=(), description=f"model {mark}")


def test_of_two_homes_that_promote_at_a_time_one_crowns_its_candidate(home):
    first, second = home("first"), home("second")
    built, _ = build(first)
    build(second)
    key, outcomes = f"{built.kind}/{built.version}", []
    crowns = [shared_champions.SharedChampions(one) for one in (first, second)]
    old = shared_champions.Crowned(registration=registration("old", key))
    crowns[0].crown(old, None)

    def promote(number: int) -> None:
        candidate = shared_champions.Crowned(
            registration=registration(f"of {number}", key), promotion=f"a/promote-{number}"
        )
        try:
            crowns[number].crown(candidate, old)
            outcomes.append(number)
        except errors.OutdatedVerdictError:
            outcomes.append("outdated")

    together = [threading.Thread(target=promote, args=[number]) for number in (0, 1)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    assert outcomes.count("outdated") == 1
    (winner,) = (one for one in outcomes if one != "outdated")
    for one in crowns:
        crown, _ = one.read("adder")
        assert (crown.champion.digest, crown.previous, crown.number) == (f"of {winner}", old, 2)


def test_no_champion_is_crowned_whose_weights_others_cannot_have(home):
    first = home("first")
    lost = shared_champions.Crowned(registration=registration("lost", "train/0123456789ab"))
    with pytest.raises(errors.StoreError, match="so other homes could not serve it"):
        shared_champions.SharedChampions(first).crown(lost, None)
    assert shared_champions.SharedChampions(first).read("adder") is None


def test_a_lost_answer_to_a_write_is_no_lost_write(home):
    store = home("first").remote.objects
    held = store.create("a", b"1")
    assert store.create("a", b"1").tag == held.tag, "the same request, repeated by the client"
    assert store.create("a", b"2") is None
    changed = store.replace("a", b"2", held)
    assert store.replace("a", b"2", held).tag == changed.tag
    assert store.replace("a", b"3", held) is None
    assert store.read("a").content == b"2"
    assert store.replace("absent", b"3", held) is None


def test_it_can_be_asked_in_a_thread_that_runs_an_event_loop(home):
    store = home("first").remote.objects
    store.write("a", b"content")

    async def asked() -> int:
        return store.written("a").size_bytes

    assert asyncio.run(asked()) == 7


def test_a_content_of_several_parts_arrives_whole(home, server, tmp_path):
    store = home("first").remote.objects
    content = random.Random(3).randbytes(2 * objects.CHUNK_BYTES + 12_345)
    (tmp_path / "large").write_bytes(content)
    store.send("blobs/large", tmp_path / "large", objects.go_on)
    assert server.objects()["team/blobs/large"] == content
    received = bytearray()
    store.receive("blobs/large", len(content), received.extend, objects.go_on)
    assert received == content


def test_upkeep_deletes_what_no_home_needs_and_names_what_the_bucket_lacks(home, address, server, monkeypatch):
    first = home("first")
    old, _ = build(first, "old")
    shared_champions.SharedChampions(first).crown(
        shared_champions.Crowned(registration=registration("old", f"{old.kind}/{old.version}")), None
    )
    for mark in ("superseded", "latest"):
        tree = {"rows": {**tiny.stage("ok", environment={"TINY_CONTENT": mark}), "files": [mark]}}
        planned = tiny.planned_stages(first, tree)["rows"]
        tiny.run_stage(planned, {}, first, tiny.Notes(), launch=tiny.launch)
    protected = shared_champions.SharedChampions(first).artifacts()
    assert protected == {old.version}
    assert upkeep.find_unneeded(first.remote, protected, 0) == ([], ()), "all is younger than two days"
    monkeypatch.setattr(upkeep, "FRESH", timedelta(seconds=-60))
    blobs = {key: content for key, content in server.objects().items() if "/blobs/" in key}
    unneeded, _ = upkeep.find_unneeded(first.remote, protected, 0)
    monkeypatch.setenv("LIFECYCLE_HOME", str(first.root.parent))
    listed = CliRunner().invoke(cli, ["gc", "--shared", "--dry-run", "--older-than-days", "0", "--json"])
    shown = [one["path"] for one in json.loads(listed.stdout)["garbage"]]
    assert {one.listed.name for one in unneeded} <= set(shown)
    assert [one.reason for one in unneeded].count(f"superseded in {address}") == 1
    assert not upkeep.delete(first.remote, unneeded).failures
    left = server.objects()
    gone = {content for key, content in blobs.items() if key not in left}
    assert b"superseded" in gone
    assert not gone & {b"old", b"latest"}
    assert not [names for _, names in upkeep.lacking(first.remote) if names]
    assert bytes_of(build(home("second"))[0]) == bytes_of(old)
    server.delete(next(key for key, content in blobs.items() if content == b"old"))
    answer = CliRunner().invoke(cli, ["verify", "--json"])
    assert json.loads(answer.stdout)["lacking"] == {f"{old.kind}/{old.version}": ["data/content"]}
    assert answer.exit_code == errors.StoreError.exit_code


def test_upkeep_keeps_what_living_jobs_need_and_removes_what_dead_ones_left(home, server, monkeypatch):
    remote = home("first").remote
    names = {key: f"blobs/{key * 64}" for key in "abc"}
    server.put({f"team/{name}": b"of a job" for name in names.values()})
    server.put(
        {
            f"team/jobs/j/{name}": f'{{"sha256": "{key * 64}"}}'.encode()
            for name, key in (("parcel.json", "a"), ("1/scratch.json", "b"))
        }
    )
    server.put({"team/jobs/j/heartbeat": b"1"})
    monkeypatch.setattr(upkeep, "FRESH", timedelta(seconds=-60))
    unneeded = {one.listed.name for one in upkeep.find_unneeded(remote, (), 0)[0]}
    assert unneeded == {names["c"], "jobs/j/parcel.json", "jobs/j/1/scratch.json", "jobs/j/heartbeat"}
    monkeypatch.setattr(upkeep, "FRESH", timedelta(seconds=60))
    assert upkeep.find_unneeded(remote, (), 0) == ([], ())


def test_upkeep_names_stray_and_damaged_objects_and_goes_on(home, address, server, monkeypatch):
    first = home("first")
    built, _ = build(first)
    monkeypatch.setattr(upkeep, "FRESH", timedelta(seconds=-60))
    monkeypatch.setenv("LIFECYCLE_HOME", str(first.root.parent))
    server.put({"team/records/notes.txt": b"by hand", "team/blobs/" + "0" * 64: b"unneeded"})

    def unreadable() -> tuple[list[str], list[str]]:
        verified = CliRunner().invoke(cli, ["verify", "--json"])
        assert (verified.exit_code, json.loads(verified.stdout)["lacking"]) == (errors.StoreError.exit_code, {})
        collected = CliRunner().invoke(cli, ["gc", "--shared", "--older-than-days", "0", "--json"])
        assert collected.exit_code == errors.StoreError.exit_code
        return json.loads(verified.stdout)["unreadable"], json.loads(collected.stdout)["failures"]

    stray = [f"{address}/records/notes.txt is no record of an artifact; delete this object"]
    damaged = f"team/records/{built.kind}/{'0' * 12}.json"
    server.put({damaged: b"{"})
    for found in unreadable():
        assert found[1:] == stray
        assert f"{'0' * 12}.json is no record that this version can read" in found[0]
    assert "team/blobs/" + "0" * 64 in server.objects(), "the damaged record may name it"
    server.delete(damaged)
    assert unreadable() == (stray, stray)
    assert "team/blobs/" + "0" * 64 not in server.objects()
    assert f"DAMAGED  {stray[0]}\n" in CliRunner().invoke(cli, ["verify"]).stdout
    assert bytes_of(build(home("second"))[0]) == bytes_of(built)


def test_a_stop_ends_a_long_transfer_at_once_and_the_next_attempt_goes_on(home, server):
    first, second = home("first"), home("second")

    def seconds_until_stopped(store: Store) -> float:
        """Stop a build once its transfer is under way; return the seconds until it has ended."""
        stop, stopped_s = threading.Event(), []
        with server.slow("/blobs/", 60.0) as has_come:
            stopper = threading.Thread(
                target=lambda: has_come.wait(tiny.PATIENCE_S) and (stopped_s.append(time.monotonic()), stop.set())
            )
            stopper.start()
            with pytest.raises(errors.RefreshStoppedError, match="between the shared store and this machine"):
                build(store, "of the first", stop=stop)
            stopper.join()
            return time.monotonic() - stopped_s[0]

    assert seconds_until_stopped(first) < 5.0
    assert not [key for key in server.objects() if "/records/" in key]
    built, said = build(first, "not built again")
    assert (built.state, said) == ("cached", [])
    assert seconds_until_stopped(second) < 5.0
    assert not second.index().artifacts
    assert bytes_of(build(second)[0]) == bytes_of(built)


def test_a_forced_stage_forgets_old_scratch_although_its_first_attempt_never_began(home, server):
    store = home("first")
    planned = tiny.planned_stages(store, {"rows": tiny.stage("stumble")})["rows"]
    with pytest.raises(errors.LifecycleError):
        tiny.run_stage(planned, {}, store, tiny.Notes(), launch=tiny.launch)
    forced = tiny.planned_stages(store, {"rows": tiny.stage("steps")}, force=("rows",))["rows"]
    notes = tiny.Notes()
    with server.closed(), pytest.raises(errors.StoreError, match="the credentials"):
        tiny.run_stage(forced, {}, store, notes, launch=tiny.launch)
    assert notes.said == []
    tiny.run_stage(forced, {}, store, notes, attempt=2, launch=tiny.launch)
    assert not notes.attempts[0].resumed
    assert notes.outcomes[0].result.metrics["first_step"] == 0


def test_lineage_of_an_artifact_that_is_only_in_the_bucket_comes_from_its_record(home):
    built, _ = build(home("first"))
    second = home("second")
    index = with_shared(second, second.index())
    tree = node_of(index.find(built.kind, built.version), index)
    assert (tree.digest, tree.recipe) == (built.record.digest, "tiny")
    assert {one.name: one.num_rows for one in tree.files} == {"content": None, "train.jsonl": None}
    assert not second.index().artifacts


def test_another_home_reads_how_a_shared_artifact_was_made(home, server, monkeypatch):
    first, second = home("first"), home("second")
    tree = {"rows": tiny.stage("steps", environment={"TINY_STEP_SECONDS": "0", "TINY_CONTENT": "of the first"})}
    monkeypatch.setenv("LIFECYCLE_MLFLOW", "off")

    def refresh(store: Store) -> RefreshRun:
        monkeypatch.setenv("LIFECYCLE_HOME", str(store.root.parent))
        plan = Plan("tiny", tiny.planned_stages(store, tree))
        run = RefreshRun(PlannedRefresh(RefreshRequest("tiny.yaml"), plan, store), launch=tiny.launch)
        run.build("rows", 1, logging.getLogger())
        assert run.finish().state == "completed"
        return run

    def answer(*command: str) -> str:
        answered = CliRunner().invoke(cli, command)
        assert answered.exit_code == 0, answered.output
        return answered.stdout

    made = refresh(first)
    name, of_rows = made.ledger.folder.name, made.built["rows"]
    assert of_rows.record.attempt == f"{name}/rows-1"
    with (of_rows.artifact / "log.txt").open("a") as log:
        log.write("said by its processes\n")
    copy_ledger(first, made.ledger, made.record.attempts["rows-1"])
    here = [answer("show", name, "--json"), answer("logs", "rows")]
    (written,) = [content for key, content in server.objects().items() if key.endswith("ledger.jsonl")]
    assert str(first.root.parent).encode() not in written
    assert b'"folder":"store/download/rows-' in written
    assert refresh(second).built["rows"].state == "cached"
    there = [answer("show", name, "--json"), answer("logs", "rows", "--refresh", name)]
    moved = [text.replace(str(first.root.parent), str(second.root.parent)) for text in here]
    assert [json.loads(there[0]), there[1]] == [json.loads(moved[0]), moved[1]]
    assert answer("logs", of_rows.version) == here[1] == "said by its processes\n"
    assert name in answer("lineage", "rows", "--json")

    monkeypatch.setattr(upkeep, "FRESH", timedelta(seconds=-60))
    copied = {f"ledgers/{name}/{file}" for file in ("ledger.jsonl", "rows-1.txt")}
    assert not copied & {one.listed.name for one in upkeep.find_unneeded(second.remote, (), 0)[0]}
    server.delete(next(key for key in server.objects() if "/records/" in key))
    assert copied <= {one.listed.name for one in upkeep.find_unneeded(second.remote, (), 0)[0]}


def test_refusals_of_the_storage_are_one_sentence_without_credentials(home, server, monkeypatch):
    first = home("first")
    refusal = pytest.raises(errors.StoreError, match="the credentials of the environment may not do this")
    with server.closed(), refusal as caught:
        build(first)
    assert "-of-the-test" not in str(caught.value) and KEY not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_storage_that_throttles_is_asked_again_for_a_limited_time(home, server, monkeypatch):
    monkeypatch.setattr(objects, "RETRIES", 2)
    first = home("first")
    with server.throttled(2) as refused:
        assert first.remote.find("download", "0" * 12) is None
    assert refused.count == 2
    with (
        server.throttled(1000) as refused,
        pytest.raises(errors.TransientError, match=r"no good answer.*503") as caught,
    ):
        first.remote.find("download", "0" * 12)
    assert refused.count == 3
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["store: https://a/b", "store: s3://key:secret@a/b", "bucket: a", "[]", "store: s3://a/../b"]
)
def test_a_wrong_setting_is_refused_with_what_is_expected(tmp_path, text):
    (tmp_path / "store.yaml").write_text(text)
    with pytest.raises(errors.RecipeError, match=r"store.yaml: .*s3://BUCKET/PREFIX"):
        assert Store(tmp_path / "store").remote
