"""Both ends of a job whose files pass through a bucket of moto's S3: nothing comes twice, in part, or not at all."""

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.launch import through_bucket
from flows.launch.away_task import Courier
from flows.launch.cluster import order_of
from flows.launch.cluster_job import JobEnd, JobFolder
from flows.launch.through_bucket import JobMirror, Parcel, insist, read
from flows.planning.checks import check_buckets
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.store import objects
from flows.store.objects import go_on
from flows.store.record import Index
from flows.store.store import Store
from stages.core.contract import StageInput
from stages.core.errors import RecipeError, StoreError, TransientError
from stages.kinds.registry import KINDS
from tests.faults import tiny
from tests.s3_server import BUCKET, S3Server, running_s3

ADDRESS = f"s3://{BUCKET}/team"
AWAY = {"launcher": "kubernetes", "kubernetes": {"image": "pipeline:1", "store_claim": None}}
METRIC = '{"step": 1, "time_ms": 0, "loss": 1.0}\n'


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as environment, running_s3(environment) as server:
        yield server


@dataclass
class Ends:
    """Work folders of a job at both ends, on this machine: the agent's `here`, the node's `there`."""

    server: S3Server
    home: Path
    here: Path
    there: Path
    mirror: JobMirror

    def courier(self) -> Courier:
        """Return the node's end, as it is before it has received anything."""
        parcel = read(self.mirror._remote, f"jobs/{self.mirror._order.job}/parcel.json", Parcel)
        assert parcel
        order = parcel.order.model_copy(update={"work": self.there})
        self.there.mkdir(exist_ok=True)
        JobFolder.of(self.there).write(order, parcel.environment)
        return Courier(self.mirror._remote, parcel.model_copy(update={"order": order}))

    def begin(self) -> Courier:
        self.mirror.send()
        courier = self.courier()
        courier.receive(go_on)
        return courier


@pytest.fixture
def ends(server, tmp_path, monkeypatch):
    server.empty()
    home, here, there = (tmp_path / name for name in ("home", "here", "there"))
    for folder in (home, here):
        folder.mkdir()
    (home / "store.yaml").write_text(f"store: {ADDRESS}\n")
    monkeypatch.setenv("LIFECYCLE_HOME", str(home))
    monkeypatch.setattr(objects, "RETRIES", 0)
    monkeypatch.setattr(through_bucket, "RETRY_INTERVAL_S", 0.01)
    config = KINDS["download"].model_validate({"kind": "download", "dataset": "builtin/addition", "execution": AWAY})
    order = order_of("rows", here, config, ["-m", "stages"])
    JobFolder.of(here).write(order, {"PLAIN": "value-of-the-environment"})
    stage_input = StageInput(name="rows", kind="download", version="0" * 12, config={}, inputs={}, cache=home / "cache")
    (here / "config.json").write_text(stage_input.model_dump_json())
    (here / "log.txt").write_text("before\n")
    return Ends(server, home, here, there, JobMirror(order))


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def append(file: Path, text: str) -> None:
    with file.open("a") as stream:
        stream.write(text)


def texts(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in through_bucket.files_below(folder)}


def test_a_log_that_is_cut_off_between_two_chunks_goes_on_there(ends, monkeypatch):
    courier = ends.begin()
    append(ends.there / "log.txt", "abcdefghij\n")
    courier.send_growing()
    monkeypatch.setattr(objects, "CHUNK_BYTES", 4)

    def check():
        if (ends.here / "log.txt").read_text() == "before\nabcd":
            raise TransientError("the storage is away")

    with pytest.raises(TransientError):
        ends.mirror.fetch(check)
    ends.mirror.fetch()
    assert (ends.here / "log.txt").read_text() == "before\nabcdefghij\n"


def test_a_line_that_a_killed_stage_left_half_written_is_counted_at_neither_end(ends):
    append(ends.here / "metrics.jsonl", METRIC + '{"step": 2, "ti')
    courier = ends.begin()
    append(ends.there / "metrics.jsonl", METRIC + '{"step": 3')
    courier.send_growing()
    ends.mirror.fetch()
    assert (ends.here / "metrics.jsonl").read_text() == METRIC * 2


