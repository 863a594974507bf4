"""Champions in MLflow's model registry: find, register, promote and roll back versions by moving aliases.

A registered version points into our store by its tags and holds no weights. Three aliases matter: `champion`;
`previous`, which a rollback restores; and `challenger`, which is served to some requests. Each alias is moved by one
request, `previous` first: a crash at any point leaves one valid champion, and repeating the move completes it. The
predecessor is written with the new version before any alias moves, so that a move that was cut short can be repaired.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from flows.champion.registrations import TAG, Registration, note, registration_of, tags_of
from flows.champion.shared_champions import Crowned, SharedChampions
from flows.ledger.home import home, store_root
from flows.store.store import Store
from flows.tracking.shipper import CLIENT_ENVIRONMENT, experiment_id
from stages.core.errors import OutdatedVerdictError, ServerError, StoreError, TransientError

CHAMPION = "champion"
PREVIOUS = "previous"
CHALLENGER = "challenger"
OF_PROMOTIONS = (f"{TAG}predecessor", f"{TAG}promotion")
"""MLflow tags of a version's last promotion, kept when it is registered again without a promotion."""
APPROVERS = f"{TAG}approvers"
"""MLflow tag of a registered model: groups, with commas between, that must approve each change of its champion."""
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's error codes for a missing model, and for a missing alias of a model."""
PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")
REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED")


@dataclass(frozen=True)
class RegisteredVersion:
    """Version of a registered model in MLflow, with its artifacts and its predecessor's number.

    promotion: the ledger's key of the attempt whose verdict made it champion last.
    """

    registration: Registration
    number: str
    predecessor: str | None
    promotion: str | None = None

    @property
    def name(self) -> str:
        return self.registration.name


