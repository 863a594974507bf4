"""Champions in MLflow: look-up of registered versions, of their artifacts, and of what garbage collection must keep."""

import os
import re
import sys

from flows.champion.registrations import promotion_lock, registrations
from flows.champion.registry import RegisteredVersion, Registry
from flows.ledger.home import store_root
from flows.report.lineage import LineageSubject
from flows.servers import local as servers
from flows.servers.keyed import client_settings, key_file, read_key
from flows.servers.programs import MLFLOW, MLFLOW_SWITCH, uses_mlflow
from flows.store.record import Artifact, Index
from flows.store.shared import obtain
from flows.store.store import Store
from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.errors import LifecycleError, ServerError, StoreError
from stages.core.lines import print_timed
from stages.serving.config import ServingConfig
from stages.serving.engine import LAUNCH_FILE, LaunchSpec
from stages.serving.registry import engine_of, new_launch_spec

URI_PREFIX = "models:/"
URI = re.compile(r"models:/(?P<name>[^/@]+)@(?P<alias>[^/@]+)")
URI_OF_VERSION = re.compile(r"models:/(?P<name>[^/@]+)/(?P<number>[0-9]+)")


def connect() -> Registry:
    """Return the model registry of the MLflow server in the environment, or of the local; else raise ServerError."""
    find_mlflow()
    return Registry()


def find_mlflow() -> None:
    """Point MLflow's client to the local server, unless the environment names one; raise ServerError without either."""
    if not uses_mlflow():
        raise ServerError(
            f"asking for champions: MLflow, which knows them, is switched off by {MLFLOW_SWITCH}; unset that variable"
        )
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        ours = next(server for server in servers.status() if server.name == MLFLOW.name)
        password = read_key()
        if not (ours.url and ours.healthy):
            state = f"runs on {ours.host}: ask there" if ours.host else "is not running; `lifecycle up`"
            raise ServerError(f"the local MLflow server, which knows the champions, {state}")
        if password is None:
            raise ServerError(
                f"the local MLflow server, which knows the champions, runs without a key: there is no {key_file()}, "
                "since an earlier version started it, or somebody removed the file; `lifecycle up` makes a key and "
                "restarts the server with it"
            )
        os.environ |= {"MLFLOW_TRACKING_URI": ours.url, **client_settings(ours.name, password)}


def parse(uri: str) -> tuple[str, str]:
    """Return the model name and the alias that `models:/NAME@ALIAS` names. Raises StoreError for anything else."""
    match = URI.fullmatch(uri)
    if match is None:
        raise StoreError(
            f"{uri} names no registered model; expected models:/NAME@ALIAS, such as models:/adder@champion"
        )
    return match["name"], match["alias"]


def repair(registry: Registry, name: str) -> None:
    """Repair a registered model's aliases if its last promotion or rollback was killed; wait for one under way."""
    if registry.was_cut_short(name):
        with promotion_lock(name):
            registry.repair(name)


def find(registry: Registry, name: str, alias: str) -> RegisteredVersion:
    """Return the version that an alias points to, aliases repaired first. Raises StoreError when there is none."""
    repair(registry, name)
    version = registry.find(name, alias)
    if version is None:
        raise not_found_error(name, alias)
    return version


def not_found_error(name: str, alias: str) -> StoreError:
    """Return the error to raise for a registered model or an alias that does not exist."""
    return StoreError(f"MLflow's registry has no {alias} of {name}; a stage of kind promote makes one")


def find_version(registry: Registry, uri: str) -> RegisteredVersion:
    """Return the version that `models:/NAME@ALIAS` or `models:/NAME/NUMBER` names. Raises StoreError if absent."""
    by_number = URI_OF_VERSION.fullmatch(uri)
    if by_number is None:
        return find(registry, *parse(uri))
    version = registry.version(by_number["name"], by_number["number"])
    if version is None:
        raise StoreError(f"MLflow's registry has no version {by_number['number']} of {by_number['name']}")
    return version


def artifact_of(version: RegisteredVersion, key: str) -> Artifact:
    """Return a registered version's artifact by its key, `KIND/VERSION`. Raises StoreError when the store lacks it."""
    store = Store(store_root())
    artifact = obtain(store, *key.split("/"))
    if artifact is None:
        raise StoreError(f"version {version.number} of {version.name} is {key}, which is not in the store {store.root}")
    return artifact


def registered_subject(uri: str, index: Index) -> LineageSubject:
    """Return the model, artifact and evaluations that `models:/NAME@ALIAS` or `models:/NAME/VERSION` names.

    Raises what MLflow does, StoreError when the artifact is not here.
    """
    version = find_version(connect(), uri)
    registration = version.registration
    store = Store(store_root())
    # Evaluations are read for their scores; of a model that is in a shared store the record suffices.
    found = (obtain(store, *key.split("/")) for key in registration.evaluations)
    return LineageSubject(
        uri,
        index.find(*registration.model.split("/")) or artifact_of(version, registration.model),
        tuple(one for one in found if one),
        f"version {version.number} of {version.name}",
        registration.approval or None,
    )


def base_of(version: RegisteredVersion) -> Artifact | None:
    """Return the base model's artifact of a registered adapter; None for a whole model. Raises StoreError if absent."""
    base = version.registration.base
    return artifact_of(version, base) if base else None


def launch_spec(version: RegisteredVersion) -> LaunchSpec:
    """Return the launch spec (model, adapters, server options) to serve a registered version with, under its name.

    It is served as the serve stage of its promotion did, if any. The base of an adapter is `NAME-base` in requests.
    Without its draft model, which the store does not keep for it, it answers the same, only slower: it is served, with
    a warning.
    """
    name, server = version.name, version.registration.server
    artifact, base = artifact_of(version, version.registration.model).folder, base_of(version)
    serving, engine, speculation = ServingConfig(), None, None
    if server:
        as_promoted = LaunchSpec.model_validate_json((artifact_of(version, server).folder / LAUNCH_FILE).read_bytes())
        serving, engine = as_promoted.serving, engine_of(as_promoted.engine)
        speculation = as_promoted.speculation
        if lost := as_promoted.lost_draft:
            speculation = None
            print_timed(
                f"warning: version {version.number} of {name} is served without guessing tokens ahead, so slower than "
                f"as it was promoted: {lost}; run its refresh again, which builds that model, and start it again"
            )
    if base is None:
        return new_launch_spec(artifact / "model", name, serving, engine, speculation=speculation)
    adapters, model = {name: artifact / ADAPTER_FOLDER}, base.folder / "model"
    return new_launch_spec(
        model, name, serving, engine, adapters=adapters, base_name=f"{name}-base", speculation=speculation
    )


def kept_versions() -> frozenset[str]:
    """Return the artifact versions that aliases in MLflow's registry point to, which garbage collection must keep.

    If MLflow cannot be asked, or does not know a name that was registered, all that was ever registered is kept.
    """
    noted = registrations()
    if not noted:
        return frozenset()
    try:
        registry = connect()
        for name in {one.name for one in noted}:
            repair(registry, name)
        pointed_at = registry.pointed_at()
    except LifecycleError as error:
        print(f"keeping every model that was ever registered, since MLflow cannot be asked: {error}", file=sys.stderr)
        pointed_at = {}
    kept = {artifact for artifacts in pointed_at.values() for artifact in artifacts}
    kept |= {artifact for one in noted if one.name not in pointed_at for artifact in one.artifacts}
    return frozenset(artifact.rpartition("/")[2] for artifact in kept)
