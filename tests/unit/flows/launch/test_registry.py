"""Launchers are known by name only in their own modules; all other code looks them up in registries."""

import ast
from pathlib import Path

import pytest

from flows.launch.cluster import CLUSTERS
from flows.launch.cluster_job import JobOrder
from stages.core.launchers.registry import BLOCKS, LAUNCHERS

ROOT = Path(__file__).parents[4]
OWNERS = ("stages/core/launchers/", "flows/launch/cluster.py", *(f"flows/launch/{name}" for name in LAUNCHERS))
OWNERS += ("flows/launch/manifests.py", "flows/launch/serving_manifests.py", "flows/cli/render.py")
"""Beginnings of the files that may know one launcher; manifests are Kubernetes'."""
OPTIONS = {options.__name__ for options in LAUNCHERS.values()}
OLD_ORDER = """
{"job": "lifecycle-sft-0a", "launcher": "slurm", "stage": "sft", "work": "/w", "home": "/h",
 "stage_command": ["-m", "stages", "/w"], "nodes": 2, "processes": 4, "threads": 3, "network_interface": "ib0",
 "interruptions_without_progress": 2, "heartbeat_patience_s": 60.0,
 "slurm": {"partition": "gpu", "account": null, "qos": null, "time_limit": "1-00:00:00", "gpus_per_node": 4,
  "cpus_per_node": null, "memory_gib_per_node": null, "warning_s": 60, "options": ["--constraint=h100"]},
 "kubernetes": {"image": null, "store_claim": "llm-lifecycle-home", "namespace": "default",
  "service_account": "llm-lifecycle-stage", "job": "train_job", "training_runtime": "torch-distributed",
  "gpus_per_node": null, "gpu_resource": "nvidia.com/gpu", "cpus_per_node": null, "memory_gib_per_node": null,
  "shared_memory_gib": 8.0, "secrets": {}, "node_selector": {}}}
"""
"""Job description as an earlier version wrote it, before launchers were looked up in a registry."""


def names_of_launchers(tree):
    """Yield the syntax nodes that depend on a particular launcher: on its name, its config block or its options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(getattr(side, "attr", getattr(side, "id", None)) == "launcher" for side in sides):
                yield node
        elif (
            (isinstance(node, ast.Attribute) and node.attr in BLOCKS)
            or (isinstance(node, ast.Constant) and node.value in BLOCKS)
            or (isinstance(node, ast.alias) and node.name in OPTIONS)
        ):
            yield node


def test_a_launcher_is_known_in_its_own_modules_only():
    found = [
        f"{name}:{node.lineno}"
        for folder in ("flows", "stages")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not (name := str(file.relative_to(ROOT))).startswith(OWNERS)
        if any(word in (text := file.read_text()) for word in ("launcher", *BLOCKS, *OPTIONS))
        for node in names_of_launchers(ast.parse(text))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        'execution.launcher != "local"',
        'launcher in ("local", "slurm")',
        "execution.slurm.qos",
        'names = {"kubernetes"}',
        "from stages.core.launchers.slurm import SlurmOptions",
    ],
)
def test_a_launcher_that_is_known_is_seen(line):
    assert list(names_of_launchers(ast.parse(line)))


def test_every_launcher_is_local_or_a_cluster():
    assert CLUSTERS.keys() == {name for name, options in LAUNCHERS.items() if not options.IS_LOCAL}


def test_an_order_of_an_earlier_version_is_read():
    order = JobOrder.model_validate_json(OLD_ORDER)
    assert (order.launcher, order.options.time_limit, order.cores_per_node) == ("slurm", "1-00:00:00", 12)


def test_a_machine_says_by_what_it_reaches_a_cluster(tmp_path, monkeypatch):
    for name in ("sbatch", "config"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none:{tmp_path}/config")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    ways_in = {name: cluster.way_in() for name, cluster in CLUSTERS.items()}
    assert ways_in == {
        "slurm": f"jobs are submitted with {tmp_path}/sbatch",
        "kubernetes": f"jobs are created with {tmp_path}/config",
        "ray": "jobs are submitted to http://127.0.0.1:8265",
    }
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.setenv("KUBECONFIG", "/none")
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    assert not any(cluster.way_in() for cluster in CLUSTERS.values())