class Registry:
    """Client of MLflow's registry. Raises TransientError when MLflow does not answer, ServerError when it refuses."""

    def __init__(self) -> None:
        os.environ.update(CLIENT_ENVIRONMENT)
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ServerError("there is no MLflow to ask for the champion: MLFLOW_TRACKING_URI is not set")
        from mlflow import MlflowClient

        self._client: MlflowClient = MlflowClient()
        store = Store(store_root())
        self._shared = SharedChampions(store) if store.remote else None
        self._asked: dict[str, tuple[str, ...]] = {}

    def find(self, name: str, alias: str = CHAMPION) -> RegisteredVersion | None:
        """Return the version that an alias points to; None when the registered model or the alias does not exist."""
        if alias in (CHAMPION, PREVIOUS):
            self.follow(name)
        return self._find(name, alias)

    def follow(self, name: str) -> None:
        """Bring a model's champion and previous champion to those of the shared store, if this home has one."""
        while self._shared and (found := self._shared.read(name)):
            crown, held = found
            champion, previous = self._find(name, CHAMPION), self._find(name, PREVIOUS)
            if _digest(champion) == crown.champion.digest and _digest(previous) == _digest(crown.previous):
                return
            former = self._known(crown.previous) if crown.previous else None
            if former is None and previous:
                with _explained(f"following the champion of {name}"):
                    self._client.delete_registered_model_alias(name, PREVIOUS)
            successor = self._known(crown.champion, former.number if former else None)
            self._set_aliases(name, successor.number, former.number if former else None)
            # Another process of this home may have followed an older state, or a newer one, meanwhile.
            if (now := self._shared.read(name)) and now[1].content == held.content:
                return

    def _known(self, crowned: Crowned, predecessor: str | None = None) -> RegisteredVersion:
        """Return the version of a model that another home may have crowned; register it if MLflow lacks it."""
        registration = crowned.registration.model_copy(update={"mlflow_run_id": None})  # of the other home's MLflow
        return self.register(registration, predecessor, crowned.promotion)

    def _find(self, name: str, alias: str) -> RegisteredVersion | None:
        with _explained(f"asking for the {alias} of {name}"):
            return _unless_absent(lambda: _registered(self._client.get_model_version_by_alias(name, alias)))

    def version(self, name: str, number: str) -> RegisteredVersion | None:
        """Return a version of a registered model by its number; None when the model or the version does not exist."""
        with _explained(f"asking for version {number} of {name}"):
            return _unless_absent(lambda: _registered(self._client.get_model_version(name, number)))

    def register(
        self, registration: Registration, predecessor: str | None = None, promotion: str | None = None
    ) -> RegisteredVersion:
        """Register a candidate as a new version, or update the version that already has exactly the same content."""
        note(registration)
        with _explained(f"registering a version of {registration.name}"):
            self._ensure_model(registration.name)
            # A registration that a crash cut short is found by its digest, and completed.
            same = self._client.search_model_versions(
                f"name = '{registration.name}' and tags.`{TAG}digest` = '{registration.digest}'"
            )
            number = str(same[0].version) if same else self._create(registration)
            tags = tags_of(registration, predecessor=predecessor, promotion=promotion)
            for tag, value in tags.items():
                self._client.set_model_version_tag(registration.name, number, tag, value)
            for tag in same[0].tags if same else ():
                # Such as a score that the evaluations no longer give.
                if tag.startswith(TAG) and tag not in {*tags, *OF_PROMOTIONS}:
                    self._client.delete_model_version_tag(registration.name, number, tag)
            if registration.description:
                self._client.update_model_version(registration.name, number, registration.description)
        return RegisteredVersion(registration, number, predecessor, promotion)

    def was_rolled_back(self, candidate: Registration, promotion: str | None) -> bool:
        """Return whether a candidate became champion by the given promotion and has been rolled back since."""
        with suppress(StoreError):  # a version that no promotion registered
            previous = self.find(candidate.name, PREVIOUS)
            promoted = (previous.registration.digest, previous.promotion) if previous else None
            return promotion is not None and promoted == (candidate.digest, promotion)
        return False

    def promote(self, candidate: RegisteredVersion, champion: str | None) -> None:
        """Make a candidate champion, unless it is; raise OutdatedVerdictError if `champion` no longer is champion."""
        if not self.is_champion(candidate.registration, champion):
            self._move(candidate, champion)

    def is_champion(self, candidate: Registration, judged_against: str | None) -> bool:
        """Return whether a candidate's model has exactly the same content as the present champion.

        Raises OutdatedVerdictError when the champion is neither the candidate nor `judged_against`.
        """
        champion = self.find(candidate.name)
        if champion and champion.registration.digest == candidate.digest:
            return True
        number = champion.number if champion else None
        if number != judged_against:
            raise OutdatedVerdictError(
                f"while the candidate for {candidate.name} was compared with {_version(judged_against)}, another "
                f"became champion ({_version(number)}); it must be compared again"
            )
        return False

    def approvers(self, name: str) -> tuple[str, ...]:
        """Return the groups that must approve each change of a champion; may be empty.

        Those that this home has noted, else those of the home that made the present champion of a shared store.
        """
        noted = self._noted_approvers(name)
        if noted or not self._shared:
            return noted
        found = self._shared.read(name)
        return found[0].approvers if found else ()

    def _noted_approvers(self, name: str) -> tuple[str, ...]:
        with _explained(f"asking who approves champions of {name}"):
            model = _unless_absent(lambda: self._client.get_registered_model(name))
        return tuple(filter(None, model.tags.get(APPROVERS, "").split(","))) if model else ()

    def ask_for_approval(self, name: str, groups: Sequence[str]) -> None:
        """Record which groups must approve each later promotion, rollback and challenger; none may be needed."""
        self._asked[name] = tuple(groups)
        if tuple(groups) == self._noted_approvers(name):
            return
        with _explained(f"recording who approves champions of {name}"):
            if groups:
                self._client.set_registered_model_tag(name, APPROVERS, ",".join(groups))
            else:
                self._client.delete_registered_model_tag(name, APPROVERS)

    def note_approval(self, version: RegisteredVersion, text: str) -> None:
        """Record who approved the latest change of a version's role, when and why; nothing for an empty text."""
        if not text:
            return
        with _explained(f"recording the approval of version {version.number} of {version.name}"):
            self._client.set_model_version_tag(version.name, version.number, f"{TAG}approval", text)

    def rollback(self, name: str) -> RegisteredVersion:
        """Swap a model's aliases `champion` and `previous`. Raises StoreError without a previous champion."""
        self.repair(name)
        champion, previous = self.find(name), self.find(name, PREVIOUS)
        if champion is None:
            raise StoreError(f"rolling back {name}: MLflow knows no champion of that name; a promotion makes one")
        if previous is None:
            raise StoreError(
                f"rolling back {name}: version {champion.number} is its first champion; there was none before it"
            )
        return self._crown(previous, champion)

    def challenge(self, version: RegisteredVersion) -> None:
        """Point the alias `challenger` to a version that is not the champion; else raise StoreError."""
        champion = self.find(version.name)
        if champion is None or champion.number == version.number:
            found = "there is no champion" if champion is None else "it is the champion"
            raise StoreError(f"having version {version.number} of {version.name} challenge the champion: {found}")
        with _explained(f"making version {version.number} {CHALLENGER} of {version.name}"):
            self._client.set_registered_model_alias(version.name, CHALLENGER, version.number)

    def withdraw_challenger(self, name: str) -> None:
        """Remove the alias `challenger` from a registered model."""
        with _explained(f"withdrawing the {CHALLENGER} of {name}"):
            _unless_absent(lambda: self._client.delete_registered_model_alias(name, CHALLENGER))

    def promote_challenger(self, name: str) -> RegisteredVersion:
        """Make the challenger champion, and the champion `previous`. Raises StoreError when either is missing."""
        self.repair(name)
        champion, challenger = self.find(name), self.find(name, CHALLENGER)
        if champion is None or challenger is None:
            missing = CHAMPION if champion is None else CHALLENGER
            raise StoreError(f"promoting the {CHALLENGER} of {name}: MLflow's registry has no {missing} of that name")
        # A crash after the move, and before the alias was removed, leaves one version with both.
        crowned = challenger if challenger.number == champion.number else self._crown(challenger, champion)
        self.withdraw_challenger(name)
        return crowned

    def was_cut_short(self, name: str) -> bool:
        """Return whether a promotion or rollback stopped halfway: `previous` and `champion` are the same version."""
        with _explained(f"asking for the aliases of {name}"):
            aliases = _unless_absent(lambda: dict(self._client.get_registered_model(name).aliases)) or {}
        return CHAMPION in aliases and aliases[CHAMPION] == aliases.get(PREVIOUS)

    def repair(self, name: str) -> None:
        """Restore the alias `previous` after an interrupted promotion or rollback. Call it only while none runs."""
        if not self.was_cut_short(name):
            return
        champion = self.find(name)
        assert champion
        with _explained(f"repairing the aliases of {name}"):
            numbers = {str(version.version) for version in self._client.search_model_versions(f"name = '{name}'")}
            # Somebody may have deleted that version in MLflow.
            if champion.predecessor in numbers:
                self._client.set_registered_model_alias(name, PREVIOUS, champion.predecessor)
            else:
                self._client.delete_registered_model_alias(name, PREVIOUS)

    def pointed_at(self) -> dict[str, frozenset[str]]:
        """Return the artifacts (`KIND/VERSION`) of all versions that some alias points to, by registered model."""
        with _explained("asking for the aliases of registered models"):
            return {model.name: frozenset(self._aliased(model)) for model in self._models()}

    def referred_to(self, newest: int | None) -> frozenset[str]:
        """Return the keys of all artifacts, MLflow runs and promote attempts that registered versions refer to.

        newest: number of the latest versions of each model that count, beside those with an alias; None: all.
        """
        references: set[str | None] = set()
        with _explained("asking for registered versions"):
            for model in self._models():
                versions = self._client.search_model_versions(f"name = '{model.name}'")
                latest = {one.version for one in sorted(versions, key=lambda one: -int(one.version))[:newest]}
                for version in versions:
                    if version.version in latest | {str(number) for number in model.aliases.values()}:
                        references |= {version.run_id, version.tags.get(f"{TAG}promotion")}
                        if f"{TAG}model" in version.tags:
                            references |= _registered(version).registration.artifacts
        return frozenset(filter(None, references))

    def _aliased(self, model: Any) -> Iterator[str]:
        for number in {str(number) for number in model.aliases.values()}:
            version = self._client.get_model_version(model.name, number)
            if f"{TAG}model" in version.tags:
                yield from _registered(version).registration.artifacts

    def _models(self) -> Iterator[Any]:
        page = self._client.search_registered_models()
        yield from page
        while page.token:
            page = self._client.search_registered_models(page_token=page.token)
            yield from page

    def _crown(self, successor: RegisteredVersion, champion: RegisteredVersion) -> RegisteredVersion:
        name = champion.name
        with _explained(f"noting who was champion of {name}"):
            # Before any alias moves, since `repair` reads it.
            self._client.set_model_version_tag(name, successor.number, f"{TAG}predecessor", champion.number)
        self._move(successor, champion.number)
        crowned = self.find(name)
        assert crowned
        return crowned

    def _move(self, successor: RegisteredVersion, previous: str | None) -> None:
        if self._shared:
            former = self.version(successor.name, previous) if previous else None
            # Before the aliases: a kill between leaves them to `follow`.
            approvers = self._asked.get(successor.name, self.approvers(successor.name))
            self._shared.crown(_crowned(successor), _crowned(former) if former else None, approvers)
        self._set_aliases(successor.name, successor.number, previous)

    def _set_aliases(self, name: str, champion: str, previous: str | None) -> None:
        with _explained(f"making version {champion} champion of {name}"):
            # `previous` first: a crash between the two leaves the old champion, and both aliases on it, for `repair`.
            if previous:
                self._client.set_registered_model_alias(name, PREVIOUS, previous)
            self._client.set_registered_model_alias(name, CHAMPION, champion)

    def _ensure_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _create(self, registration: Registration) -> str:
        model = self._external_model(registration)
        version = self._client.create_model_version(
            registration.name,
            source=f"models:/{model}",
            run_id=registration.mlflow_run_id,
            tags=tags_of(registration),
            model_id=model,
        )
        return str(version.version)

    def _external_model(self, registration: Registration) -> str:
        """Return the id of the MLflow logged model, reused or new, that stands for a model whose weights MLflow lacks.

        Like `mlflow.create_external_model`, except for the folder of the file that a version needs: there it is a
        temporary one, which a kill would leave behind forever. Here the next registration of the name clears it.
        """
        from mlflow.models.model import MLMODEL_FILE_NAME
        from mlflow.models.utils import get_external_mlflow_model_spec
        from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

        experiment = experiment_id(self._client)
        wanted = f"name = '{registration.name}' and tags.`{TAG}digest` = '{registration.digest}'"
        if found := self._client.search_logged_models([experiment], wanted):
            return str(found[0].model_id)
        tags = {**tags_of(registration), MLFLOW_MODEL_IS_EXTERNAL: "true"}
        model = self._client.create_logged_model(experiment, registration.name, tags=tags)
        folder = home() / "registering" / registration.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        get_external_mlflow_model_spec(model).save(str(folder / MLMODEL_FILE_NAME))
        self._client.log_model_artifacts(model.model_id, str(folder))
        shutil.rmtree(folder)
        return str(self._client.finalize_logged_model(model.model_id, "READY").model_id)