def test_a_checkpoint_is_sent_while_other_scratch_files_grow_and_arrives_with_the_metrics_before_it(ends):
    courier = ends.begin()
    scratch = ends.there / "scratch"
    write(scratch / "checkpoints" / "step-1" / "weights", "of step 1")
    write(scratch / "checkpoints" / "partial-step-2" / "weights", "half")
    write(scratch / "weights" / "step 1" / "model", "synced")
    write(scratch / ".state.json.77", "about to be renamed")
    write(scratch / "completions.jsonl", "{}\n")
    write(ends.there / "metrics.jsonl", METRIC)

    def go_on_writing():
        append(scratch / "completions.jsonl", "{}\n")
        # A newer checkpoint is complete: the stage removes this one while it is sent.
        shutil.rmtree(scratch / "checkpoints" / "step-1", ignore_errors=True)

    courier.send_scratch(go_on_writing)
    ends.mirror.fetch()
    arrived = texts(ends.here / "scratch")
    assert arrived.pop("completions.jsonl") == "{}\n"
    assert arrived == {"checkpoints/step-1/weights": "of step 1"}
    assert (ends.here / "metrics.jsonl").read_text() == METRIC
    courier.send_scratch()
    ends.mirror.fetch()
    assert set(texts(ends.here / "scratch")) == {"completions.jsonl"}


def test_a_checkpoint_that_is_cut_off_leaves_the_one_before_whole(ends):
    write(ends.here / "scratch" / "checkpoints" / "step-1" / "weights", "of step 1")
    courier = ends.begin()
    checkpoints = ends.there / "scratch" / "checkpoints"
    (checkpoints / "step-1").rename(checkpoints / "step-2")
    write(checkpoints / "step-2" / "weights", "of step 2")
    write(checkpoints / "step-2" / "optimizer", "of step 2, too")
    courier.send_scratch()

    def check():
        if (ends.here / ".launch" / "scratch").exists():
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        ends.mirror.fetch(check)
    assert texts(ends.here / "scratch") == {"checkpoints/step-1/weights": "of step 1"}
    ends.mirror.fetch()
    assert texts(ends.here / "scratch") == texts(ends.there / "scratch")
    assert not [*(ends.here / ".launch").glob("[so]*/")]


def test_a_part_of_what_is_yet_to_be_received_replaces_nothing(ends):
    write(ends.here / "scratch" / "first", "1")
    write(ends.here / "scratch" / "second", "2")
    ends.mirror.send()
    courier = ends.courier()

    def check():
        if (ends.there / "scratch").exists():
            raise TransientError("the job was asked to end")

    with pytest.raises(TransientError):
        courier.receive(check)
    write(ends.there / "scratch" / "first", "1")
    courier.send_growing()
    courier.send_scratch()
    ends.mirror.fetch()
    assert texts(ends.here / "scratch") == {"first": "1", "second": "2"}


def test_what_a_stage_has_made_waits_at_both_ends_for_a_storage_that_is_away(ends):
    courier = ends.begin()
    write(ends.there / "data" / "train.jsonl", "{}\n")
    append(ends.there / "log.txt", "done")
    with ends.server.throttled(4) as throttle:
        insist(lambda: courier.send_product(0))
    assert throttle.count == 4
    with ends.server.throttled(4) as throttle:
        insist(ends.mirror.fetch)
    assert throttle.count == 4
    assert (ends.here / "data" / "train.jsonl").read_text() == "{}\n"
    assert (ends.here / "log.txt").read_text() == "before\ndone"
    assert JobFolder.of(ends.here).end(ends.mirror._order.job) == JobEnd(job_id=ends.mirror._order.job, exit_code=0)
    ends.mirror.close()
    assert not [key for key in ends.server.objects() if "/jobs/" in key]
    with ends.server.closed(), pytest.raises(StoreError):
        insist(lambda: courier.send_product(0))


