"""Kubernetes manifests that serve a model: Deployment, Service, NetworkPolicy, budget, autoscaler, monitor. Pure.

A pod has two containers: an engine that listens on a Unix socket, and the proxy, which checks the API key and is the
only one with a port.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from flows.launch.manifests import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    Manifest,
    environment_by_reference,
    resources,
    volume_mounts,
    volumes,
)
from stages.core.errors import RecipeError
from stages.core.launchers.kubernetes import KubernetesOptions
from stages.kinds.serve.config import ServeConfig
from stages.serving.backend import EngineAddress
from stages.serving.config import Speculation
from stages.serving.engine import LaunchSpec
from stages.serving.proxy import API_KEY_VARIABLE, METRICS
from stages.serving.proxy_program import LAST_ANSWERS_TIMEOUT_S, LOCK_NAME
from stages.serving.registry import chosen_engine

PORT = 8000
SOCKET = Path("/run/engine/engine.sock")
PROXY_CODE = "/opt/lifecycle"
"""Folder of the server image (`deploy/docker/serve.Dockerfile`) with this project's code, for the proxy."""
IS_HEALTHY = """
import socket, sys
engine = socket.socket(socket.AF_UNIX)
engine.settimeout(5)
engine.connect(sys.argv[1])
engine.sendall(b"GET /health HTTP/1.0\\r\\n\\r\\n")
sys.exit(b" 200 " not in engine.recv(64))
"""
"""Program that probes the engine's `/health`, without packages and in a fraction of a second."""
REMOVE_AND_START = """
import os, sys
if os.path.lexists(sys.argv[1]):
    os.unlink(sys.argv[1])
os.execvp(sys.argv[2], sys.argv[2:])
"""
START = ("python", "-I", "-S", "-c", REMOVE_AND_START)
"""Command that starts the engine after removing its Unix socket: the volume outlives a container, and engines do not
listen where a socket lies already."""
AWAIT_PROXY = """
import fcntl, sys
with open(sys.argv[1], "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_SH)
"""
"""Program that waits for the proxy's end, since engines end at once when asked to: they are asked only after the proxy
has sent its last answer."""
HUNG_ENGINE_GRACE_S = 30
DEREGISTRATION_S = 10
"""Seconds after which no node of the cluster sends new requests to a pod that is about to end."""
SERVE_LABEL = "llm-lifecycle.io/serve"
WAITING_REQUESTS_PER_REPLICA = 4
"""Average number of waiting requests for each replica above which the autoscaler adds a replica."""
CORE_UTILIZATION_PERCENT = 80


@dataclass(frozen=True)
class Replicas:
    """Smallest and largest number of replicas that the autoscaler may run.

    monitored_from: namespace of the Prometheus that is to scrape them, where Prometheus Operator runs; None for none.
    """

    least: int
    most: int
    monitored_from: str | None = None


def serving_manifests(
    name: str,
    model: Path,
    version: str,
    home: Path,
    config: ServeConfig,
    replicas: Replicas,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    speculation: Speculation | None = None,
) -> list[Manifest]:
    """Return the Kubernetes manifests that serve a model with an autoscaled number of replicas.

    name: of the Deployment and of what the stage serves; adapters of other stages are called by their stages. model:
    folder of the weights, below `home`. version: of the serve stage; another version replaces the pods one by one.
    adapters: stage → folder, below `home` too. speculation: how the server guesses tokens ahead.

    Raises `RecipeError` when the recipe lacks what only Kubernetes needs, `ModelError` for what cannot be served.
    """
    asked = _checked_options(name, config)
    labels = {**asked.labels, SERVE_LABEL: name}
    metadata = {"name": name, "namespace": asked.namespace, "labels": labels}
    pod = _pod(name, model, home, config, adapters, speculation=speculation)
    template = {"metadata": {"labels": {**labels, "llm-lifecycle.io/version": version}}, "spec": pod}
    deployment = {
        "selector": {"matchLabels": {SERVE_LABEL: name}},
        # A new model takes over when it answers; until then the old one serves with all its replicas.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": template,
    }
    policy = {
        "podSelector": {"matchLabels": {SERVE_LABEL: name}},
        "policyTypes": ["Ingress", "Egress"],
        # Pods of the namespace may reach the proxy's port. A server sends no requests itself: no egress.
        "ingress": [{"from": _callers(replicas), "ports": [{"protocol": "TCP", "port": "http"}]}],
        "egress": [],
    }
    # Nodes are drained one replica at a time, and a single replica does not keep its node from that.
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": {SERVE_LABEL: name}}}
    service = {"selector": {SERVE_LABEL: name}, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]}
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": policy},
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": metadata,
            "spec": _autoscaler(name, asked, chosen_engine(config.serving).waiting_requests_metric, replicas),
        },
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": budget},
        *([_pod_monitor(metadata, asked)] if replicas.monitored_from else []),
    ]


def _callers(replicas: Replicas) -> list[Manifest]:
    """Return who may reach the proxy: pods of the server's namespace, and the Prometheus of another one."""
    other = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": replicas.monitored_from}}}
    return [{"podSelector": {}}, *([other] if replicas.monitored_from else [])]


def _pod_monitor(metadata: Manifest, asked: KubernetesOptions) -> Manifest:
    """Return a PodMonitor of Prometheus Operator, by which Prometheus scrapes the proxies with the server's own key."""
    secret, _, key = asked.secrets[API_KEY_VARIABLE].partition("/")
    endpoint = {
        "port": "http",
        "path": METRICS,
        "authorization": {"type": "Bearer", "credentials": {"name": secret, "key": key}},
    }
    selector = {"matchLabels": {SERVE_LABEL: metadata["name"]}}
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint], "podTargetLabels": ["llm-lifecycle.io/version"]}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": metadata, "spec": spec}