def _unless_absent(ask: Callable[[], Any]) -> Any:
    """Return the result of a call to MLflow's registry; None when the model, version or alias does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        return ask()
    except MlflowException as error:
        if error.error_code in ABSENT:
            return None
        raise


def _registered(version: Any) -> RegisteredVersion:
    """Return an MLflow model version as a `RegisteredVersion`. Raises StoreError when no promotion registered it."""
    predecessor, promotion = (version.tags.get(f"{TAG}{name}") for name in ("predecessor", "promotion"))
    return RegisteredVersion(registration_of(version), str(version.version), predecessor, promotion)


def _crowned(version: RegisteredVersion) -> Crowned:
    return Crowned(registration=version.registration, promotion=version.promotion)


def _digest(model: RegisteredVersion | Crowned | None) -> str | None:
    if isinstance(model, RegisteredVersion):
        return model.registration.digest
    return model.digest if model else None


def _version(number: str | None) -> str:
    return f"version {number}" if number else "none"


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn exceptions of MLflow's client into this project's errors; `doing` names the action in the message."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        where = f"{doing}: MLflow at {os.environ['MLFLOW_TRACKING_URI']}"
        if error.error_code in REFUSED:
            raise ServerError(f"{where} refuses: {error}; check MLFLOW_TRACKING_USERNAME and _PASSWORD") from error
        remedy = "see `lifecycle status`, and run again: it goes on here"
        kind = TransientError if error.error_code in PASSING else ServerError
        raise kind(f"{where} failed: {error}; {remedy}") from error
