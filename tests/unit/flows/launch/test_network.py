"""Nodes that cannot reach one another are reported before a stage starts, as a test with two processes shows."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.launch import slurm_batch
from flows.launch.cluster import order_of
from flows.launch.cluster_job import JobFolder
from flows.launch.network import Rendezvous, address_of, check_reachable, this_machine
from flows.launch.slurm import rendezvous_of
from stages.core.errors import ResourceError
from stages.kinds.registry import KINDS

ROOT = Path(__file__).parents[4]
STEP = {"SLURM_PROCID": "1", "SLURM_LAUNCH_NODE_IPADDR": "127.0.1.1", "MASTER_ADDR": "", "MASTER_PORT": "29999"}
HERE = {"LIFECYCLE_FIRST_MACHINE": this_machine()}
ELSEWHERE = {"LIFECYCLE_FIRST_MACHINE": "another"}
STAGE = ["-c", "import os; print('started on', os.environ.get('GLOO_SOCKET_IFNAME'), flush=True)"]


def order_for(folder, **execution):
    tree = {"kind": "train", "method": "sft", "model": "base", "data": {"dataset": "rows"}, "learning_rate": 1e-4}
    tree |= {"global_batch_size": 8, "layout": {"dp_shard": 2}}
    tree["execution"] = {"launcher": "slurm", "nodes": 2, "slurm": {"partition": "normal"}, **execution}
    return order_of("sft", folder, KINDS["train"].model_validate(tree), STAGE, 60.0)


def run(program, folder, execution, **environment):
    """Run the launcher's program of one node, and return its exit code, its output and its recorded error."""
    order = order_for(folder, **execution)
    job = JobFolder.of(folder)
    job.write(order, {})
    found = subprocess.run(
        [sys.executable, "-m", f"flows.launch.{program}", str(job.path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    error = folder / "error.json"
    return found.returncode, found.stdout, json.loads(error.read_text()) if error.exists() else None


def test_a_node_that_is_told_the_loopback_of_another_machine_starts_nothing(tmp_path):
    code, said, error = run("node_task", tmp_path, {}, **STEP, **ELSEWHERE)
    assert (code, error["error"]) == (ResourceError.exit_code, "ResourceError")
    assert "started" not in said
    assert f"{socket.gethostname()} is to meet the first node at 127.0.1.1" in error["message"]
    assert error["message"].endswith("name the interface that leads to the others in execution.network_interface")


def test_nodes_of_one_machine_meet_on_its_loopback(tmp_path):
    assert run("node_task", tmp_path, {}, **STEP, **HERE)[1].startswith("started on lo")


def test_a_job_that_names_no_interface_of_its_first_node_starts_nothing(tmp_path):
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    code, _, error = run("slurm_batch", tmp_path, {"network_interface": "ib7"}, **batch)
    assert code == ResourceError.exit_code
    assert f"execution.network_interface: {socket.gethostname()} has no address on ib7; it has " in error["message"]
    assert JobFolder.of(tmp_path).end("7").exit_code == ResourceError.exit_code


def test_every_node_needs_the_interface(tmp_path):
    step = {**STEP, "MASTER_ADDR": "192.0.2.77", **ELSEWHERE}
    code, said, error = run("node_task", tmp_path, {"network_interface": "ib7"}, **step)
    assert (code, "started" in said) == (ResourceError.exit_code, False)
    assert "has no address on ib7" in error["message"]


def test_the_address_of_the_named_interface_comes_before_that_of_the_nodes_name(tmp_path):
    meeting = slurm_batch.rendezvous_environment(order_for(tmp_path, network_interface="lo"))
    assert meeting["MASTER_ADDR"] == "127.0.0.1"
    slurms = {**STEP, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    assert rendezvous_of({**slurms, **meeting}) == Rendezvous(1, "127.0.0.1", meeting["MASTER_PORT"], this_machine())
    unnamed = slurm_batch.rendezvous_environment(order_for(tmp_path))
    assert rendezvous_of({**slurms, **unnamed}).address == "10.0.0.1"


@pytest.mark.parametrize("name", ["localhost", "no-such-host.invalid"])
def test_a_node_whose_own_name_is_of_use_to_nobody_else_must_be_told_an_interface(monkeypatch, name):
    """A node whose host name, where gloo listens, is unreachable or loopback needs `execution.network_interface`."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    place = Rendezvous(0, "192.0.2.77", "29999", this_machine())
    with pytest.raises(ResourceError, match=rf"the name of the node {name} resolves to .*execution\.network_interface"):
        check_reachable(place, {})
    check_reachable(place, {"GLOO_SOCKET_IFNAME": "lo"})
    with pytest.raises(ResourceError, match="no address on ib7"):
        check_reachable(place, {"GLOO_SOCKET_IFNAME": "lo,ib7"})


def test_every_interface_with_an_address_is_found():
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family in (socket.AF_INET, socket.AF_INET6) for one in addresses):
            assert address_of(name) in {one.address for one in addresses}
