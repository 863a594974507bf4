"""Download stages survive kills, lost connections and full disks, or fail clearly, and their errors show no secret."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fault_table
import pytest
from disks import needs_root, small_disk

from stages.core.errors import DownloadError, ModelError, ResourceError, TransientError
from tests.hub_repository import model_files
from tests.hub_server import Fault, HubServer, running_hub

TIMEOUT_S = 300
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running_hub() as server:
        server.repository("org/tiny").commit(model_files(num_values=1_000_000))
        yield server


def start_stage(work: Path, hub: HubServer, source: str = "hf://org/tiny", **environment: str) -> subprocess.Popen[str]:
    config = {"kind": "download", "model": source}
    stage_input = {"name": "base", "kind": "download", "version": "0" * 12, "inputs": {}, "cache": str(work / "cache")}
    (work / "config.json").write_text(json.dumps({**stage_input, "config": config}))
    addresses = {"HF_ENDPOINT": hub.url, "MODELSCOPE_ENDPOINT": hub.url}
    return subprocess.Popen(
        [sys.executable, "-m", "stages", str(work)],
        env={**os.environ, **addresses, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the stage did not get there"
        time.sleep(0.02)


@pytest.mark.parametrize("source", ["hf://org/tiny", "modelscope://org/tiny@main"])
def test_a_killed_download_resumes_where_it_was(
    source: str, hub: HubServer, tmp_path: Path, fault: fault_table.Fault
) -> None:
    fault.name, fault.stage = f"SIGKILL, from {source.partition(':')[0]}", "download"
    size_bytes = len(model_files(1_000_000)[WEIGHTS])
    hub.faults += [Fault(f"(cdn|FilePath=).*{WEIGHTS}", bytes_per_s=1_000_000)]
    process = start_stage(tmp_path, hub, source)
    # What the hub has sent may lie in the sockets: what counts is what the stage has written.
    wait_until(lambda: any(path.stat().st_size > size_bytes // 8 for path in tmp_path.rglob(f"{WEIGHTS}.partial")))
    process.send_signal(signal.SIGKILL)
    finish(process)
    partials = list(tmp_path.rglob("*.partial"))
    assert [path.name for path in partials] == [f"{WEIGHTS}.partial"]
    num_there = partials[0].stat().st_size
    assert size_bytes // 8 < num_there < size_bytes
    hub.served_bytes.clear()

    with fault.timed("recovered"):
        exit_code, output = finish(start_stage(tmp_path, hub, source))
    assert exit_code == 0, output
    fault.lost = f"nothing: went on at byte {num_there:,} of {size_bytes:,}"
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == model_files(1_000_000)[WEIGHTS]
    assert [request.headers["Range"] for request in hub.requests if "Range" in request.headers][
        -1
    ] == f"bytes={num_there}-"
    in_flight_when_killed = 50_000
    assert set(hub.served_bytes) == {WEIGHTS}
    assert hub.served_bytes[WEIGHTS] <= size_bytes - num_there + in_flight_when_killed


def test_a_hub_that_dies_in_the_middle_is_transient_and_the_next_attempt_goes_on(
    hub: HubServer, tmp_path: Path, fault: fault_table.Fault
) -> None:
    fault.name, fault.stage = "network drops, hub away", "download"
    size_bytes = len(model_files(1_000_000)[WEIGHTS])
    hub.faults += [
        Fault("cdn", break_after_bytes=size_bytes // 2, how="close"),
        Fault("cdn", times=99, status=503, retry_after_s=0),
    ]
    with fault.timed("detected"):
        exit_code, _ = finish(start_stage(tmp_path, hub))
    assert exit_code == TransientError.exit_code
    assert json.loads((tmp_path / "error.json").read_text())["error"] == "TransientError"
    hub.faults.clear()
    hub.served_bytes.clear()
    with fault.timed("recovered"):
        exit_code, output = finish(start_stage(tmp_path, hub))
    assert exit_code == 0, output
    assert hub.served_bytes[WEIGHTS] < size_bytes * 3 // 4


def test_each_refusal_has_its_exit_code_and_no_traceback(hub: HubServer, tmp_path: Path) -> None:
    pickles = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    hub.repository("org/old").commit(pickles)
    hub.repository("org/private").commit(model_files())
    hub.repository("org/private").token = "secret"
    hub.repository("org/huge").commit(model_files())
    hub.repository("org/huge").listed_sizes[WEIGHTS] = 10**16
    expected = {
        "hf://org/old": ModelError,
        "hf://org/private": DownloadError,
        "hf://org/nothing": DownloadError,
        "hf://org/huge": ResourceError,
        "file:///nowhere": DownloadError,
    }
    for number, (source, error) in enumerate(expected.items()):
        work = tmp_path / str(number)
        work.mkdir()
        exit_code, output = finish(start_stage(work, hub, source))
        assert exit_code == error.exit_code, output
        assert "Traceback" not in output
        assert json.loads((work / "error.json").read_text())["error"] == error.__name__


def test_the_token_is_used_but_found_nowhere_afterwards(hub: HubServer, tmp_path: Path) -> None:
    secret = "hf_secret_of_the_test"
    hub.repository("org/tiny").token = secret
    process = start_stage(tmp_path, hub, HF_TOKEN=secret)
    exit_code, output = finish(process)
    assert exit_code == 0, output
    assert secret not in output
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


@needs_root
def test_a_disk_that_fills_up_meanwhile_is_a_resource_error_and_keeps_what_arrived(
    hub: HubServer, tmp_path: Path, fault: fault_table.Fault
) -> None:
    fault.name, fault.stage, fault.lost = "disk fills up", "download", "nothing: what arrived is kept"
    disk = tmp_path / "disk"
    with small_disk(disk, 6):
        hub.faults += [Fault("cdn", bytes_per_s=2_000_000)]
        process = start_stage(disk, hub)
        wait_until(lambda: hub.served_bytes.get(WEIGHTS, 0) > 100_000)
        with fault.timed("detected"):
            (disk / "another-program").write_bytes(b"\0" * (4 << 20))
            exit_code, output = finish(process)
        assert exit_code == ResourceError.exit_code, output
        assert f"the disk of {disk}" in output