def test_neither_secrets_of_the_node_nor_the_environment_stay_in_the_bucket(ends, monkeypatch):
    courier = ends.begin()
    assert JobFolder.of(ends.there).environment() == {"PLAIN": "value-of-the-environment"}
    monkeypatch.setenv("HUB_TOKEN", "secret-of-the-node")
    append(ends.there / "log.txt", "it was secret-of-the-node that it tried\nand it")
    write(ends.there / "error.json", '{"message": "refused secret-of-the-node"}')
    courier.send_growing()
    append(ends.there / "log.txt", " ends")
    courier.send_product(1)
    ends.mirror.fetch()
    assert (ends.here / "log.txt").read_text() == "before\nit was *** that it tried\nand it ends"
    assert (ends.here / "error.json").read_text() == '{"message": "refused ***"}'
    ends.mirror.close()
    left = b"".join(ends.server.objects().values())
    assert b"secret-of-the-node" not in left
    assert b"value-of-the-environment" not in left


def test_a_heartbeat_comes_while_a_transfer_hangs(ends):
    courier = ends.begin()
    append(ends.there / "log.txt", "more\n")
    courier.send_growing()
    heartbeat, is_over = f"jobs/{ends.mirror._order.job}/heartbeat", threading.Event()
    with ends.server.slow("/log.txt", 30.0):
        fetching = threading.Thread(target=ends.mirror.fetch)
        fetching.start()
        pulse = threading.Thread(target=ends.mirror.beat, args=[is_over])
        pulse.start()
        tiny.eventually(lambda: ends.mirror._remote.objects.read(heartbeat), "no heartbeat")
        assert fetching.is_alive()
    is_over.set()
    pulse.join()
    fetching.join()
    assert (ends.here / "log.txt").read_text() == "before\nmore\n"


def test_an_object_that_no_job_has_written_is_an_error_with_a_remedy(ends):
    ends.begin()
    ends.server.put({f"team/jobs/{ends.mirror._order.job}/1/ended.json": b'{"exit_code": "no"}'})
    with pytest.raises(StoreError, match=r"ended\.json cannot be read: job_id: Field required.*same version"):
        ends.mirror.fetch()


def test_a_job_gets_the_input_that_its_own_home_has_although_another_home_has_replaced_it(ends, monkeypatch):
    others = ends.home.parent / "others"
    others.mkdir()
    shutil.copy(ends.home / "store.yaml", others)
    built = tiny.build(Store(ends.home / "store"), "ok", environment={"TINY_CONTENT": "of this home"})
    tiny.build(Store(others / "store"), "ok", force=True, environment={"TINY_CONTENT": "of the other"})
    file = ends.here / "config.json"
    stage_input = StageInput.model_validate_json(file.read_bytes())
    file.write_text(stage_input.model_copy(update={"inputs": {"rows": built.artifact}}).model_dump_json())
    ends.mirror.send()
    node = ends.home.parent / "node"
    node.mkdir()
    monkeypatch.setenv("LIFECYCLE_HOME", str(node))
    ends.courier().receive(go_on)
    folder = StageInput.model_validate_json((ends.there / "config.json").read_bytes()).inputs["rows"]
    assert folder.is_relative_to(node)
    assert (folder / "data" / "content").read_text() == "of this home"


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (
            {"HUB_TOKEN": "a-secret-by-its-name"},
            r"stages\.rows\.execution\.environment holds a secret.*kubernetes\.secrets",
        ),
        ({"PLAIN": "hf_abcdefghijklmnopqrstuvwx"}, r"environment holds a secret"),
        ({}, None),
    ],
)
def test_a_plan_finds_secrets_that_would_lie_in_the_bucket_and_a_missing_bucket(ends, environment, found):
    tree = {"rows": tiny.stage("ok", **AWAY, environment=environment)}
    recipe = load_stages("tiny", Path("/"), tree)
    planned = plan(recipe, {"rows": {}}, Index(()))
    if found:
        with pytest.raises(RecipeError, match=found):
            check_buckets(planned)
        return
    check_buckets(planned)
    (ends.home / "store.yaml").unlink()
    with pytest.raises(RecipeError, match=r"stages\.rows\.execution\.kubernetes\.store_claim: null.*store\.yaml"):
        check_buckets(planned)
