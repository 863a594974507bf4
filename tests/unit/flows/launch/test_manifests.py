"""Kubernetes manifests follow the published schemas, and have as few rights as possible."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import kubernetes_validate
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from flows.launch.cluster import order_of
from flows.launch.kubernetes_jobs import COLLECTIONS
from flows.launch.manifests import job_manifests
from flows.launch.serving_manifests import DEREGISTRATION_S, Replicas, serving_manifests
from flows.launch.skypilot import skypilot_task
from flows.recipe.recipe import load_recipe, load_stages
from stages.core.errors import RecipeError
from stages.core.launchers.kubernetes import KubernetesOptions
from stages.kinds.registry import KINDS
from stages.serving.proxy_program import LAST_ANSWERS_TIMEOUT_S
from tests.serving import wait_for
from tests.slurm_cluster import free_ports

ROOT = Path(__file__).parents[4]
SHIPPED = ROOT / "deploy" / "kubernetes"
KUBERNETES_VERSION = kubernetes_validate.latest_version()
TRAINING = {
    "kind": "train",
    "method": "sft",
    "model": "base",
    "data": {"dataset": "problems"},
    "global_batch_size": 16,
    "learning_rate": 1e-4,
}
GPUS = {
    "image": "registry/pipeline@sha256:0",
    "namespace": "ml",
    "gpus_per_node": 8,
    "memory_gib_per_node": 200.0,
    "secrets": {"HF_TOKEN": "hub/token"},
    "node_selector": {"gpu": "h100"},
}
KEY = {"secrets": {"VLLM_API_KEY": "vllm/key"}}
QUEUED = {
    "labels": {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "high"},
    "pod": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "imagePullSecrets": [{"name": "hub"}]},
}
WITH_PODS = ("Job", "Deployment", "StatefulSet")
PLACED = {
    **QUEUED["pod"],
    "priorityClassName": "batch",
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
}


def manifests_of(nodes=1, environment=None, **kubernetes):
    execution = {"launcher": "kubernetes", "nodes": nodes, "environment": environment or {}}
    execution["kubernetes"] = {**GPUS, **kubernetes}
    tree = {**TRAINING, "layout": {"dp_shard": 8 * nodes}, "execution": execution}
    config = KINDS["train"].model_validate(tree)
    return job_manifests(order_of("SFT_night", Path("/home/store/.work/sft"), config, ["-m", "stages"], 60.0))


def served(monitored_from=None, **kubernetes):
    tree = {"kind": "serve", "model": "sft", "execution": {"kubernetes": {"image": "vllm:1", **KEY, **kubernetes}}}
    config = KINDS["serve"].model_validate(tree)
    return serving_manifests(
        "chat", Path("/home/store/model"), "0" * 12, Path("/home"), config, Replicas(1, 4, monitored_from)
    )


def templates_of(manifest):
    """Return the pod templates of a manifest, including the patches of a TrainJob."""
    if manifest["kind"] == "TrainJob":
        (patch,) = manifest["spec"]["runtimePatches"]
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return [replicated["template"]["spec"]["template"]]
    if manifest["kind"] == "CronJob":
        return [manifest["spec"]["jobTemplate"]["spec"]["template"]]
    return [manifest["spec"]["template"]] if manifest["kind"] in WITH_PODS else []


def pods_of(manifest):
    return [template["spec"] for template in templates_of(manifest)]


def shipped():
    for file in sorted({*SHIPPED.glob("*.yaml")} - {SHIPPED / "kustomization.yaml"}):
        yield from (
            pytest.param(tree, id=f"{file.name}-{tree['kind']}-{tree['metadata']['name']}")
            for tree in yaml.safe_load_all(file.read_text())
        )


RENDERED = [
    *(pytest.param(tree, id=f"one-node-{tree['kind']}") for tree in manifests_of()),
    *(pytest.param(tree, id=f"indexed-{tree['kind']}") for tree in manifests_of(nodes=2, job="indexed_job")),
    *(pytest.param(tree, id=f"serve-gpu-{tree['kind']}") for tree in served(gpus_per_node=1)),
    *(pytest.param(tree, id=f"serve-cpu-{tree['kind']}") for tree in served()),
    pytest.param(manifests_of(labels=QUEUED["labels"], pod=PLACED)[-1], id="queued-Job"),
    pytest.param(served(labels=QUEUED["labels"], pod=PLACED)[0], id="queued-Deployment"),
]


@pytest.mark.parametrize("manifest", [*RENDERED, *shipped()])
def test_kubernetes_accepts_it(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_a_pod_without_the_homes_volume_names_the_bucket_and_has_an_empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    with pytest.raises(RecipeError, match=r"store_claim: null.*store\.yaml"):
        manifests_of(store_claim=None)
    (tmp_path / "store.yaml").write_text("store: s3://lake/team\n")
    (job,) = manifests_of(store_claim=None)
    kubernetes_validate.validate(job, KUBERNETES_VERSION, strict=True)
    (pod,) = pods_of(job)
    (container,) = pod["containers"]
    assert container["command"][2:] == ["flows.launch.away_task", "s3://lake/team", job["metadata"]["name"]]
    assert {"name": "LIFECYCLE_HOME", "value": str(tmp_path)} in container["env"]
    assert {"name": "home", "mountPath": str(tmp_path), "readOnly": False} in container["volumeMounts"]
    assert {"name": "home", "emptyDir": {}} in pod["volumes"]
    problems = KubernetesOptions(image="a", store_claim=None).problems(2)
    assert next(problems) == "store_claim: null takes one node; several share a volume"
    with pytest.raises(RecipeError, match=r"store_claim: found null; servers read models from a volume"):
        served(store_claim=None)


def test_the_schemas_would_refuse_a_field_that_there_is_not():
    (job,) = manifests_of()
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES_VERSION, strict=True)


def test_kubeflow_keeps_every_field_of_a_train_job():
    """A rendered TrainJob has only fields that Kubeflow knows, whose models silently drop all others."""
    # Here, since these are 390 modules, and every worker imports this file.
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    _, manifest = manifests_of(nodes=2, **QUEUED)
    assert TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest
    assert QUEUED["pod"].items() <= pods_of(manifest)[0].items()
    assert QUEUED["labels"].items() <= manifest["metadata"]["labels"].items()


@pytest.mark.parametrize("made", [manifests_of, served])
def test_queue_and_place_of_the_recipe_reach_the_pods(made):
    manifest = next(one for one in made(labels=QUEUED["labels"], pod=PLACED) if one["kind"] in ("Job", "Deployment"))
    (template,) = templates_of(manifest)
    for labelled in (manifest, template):
        assert QUEUED["labels"].items() <= labelled["metadata"]["labels"].items()
    assert PLACED.items() <= template["spec"].items()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pod": {"hostNetwork": True}}, "hostNetwork is set by the launcher, or not for recipes"),
        ({"pod": {"containers": []}}, "containers is set by the launcher"),
        ({"pod": {"tolerations": [{"kei": "gpu"}]}}, r"tolerations\.0\.kei: Extra inputs are not permitted"),
        ({"pod": {"priority_class_name": "high"}}, "priority_class_name: expected the names"),
        ({"pod": {"tolerations": [{"toleration_seconds": 3}]}}, "tolerations: expected the names"),
        ({"pod": {"topologySpreadConstraints": [{"maxSkew": "1"}]}}, r"maxSkew: Input should be a valid integer"),
        ({"labels": {"llm-lifecycle.io/job": "x"}}, "llm-lifecycle.io/job is set by the launcher"),
        ({"labels": {"queue name": "x"}}, "expected text of the form"),
        ({"pod": PLACED}, "pod: priorityClassName cannot be set in a TrainJob.*job: indexed_job"),
    ],
)
def test_fields_of_pods_that_are_not_the_recipes_are_refused(options, said):
    execution = {"launcher": "kubernetes", "nodes": 2, "kubernetes": {"image": "pipeline:1", **options}}
    tree = {"mine": {**TRAINING, "model": "base", "layout": {"dp_shard": 16}, "execution": execution}}
    with pytest.raises(RecipeError, match=f"(?s){said}"):
        load_stages("one", Path("/"), tree)


@pytest.mark.parametrize("manifest", [*RENDERED, *shipped(), pytest.param(manifests_of(nodes=2)[-1], id="TrainJob")])
def test_pods_may_as_little_as_possible(manifest):
    for pod in pods_of(manifest):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_jobs_meet_at_ports_that_nobody_knows_before():
    ports = {manifests_of(nodes=2, job="indexed_job")[1]["spec"]["ports"][0]["port"] for _ in range(20)}
    assert len(ports) > 15


@pytest.mark.parametrize("kind", ["indexed_job", "train_job"])
def test_pods_of_several_nodes_are_reached_by_one_another_alone(kind):
    policy, *_, job = manifests_of(nodes=2, job=kind)
    own = policy["spec"]["podSelector"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]
    (template,) = templates_of(job)
    assert own["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert own["matchLabels"]["llm-lifecycle.io/job"] == job["metadata"]["name"]


def test_a_refresh_may_make_and_remove_all_that_its_jobs_consist_of():
    """A refresh's Kubernetes role may create and delete its jobs' resources, named by the API path's last part."""
    roles = yaml.safe_load_all((SHIPPED / "rbac.yaml").read_text())
    (rules,) = [role["rules"] for role in roles if role["kind"] == "Role"]
    may = {
        (group, thing): rule["verbs"] for rule in rules for group in rule["apiGroups"] for thing in rule["resources"]
    }
    for kind, address in COLLECTIONS.items():
        _, prefix, group, *_, thing = address.split("/")
        verbs = may["" if prefix == "api" else group, thing]
        assert set(verbs) == ({"list"} if kind == "Pod" else {"create", "get", "delete"})
    assert may["kueue.x-k8s.io", "workloads"] == ["list"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_no_pod_takes_the_place_of_one_that_has_not_ended(nodes):
    assert manifests_of(nodes=nodes, job="indexed_job")[-1]["spec"]["podReplacementPolicy"] == "Failed"


def test_nor_does_a_nightly_refresh():
    nightly = yaml.safe_load((SHIPPED / "refresh.yaml").read_text())
    kubernetes_validate.validate(nightly, KUBERNETES_VERSION, strict=True)
    assert nightly["spec"]["concurrencyPolicy"] == "Forbid"
    assert nightly["spec"]["jobTemplate"]["spec"]["podReplacementPolicy"] == "Failed"


def test_secrets_are_named_and_not_held():
    (job,) = manifests_of(environment={"MY_TOKEN": "planted"})
    (container,) = job["spec"]["template"]["spec"]["containers"]
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": reference} in container["env"]
    assert "planted" not in str(job)


def test_pods_of_an_indexed_job_find_the_first_of_them():
    _, service, job = manifests_of(nodes=2, job="indexed_job")
    name = job["metadata"]["name"]
    environment = {
        entry["name"]: entry.get("value") for entry in job["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert environment["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert environment["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_a_server_rolls_over_without_a_gap_and_has_a_key():
    deployment, service, _, autoscaler, budget = served(gpus_per_node=1)
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    engine, proxy = deployment["spec"]["template"]["spec"]["containers"]
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    for container in (engine, proxy):
        assert any(entry["name"] == "VLLM_API_KEY" and "valueFrom" in entry for entry in container["env"])
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert autoscaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == "vllm:num_requests_waiting"


def test_a_server_of_adapters_has_them_and_their_base_by_path_and_name(tmp_path):
    base, adapter = tmp_path / "sft" / "model", tmp_path / "dpo" / "adapter"
    base.mkdir(parents=True)
    (base / "config.json").write_text('{"model_type": "qwen3"}')
    adapter.mkdir(parents=True)
    factors = {"A": np.zeros((8, 2)), "B": np.zeros((2, 8))}
    named = {f"base_model.model.layers.0.q_proj.lora_{name}.weight": value for name, value in factors.items()}
    save_file(named, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}')
    kubernetes = {"image": "vllm:1", **KEY}
    tree = {"kind": "serve", "model": "dpo", "base": "sft", "execution": {"kubernetes": kubernetes}}
    config = KINDS["serve"].model_validate(tree)

    made = serving_manifests("chat", base, "0" * 12, tmp_path, config, Replicas(1, 4), {"dpo": adapter})

    engine, _ = pods_of(made[0])[0]["containers"]
    command = engine["command"]
    assert command[command.index("serve") + 1 :][:3] == [str(base), "--served-model-name", "sft"]
    assert json.loads(command[command.index("--lora-modules") + 1]) == {"name": "chat", "path": str(adapter)}
    assert str(tmp_path) in {mount["mountPath"] for mount in engine["volumeMounts"]}


def test_the_proxy_alone_is_reached_and_a_server_reaches_nobody():
    deployment, service, policy, *_ = served()
    engine, proxy = deployment["spec"]["template"]["spec"]["containers"]
    assert "ports" not in engine
    assert not {"--host", "--port"} & set(engine["command"])
    assert engine["command"][engine["command"].index("--uds") + 1] == proxy["command"][-2]
    assert proxy["ports"] == [{"name": "http", "containerPort": 8000}]
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert policy["spec"]["podSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    assert [rule["ports"] for rule in policy["spec"]["ingress"]] == [[{"protocol": "TCP", "port": "http"}]]
    assert policy["spec"]["egress"] == []


@pytest.mark.parametrize(("status", "healthy"), [("200 OK", True), ("503 Service Unavailable", False), (None, False)])
def test_a_probe_asks_the_engine_at_its_socket(tmp_path, status, healthy):
    probe = served()[0]["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
    command = [sys.executable, *probe[1:-1], str(tmp_path / "engine.sock")]
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(tmp_path / "engine.sock"))
        engine.listen()
        asked = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        connection, _ = engine.accept()
        assert connection.recv(100).startswith(b"GET /health HTTP/1.0\r\n\r\n")
        connection.sendall(f"HTTP/1.1 {status}\r\n\r\n".encode() if status else b"")
        connection.close()
        assert (asked.wait(60) == 0) is healthy


ENGINE = r"""
import os, socket, sys, time
from pathlib import Path

folder = Path(sys.argv[1]).parent
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
(folder / "ready").touch()
connection, _ = listener.accept()
connection.recv(65536)
connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegin\r\n")
while not (folder / "go-on").exists():
    time.sleep(0.01)
connection.sendall(b"4\r\n-end\r\n0\r\n\r\n")
connection.close()
time.sleep(600)
"""
"""Program of a fake serving engine that answers one request in two parts, and ends at once on SIGTERM, like vLLM."""


def end_as_kubelet_does(container, process, in_container):
    """End a container as Kubernetes does: run its preStop command, then send SIGTERM to its process."""
    subprocess.run(in_container(container["lifecycle"]["preStop"]["exec"]["command"]), check=True)
    process.send_signal(signal.SIGTERM)


def test_a_pod_that_is_rolled_over_answers_what_it_was_asked(tmp_path):
    engine, proxy = served()[0]["spec"]["template"]["spec"]["containers"]
    port = free_ports(1)[0]
    here = {"/run/engine": str(tmp_path), "python": sys.executable, "8000": str(port), "10": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_API_KEY": "key"}

    def in_container(command):
        return [here.get(word, word).replace("/run/engine", here["/run/engine"]) for word in command]

    start = engine["command"][: engine["command"].index("vllm")]
    commands = {"engine": in_container([*start, "python", "-c", ENGINE, "/run/engine/engine.sock"])}
    commands["proxy"] = in_container(proxy["command"])
    processes = {name: subprocess.Popen(command, env=environment) for name, command in commands.items()}
    try:
        wait_for(lambda: (tmp_path / "ready").exists() and accepts(port), 300)
        headers = {"Authorization": "Bearer key"}
        with httpx.stream("GET", f"http://127.0.0.1:{port}/v1/models", headers=headers, timeout=60) as answer:
            parts = answer.iter_raw()
            assert next(parts) == b"begin"
            ending = [
                threading.Thread(target=end_as_kubelet_does, args=(container, processes[name], in_container))
                for name, container in (("engine", engine), ("proxy", proxy))
            ]
            for thread in ending:
                thread.start()
            wait_for(lambda: not accepts(port), 300)
            assert processes["engine"].poll() is None
            (tmp_path / "go-on").touch()
            assert b"".join(parts) == b"-end"
        assert processes["proxy"].wait(300) == 0
        assert processes["engine"].wait(300) == -signal.SIGTERM
        for thread in ending:
            thread.join(300)
    finally:
        for process in processes.values():
            process.kill()


def accepts(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_pod_has_time_for_its_last_answers_and_a_hung_engine_is_not_waited_for():
    spec = served()[0]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > LAST_ANSWERS_TIMEOUT_S + DEREGISTRATION_S
    engine = spec["containers"][0]
    for probe in ("livenessProbe", "startupProbe"):
        assert engine[probe]["terminationGracePeriodSeconds"] == 30


@pytest.mark.parametrize("left", ["nothing", "a socket", "a link to nothing"])
def test_an_engine_that_is_started_again_finds_no_socket_of_the_one_before(tmp_path, left):
    start = served()[0]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert start[5] == start[start.index("--uds") + 1]
    address = str(tmp_path / "engine.sock")
    if left == "a socket":
        with socket.socket(socket.AF_UNIX) as before:
            before.bind(address)
    elif left == "a link to nothing":
        Path(address).symlink_to(tmp_path / "nowhere")
    engine = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1]); print(*sys.argv[1:])"
    command = [sys.executable, *start[1:5], address, sys.executable, "-c", engine, address, "--and", "more"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{address} --and more\n"), done.stderr


def test_prometheus_of_another_namespace_may_scrape_a_server_with_its_key():
    _, _, policy, *_, monitor = served("monitoring")
    assert policy["spec"]["ingress"][0]["from"][1] == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "vllm", "key": "key"}
    assert monitor["spec"]["selector"] == policy["spec"]["podSelector"]


def test_shipped_manifests_are_one_kustomization_and_its_servers_are_those_of_the_compose_file():
    asked = yaml.safe_load((SHIPPED / "kustomization.yaml").read_text())
    assert {*asked["resources"], "kustomization.yaml"} == {file.name for file in SHIPPED.iterdir()}
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    servers = [*yaml.safe_load_all((SHIPPED / "servers.yaml").read_text())]
    for server in (tree for tree in servers if tree["kind"] in WITH_PODS):
        name, (container,) = server["metadata"]["name"], pods_of(server)[0]["containers"]
        theirs = compose[name]
        assert container.get("command") == without_loopback(theirs.get("command"))
        assert container["image"].removesuffix(":latest") == theirs["image"]
        settings = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        for variable, value in theirs["environment"].items():
            if not variable.endswith("_FILE"):
                assert settings[variable].replace(":$(DATABASE_PASSWORD)@", "@") == value
        for probe in ("startupProbe", "readinessProbe") if "startupProbe" in container else ():
            asked_as = container[probe]["httpGet"]
            assert asked_as["httpHeaders"][0]["value"] in container["command"]
            assert asked_as["path"] in str(theirs["healthcheck"]["test"])


def without_loopback(command):
    """Return a server's command without the name 127.0.0.1, by which Docker's published ports are asked."""
    return command and re.sub(r" --host 127\.0\.0\.1:\d+", "", " ".join(command)).split()


def test_the_kustomization_names_objects_and_images_that_there_are():
    asked = yaml.safe_load((SHIPPED / "kustomization.yaml").read_text())
    assert asked.keys() == {"apiVersion", "kind", "namespace", "resources", "images"}, "read here what is new there"
    trees = [tree for file in asked["resources"] for tree in yaml.safe_load_all((SHIPPED / file).read_text())]
    names = sorted((tree["kind"], tree["metadata"]["name"]) for tree in trees)
    assert len({*names}) == len(names) == len([*shipped()])
    assert {tree["metadata"].get("namespace", asked["namespace"]) for tree in trees} == {asked["namespace"]}
    containers = [one for tree in trees if tree["kind"] in WITH_PODS for one in pods_of(tree)[0]["containers"]]
    assert {image["name"] for image in asked["images"]} <= {one["image"].partition(":")[0] for one in containers}
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(SHIPPED)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        built = [*yaml.safe_load_all(done.stdout)]
        assert sorted((tree["kind"], tree["metadata"]["name"]) for tree in built) == names, done.stderr
        assert {tree["metadata"]["namespace"] for tree in built} == {asked["namespace"]}


def test_a_server_without_a_key_is_refused():
    with pytest.raises(RecipeError, match=r"stages.chat.execution.kubernetes.secrets: expected {VLLM_API_KEY"):
        served(secrets={})


# ----------------------------------------------------------------------------------------------------------- SkyPilot

SKYPILOT = ROOT / ".venv-skypilot" / "bin" / "python"
READ_BY_THEM = """
import json, sys
import sky
from cloudcoil.models.prometheus_operator.v1 import PodMonitor
task, monitor = json.load(sys.stdin)
script = task["run"]
read = sky.Task.from_yaml_config(task)
(wanted,) = read.resources
shown = PodMonitor.model_validate(monitor).model_dump(by_alias=True, exclude_unset=True)
print(json.dumps([wanted.accelerators, read.num_nodes, read.run == script, [*read.storage_mounts], shown]))
"""
"""Program for SkyPilot's environment: reads a task and a PodMonitor; prints what the models of both took."""


def skypilot_task_of(folder, gpus="H100:8", base=None, **execution):
    file = folder / "night one.yaml"
    base = base or {"kind": "download", "model": "builtin/qwen3-1m", "execution": execution}
    file.write_text(yaml.safe_dump({"name": "night_1", "stages": {"base": base}}))
    return skypilot_task(load_recipe(file), file, ["stages.base.execution.retries=1"], gpus, "s3://ours/nights")


def test_a_task_for_skypilot_runs_the_recipe_between_a_restore_and_a_backup(tmp_path):
    task = skypilot_task_of(tmp_path)
    assert task["resources"] == {"accelerators": "H100:8"}
    assert task["file_mounts"]["~/lifecycle-recipes"] == str(tmp_path)
    machine = tmp_path / "machine"
    (machine / "lifecycle-backups" / "backups").mkdir(parents=True)
    (machine / "lifecycle-backups" / "backups" / "1.json").touch()
    (machine / ".venv" / "bin").mkdir(parents=True)
    program = machine / ".venv" / "bin" / "lifecycle"
    program.write_text(f'#!/bin/sh\necho "$LIFECYCLE_HOME" "$@" >> {machine}/said\n[ "$1" != run ] || exit 5\n')
    program.chmod(0o700)
    done = subprocess.run(["bash", "-c", task["run"]], cwd=machine, env={"HOME": str(machine), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 5
    home, recipe, backups = (f"{machine}/lifecycle-{name}" for name in ("home", "recipes/night one.yaml", "backups"))
    assert (machine / "said").read_text().splitlines() == [
        f"{home} restore {backups}",
        f"{home} run {recipe} --set stages.base.execution.retries=1",
        f"{home} backup {backups}",
    ]


def test_what_skypilots_one_machine_cannot_run_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"stages\.base\.execution\.launcher: found slurm, expected local"):
        skypilot_task_of(tmp_path, launcher="slurm")
    with pytest.raises(RecipeError, match="expected GPUs such as H100:8"):
        skypilot_task_of(tmp_path, gpus="H100:0")
    with pytest.raises(RecipeError, match=r"stages\.base: /elsewhere/rows is not below the recipe's folder"):
        skypilot_task_of(tmp_path, base={"kind": "download", "dataset": "file:///elsewhere/rows"})


@pytest.mark.nightly
def test_skypilot_and_prometheus_operator_take_what_is_printed(tmp_path):
    task, monitor = skypilot_task_of(tmp_path), served("monitoring")[-1]
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [SKYPILOT, "-c", READ_BY_THEM],
        input=json.dumps([task, monitor]),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    accelerators, num_nodes, same_script, mounts, shown = json.loads(done.stdout.splitlines()[-1])
    assert (accelerators, num_nodes, same_script) == ({"H100": 8}, 1, True)
    assert mounts == ["~/lifecycle-backups"]
    assert shown == monitor