def _checked_options(name: str, config: ServeConfig) -> KubernetesOptions:
    """Return a serve stage's Kubernetes options. Raises `RecipeError` without an image or the API key's Secret."""
    asked = config.execution.block(KubernetesOptions)
    if not asked.image:
        title = chosen_engine(config.serving).title
        raise RecipeError(f"stages.{name}.execution.kubernetes.image: missing; name the image that holds {title}")
    if not asked.shares_home:
        raise RecipeError(
            f"stages.{name}.execution.kubernetes.store_claim: found null; servers read models from a volume: name one"
        )
    if API_KEY_VARIABLE not in asked.secrets:
        example = f"{{{API_KEY_VARIABLE}: SECRET/KEY}}"
        raise RecipeError(
            f"stages.{name}.execution.kubernetes.secrets: expected {example}; no server runs without a key"
        )
    return asked


def _pod(
    name: str,
    model: Path,
    home: Path,
    config: ServeConfig,
    adapters: Mapping[str, Path],
    *,
    speculation: Speculation | None,
) -> Manifest:
    asked = config.execution.block(KubernetesOptions)
    engine = chosen_engine(config.serving)
    # The image holds one build of the engine; it is the CPU build if no GPUs are requested.
    program = engine.program_in_image(on_cpu=not asked.gpus_per_node)
    spec = LaunchSpec(
        model=model,
        served_name=name,
        adapters={name if stage == config.model else stage: folder for stage, folder in adapters.items()},
        base_name=config.base,
        serving=config.serving,
        speculation=speculation,
        engine=engine.name,
        engine_version=program.version,
    )
    if adapters:
        engine.check_adapters(spec)
    environment = {**engine.settings, "HOME": "/tmp"}  # noqa: S108 (a volume)
    mounts = [*volume_mounts(home, read_only=True), {"name": "engine", "mountPath": str(SOCKET.parent)}]
    container = {
        "name": engine.name,
        "image": asked.image,
        "command": [*START, str(SOCKET), *program.server_command(spec, EngineAddress(SOCKET))],
        "env": [
            *({"name": variable, "value": value} for variable, value in environment.items()),
            *environment_by_reference(asked.secrets),
        ],
        # One probe every 10 s.
        "startupProbe": _ending_probe(failures=round(config.execution.ready_timeout_s / 10)),
        "readinessProbe": _probe(failures=2),
        # A minute without a good answer.
        "livenessProbe": _ending_probe(failures=6),
        "lifecycle": _before_sigterm("python", "-I", "-S", "-c", AWAIT_PROXY, str(SOCKET.with_name(LOCK_NAME))),
        "resources": resources(asked, cores=1),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }
    return {
        "serviceAccountName": asked.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Long enough for the requests in progress to be answered completely.
        "terminationGracePeriodSeconds": DEREGISTRATION_S + round(LAST_ANSWERS_TIMEOUT_S) + HUNG_ENGINE_GRACE_S,
        "securityContext": POD_SECURITY,
        "containers": [container, _proxy(asked, spec.max_images)],
        "nodeSelector": asked.node_selector,
        "volumes": [*volumes(asked), {"name": "engine", "emptyDir": {}}],
        **asked.pod,
    }


def _proxy(asked: KubernetesOptions, max_images: int) -> Manifest:
    limit = [str(max_images)] if max_images else []
    return {
        "name": "proxy",
        "image": asked.image,
        "command": ["python", "-m", "stages.serving.proxy_program", str(SOCKET), str(PORT), *limit],
        "env": [
            {"name": "PYTHONPATH", "value": PROXY_CODE},
            *environment_by_reference({API_KEY_VARIABLE: asked.secrets[API_KEY_VARIABLE]}),
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 10, "failureThreshold": 2},
        "lifecycle": _before_sigterm("sleep", str(DEREGISTRATION_S)),
        "resources": {"requests": {"cpu": "1", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "engine", "mountPath": str(SOCKET.parent)}],
    }


def _before_sigterm(*command: str) -> Manifest:
    return {"preStop": {"exec": {"command": [*command]}}}


def _ending_probe(failures: int) -> Manifest:
    """Return a liveness probe that makes Kubernetes end a hung inference engine, while the proxy in its pod goes on."""
    return {**_probe(failures), "terminationGracePeriodSeconds": HUNG_ENGINE_GRACE_S}


def _probe(failures: int) -> Manifest:
    """Return a health probe of the inference engine at its Unix socket, because the proxy would demand an API key."""
    command = ["python", "-I", "-S", "-c", IS_HEALTHY, str(SOCKET)]
    return {"exec": {"command": command}, "timeoutSeconds": 6, "periodSeconds": 10, "failureThreshold": failures}


def _autoscaler(name: str, asked: KubernetesOptions, waiting_requests: str, replicas: Replicas) -> Manifest:
    """Return a HorizontalPodAutoscaler that scales by waiting requests on GPUs, or by CPU utilization without GPUs.

    GPUs are always busy, so their utilization says nothing. The metric needs an adapter for custom metrics.
    """
    waiting = {"type": "AverageValue", "averageValue": str(WAITING_REQUESTS_PER_REPLICA)}
    busy = {"type": "Utilization", "averageUtilization": CORE_UTILIZATION_PERCENT}
    metric = (
        {"type": "Pods", "pods": {"metric": {"name": waiting_requests}, "target": waiting}}
        if asked.gpus_per_node
        else {"type": "Resource", "resource": {"name": "cpu", "target": busy}}
    )
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": replicas.least,
        "maxReplicas": replicas.most,
        "metrics": [metric],
    }
