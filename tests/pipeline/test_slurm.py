"""Training and curation as Slurm jobs of two nodes give what processes here give; training also when it is resumed."""

import json
import threading

import pytest

from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.running.runner import run_stage
from flows.store.store import Store
from stages.core.errors import StageCrashError
from tests.cluster_stages import Notes, Refresh, messages
from tests.planted_rows import planted_duplicates
from tests.slurm_cluster import eventually, running_cluster, why_not
from tests.train_stage import logged, make_artifacts

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
NUM_STEPS = 24
FIELDS = {"steps": NUM_STEPS, "warmup_steps": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def artifacts(folder):
    return make_artifacts(folder / "artifacts")


@pytest.fixture(scope="module")
def local(folder, artifacts):
    """Provide the outcome of the SFT stage on two local processes, which a Slurm job must match."""
    return Refresh(folder / "local", artifacts, {"checkpoint_every_steps": 4}, **FIELDS).run()


@pytest.fixture(scope="module")
def cancelled(folder, artifacts):
    """Provide the error of a two-node Slurm job cancelled after a checkpoint, and the outcome of its resumption."""
    (folder / "cluster").mkdir()
    execution = {"launcher": "slurm", "nodes": 2, "checkpoint_every_steps": 4}
    with running_cluster(folder / "cluster") as cluster:
        for number in range(5):  # on a busy machine it may have ended before it is cancelled
            refresh = Refresh(folder / f"slurm-{number}", artifacts, execution, **FIELDS)
            if error := error_of_cancelled(cluster, refresh):
                break
        assert cluster.jobs() == []
        built = refresh.run()
        assert cluster.jobs() == []
    return error, built


def error_of_cancelled(cluster, refresh):
    """Run a refresh whose job is cancelled after its first checkpoint; return its error, None if it ended before."""

    has_ended = threading.Event()

    def cancel() -> None:
        checkpoints = eventually(
            lambda: [*refresh.work.glob("scratch/checkpoints/step-*")] or has_ended.is_set(), "no checkpoint"
        )
        if checkpoints is not True:
            cluster.command("scancel", f"--name={refresh.job}")

    canceller = threading.Thread(target=cancel)
    canceller.start()
    try:
        refresh.run()
    except StageCrashError as error:
        return error
    finally:
        has_ended.set()
        canceller.join()
    return None


def test_a_job_that_was_cancelled_says_so_and_what_to_do(cancelled):
    error, _ = cancelled
    assert "of sft was cancelled by somebody else (scancel); run again to continue" in str(error)


def test_the_next_run_continues_from_the_checkpoint_on_both_nodes(cancelled):
    _, built = cancelled
    log = (built.artifact / "log.txt").read_text()
    assert "continuing from the checkpoint of step" in log
    lines = (built.artifact / "events.jsonl").read_text().splitlines()
    messages = [json.loads(line)["message"] for line in lines]
    assert sum("runs on node[1-2]" in message for message in messages) == 2


def test_two_nodes_learn_what_two_local_processes_learn(local, cancelled):
    _, built = cancelled
    steps, expected = logged(built.artifact), logged(local.artifact)
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert [row["loss"] for row in steps] == [row["loss"] for row in expected]


def test_what_the_launcher_needs_is_no_part_of_the_artifact(local, cancelled):
    _, built = cancelled
    assert built.version == local.version
    assert sorted(built.record.files) == sorted(local.record.files)
    assert not (built.artifact / ".launch").exists()


def curation(folder, source, execution):
    """Plan and run a download of rows and a stage that curates them, in a store of its own; return the outcome."""
    steps = {"exact_duplicates": True, "near_duplicates": {}, "held_out": {"fraction": 0.2}}
    tree = {
        "rows": {"kind": "download", "dataset": f"file://{source}"},
        "clean": {"kind": "curate", "datasets": ["rows"], **steps, "execution": execution},
    }
    recipe = load_stages("cluster", folder, tree)
    store, built = Store(folder / "store"), {}
    for name, stage in plan(recipe, resolve_outside(recipe, tuple(tree)), store.index()).stages.items():
        built[name] = run_stage(stage, built, store, Notes())
    return built["clean"]


@pytest.mark.nightly
def test_two_nodes_curate_the_bytes_of_this_machine(tmp_path):
    """`make test` covers this by two local processes, in `unit/stages/kinds/curate/test_nodes.py`."""
    source = tmp_path / "source"
    source.mkdir()
    rows = (json.dumps({"text": text}) for text in planted_duplicates(1000).texts)
    (source / "train.jsonl").write_text("\n".join(rows) + "\n")
    here = curation(tmp_path / "here", source, {})
    (tmp_path / "cluster").mkdir()
    with running_cluster(tmp_path / "cluster") as cluster:
        there = curation(tmp_path / "there", source, {"launcher": "slurm", "nodes": 2, "threads": 1})
        assert cluster.jobs() == []
    assert "runs on node[1-2]" in messages(there.artifact)
    assert there.version == here.version
    # These two name the home, and the nodes.
    there_made, here_made = (
        {name: entry for name, entry in one.record.files.items() if name not in ("config.json", "events.jsonl")}
        for one in (there, here)
    )
    assert there_made == here_made and {"data/train.jsonl", "data/validation.jsonl", "report.json"} < set(here_made)
