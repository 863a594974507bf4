"""Endpoint for stages that query a model: the server of a serve stage, or one that the querying stage starts."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.core.contract import StageContext
from stages.core.errors import LifecycleError, RecipeError, TransientError
from stages.serving.agreement import agreement_metrics, compare_with_records
from stages.serving.client import Client, check_server
from stages.serving.config import ServingConfig
from stages.serving.engine import LAUNCH_FILE, LaunchSpec
from stages.serving.registry import engine_of, new_launch_spec
from stages.serving.served_models import AskedModelConfig, ServedModel, adapter_folders
from stages.serving.server import ReachedEngine, Server, api_key, reached_engine, started_server


@dataclass(frozen=True)
class Endpoint:
    """Running or starting server of the model that a stage queries.

    server: None if a serve stage started it. reached: its engine itself; None where only the proxy is reached.
    """

    client: Client
    spec: LaunchSpec
    server: Server | None
    ready_timeout_s: float
    context: StageContext
    reached: ReachedEngine | None = None

    @property
    def asked_folder(self) -> Path:
        """Folder of the model or adapter that the stage queries; it also holds the chat template used in training."""
        return self.spec.folders[self.spec.served_name]

    def await_model(self) -> ServedModel:
        """Wait until the server is ready, then log how far its predictions are from those that training recorded.

        Raises ServerError when our own server does not come up, or an adapter has no effect.
        """
        if self.server:
            self.server.wait_until_ready(self.ready_timeout_s)
            self.server.check()
        engine = engine_of(self.spec.engine)
        context_tokens = engine.context_tokens(self.client, self.spec)
        self._compare(context_tokens)
        return ServedModel(
            self.client,
            self.spec.model,
            context_tokens,
            self.spec.serving.trust_remote_code,
            engine.capabilities.token_prompts,
            self.spec.max_images,
            self.reached,
            self.asked_folder,
        )

    def _compare(self, context_tokens: int) -> None:
        name = self.spec.served_name
        # A serve stage has compared documents with pictures already.
        address = self.server.address if self.server else None
        agreements = compare_with_records(
            self.client, self.spec, [name], context_tokens, self.context.warn, address=address
        )
        if agreements:
            self.context.log_metrics(0, agreement_metrics(agreements, name))

    def raise_if_gone(self) -> None:
        """Raise TransientError if the server was ready before and no longer answers."""
        if self.server and not self.server.was_ready:  # our server is still starting: the failure has another cause
            return
        if self.client.is_healthy():
            return
        if self.server:
            failure = self.server.failure("went away while it was asked")
            raise TransientError(str(failure), died=failure.died)
        raise TransientError(f"the server of {self.spec.served_name} at {self.client.url} does not answer any more")


@contextlib.contextmanager
def endpoint_for(config: AskedModelConfig, context: StageContext) -> Iterator[Endpoint]:
    """Provide the endpoint of a stage's model: a serve stage's running server if it answers, else a new server.

    A new server may still be starting. Raises ModelError or ResourceError before anything slow.
    """
    spec = _launch_spec(config, context)
    leased = _leased_client(config, context, spec)
    if leased:
        with reached_engine(engine_of(spec.engine), context.leases[config.model].engine_folder) as reached:
            yield Endpoint(leased, spec, None, config.execution.ready_timeout_s, context, reached)
        return
    log_file, runtime = context.work / "server.log", context.scratch / "server"
    with started_server(spec, config.execution, log_file, runtime) as server:
        reached = ReachedEngine(server.engine, server.address)
        yield Endpoint(server.client, spec, server, config.execution.ready_timeout_s, context, reached)


def _launch_spec(config: AskedModelConfig, context: StageContext) -> LaunchSpec:
    """Return the launch spec in the serve stage's artifact, or a new one if the stage queries a model or adapter."""
    artifact = context.inputs[config.model]
    if (artifact / LAUNCH_FILE).is_file():
        if config.serving:
            raise RecipeError(f"`serving` is set, but {config.model} is a serve stage and brings its own; remove it")
        spec = LaunchSpec.model_validate_json((artifact / LAUNCH_FILE).read_text())
        return spec.asking(config.adapter) if config.adapter else spec
    base = config.base or config.model
    return new_launch_spec(
        (context.inputs[base] / "model").resolve(),
        config.model,
        config.serving or ServingConfig(),
        adapters=adapter_folders([config.model] if config.base else [], base, context.inputs),
        base_name=config.base,
    )


def _leased_client(config: AskedModelConfig, context: StageContext, spec: LaunchSpec) -> Client | None:
    """Return a client of the server that a serve stage keeps for this refresh, or None if none passes its check."""
    lease = context.leases.get(config.model)
    if lease is None:
        return None
    client = Client(lease.url, api_key(), spec.served_name)
    try:
        check_server(client, engine_of(spec.engine).smoke_log_probabilities)
    except LifecycleError as error:
        context.warn(f"the server of {config.model} fails its check ({error}); starting another")
        return None
    return client
