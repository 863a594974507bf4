"""Several nodes write the bytes of one, also after one of them was killed; here each is a process of this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stages.core.contract import StageInput
from stages.core.process_tree import descendants, wait_for_end
from stages.data.files import RowLocation
from stages.kinds.curate import nodes
from stages.kinds.curate.judging import DroppedRow, KeptRow
from stages.kinds.curate.run import KEEP_EVERY
from stages.kinds.curate.spool import SourcePlace
from tests.planted_rows import planted_duplicates
from tests.unit.stages.kinds.curate.test_resumed import STEPS, written

NUM_ROWS = 3000


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    texts = planted_duplicates(500).texts
    rows = [json.dumps({"text": f"{texts[number % 500]} {number // 500}"}) for number in range(NUM_ROWS)]
    rows[70], rows[140] = '{"text": 5, "why": "\\ud83d"}', "no JSON"
    rows[700] = json.dumps({"text": "Write to me@example.com about the seven seas — or the eighth."})
    for name, own in (("first", rows[:1310]), ("second", rows[1310:])):
        (folder / name / "data").mkdir(parents=True)
        (folder / name / "data" / "train.jsonl").write_text("\n".join(own) + "\n")
    return folder


def begun(work, datasets, processes, **steps):
    """Start a curate stage as launchers do on nodes of one process each."""
    work.mkdir(exist_ok=True)
    inputs = {name: datasets / name for name in ("first", "second")}
    config = {"kind": "curate", "datasets": list(inputs), **STEPS, **steps}
    stage = StageInput(
        name="clean", kind="curate", version="0" * 12, config=config, inputs=inputs, cache=work / "cache"
    )
    (work / "config.json").write_text(stage.model_dump_json())
    words = f"-m stages.parallel.ranks --processes={processes} -- -m stages {work}".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *words], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, datasets):
    work = tmp_path_factory.mktemp("one")
    process = begun(work, datasets, 1)
    assert process.communicate()[1] == "" and not process.returncode
    return written(work)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 4])
def test_nodes_write_the_bytes_of_one(tmp_path, datasets, whole, count):
    process = begun(tmp_path, datasets, count)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert written(tmp_path) == whole


def test_a_node_that_dies_ends_the_others_and_what_was_kept_is_not_judged_again(tmp_path, datasets, whole):
    process = begun(tmp_path, datasets, 2)
    note = tmp_path / "scratch" / "rows" / "kept.json"
    while not note.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    started = descendants(process.pid)
    (helping,) = (pid for pid in started if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(helping, signal.SIGKILL)
    process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    wait_for_end(lambda: [pid for pid in started if Path(f"/proc/{pid}").exists()], 10)
    again = begun(tmp_path, datasets, 2)
    assert again.communicate()[1] == "" and not again.returncode
    assert written(tmp_path) == whole
    events = (tmp_path / "events.jsonl").read_text()
    continued = [json.loads(line)["message"] for line in events.splitlines() if "continuing after" in line]
    assert len(continued) == 1 and int(continued[0].split()[2]) >= KEEP_EVERY


@pytest.mark.nightly
def test_rows_that_end_the_stage_end_it_on_all_nodes(tmp_path, datasets):
    process = begun(tmp_path, datasets, 2, on_bad_rows="fail")
    process.communicate()
    assert process.returncode
    error = json.loads((tmp_path / "error.json").read_text())
    assert "first" in error["message"] and "71" in error["message"]


def test_what_travels_is_what_was_found():
    place = SourcePlace("first", RowLocation("train.jsonl", 7))
    numbers = np.arange(3, dtype=np.uint64) << np.uint64(62), np.arange(5, dtype=np.uint32)
    kept = KeptRow('["ä", 1]\n'.encode(), b"\x00\xff" * 4, Counter(email=2), *numbers)
    dropped = DroppedRow(
        place, "length", "is short", {"text": "\ud83d", "of": [1.5, None, float("inf")]}, Counter(email=1)
    )
    first, second = nodes.decoded(nodes.encoded([kept, dropped]))
    assert (first.line, first.digest, first.masked) == (kept.line, kept.digest, kept.masked)
    assert first.runs.tolist() == kept.runs.tolist() and first.signature.tolist() == kept.signature.tolist()
    assert second == dropped
