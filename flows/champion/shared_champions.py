"""Champions that homes with a shared store have in common: an object for each registered model, written by condition.

Each home has an MLflow of its own, or they share one: either follows the object. The home that crowns a
champion writes the object first, if it still is as that home saw it; of two at a time, one finds its verdict outdated
and judges again.
"""

import re
import secrets
from collections.abc import Iterable

from pydantic import ValidationError

from flows.champion.registrations import Registration
from flows.store.objects import Held
from flows.store.shared import share
from flows.store.store import Store
from stages.core.errors import OutdatedVerdictError, StoreError
from stages.core.fields import StrictModel


class Crowned(StrictModel):
    """Registered model that is or was champion. promotion: the ledger's key of the attempt that judged it."""

    registration: Registration
    promotion: str | None = None

    @property
    def digest(self) -> str:
        return self.registration.digest


class Crown(StrictModel):
    """Content of `champions/<name>.json`. number: of changes so far. nonce: differs with each writing.

    approvers: groups that must approve each change, in any home.
    """

    number: int
    nonce: str
    champion: Crowned
    previous: Crowned | None
    approvers: tuple[str, ...] = ()


class SharedChampions:
    """Champions of a shared store."""

    def __init__(self, store: Store) -> None:
        assert store.remote
        self._store, self._objects = store, store.remote.objects

    def read(self, name: str) -> tuple[Crown, Held] | None:
        """Return a model's champion and previous champion; None before the first promotion."""
        held = self._objects.read(_object_name(name))
        if held is None:
            return None
        try:
            return Crown.model_validate_json(held.content), held
        except ValidationError:
            raise StoreError(
                f"{self._objects.address}/{_object_name(name)} is no champion that this version can read: it is "
                "damaged, or of a newer version of this program, which all homes of a shared store should have"
            ) from None

    def artifacts(self) -> frozenset[str]:
        """Return the versions of all artifacts that champions and previous champions of this shared store refer to."""
        crowns = [
            self.read(one.name.removeprefix("champions/").removesuffix(".json"))
            for one in self._objects.below("champions")
        ]
        crowned = [one for found in crowns if found for one in (found[0].champion, found[0].previous) if one]
        return frozenset(key.rpartition("/")[2] for one in crowned for key in one.registration.artifacts)

    def crown(self, successor: Crowned, former: Crowned | None, approvers: tuple[str, ...] = ()) -> None:
        """Make a model champion in place of the former one, once all its artifacts are in the shared store.

        Raises OutdatedVerdictError, changing nothing, if another home has made another model champion.
        """
        registration = successor.registration
        name, weights = registration.name, {registration.model, registration.base}
        for key in sorted(registration.artifacts):
            if not share(self._store, *key.split("/")) and key in weights:
                raise StoreError(
                    f"making {key} champion of {name} for all homes: it is neither whole in {self._store.root} nor in "
                    f"{self._objects.address}, so other homes could not serve it; build it again"
                )
        found = self.read(name)
        crown, held = found if found else (None, None)
        present = crown.champion.digest if crown else None
        if present == successor.digest:
            return  # a kill came between this and the aliases in MLflow
        # A home may have had a champion before it had a shared store.
        if crown and present != (former.digest if former else None):
            raise _outdated(name, self._objects.address)
        known = [one for one in (crown.champion, crown.previous) if one] if crown else []
        changed = Crown(
            number=crown.number + 1 if crown else 1,
            nonce=secrets.token_hex(8),
            champion=_described(successor, known),
            previous=_described(former, known) if former else None,
            approvers=approvers,
        )
        if not self._objects.swap(_object_name(name), changed.model_dump_json(indent=1).encode(), held):
            raise _outdated(name, self._objects.address)


def _described(crowned: Crowned, known: Iterable[Crowned]) -> Crowned:
    """Return a model with the description and scores that the shared store has; MLflow gives none back."""
    same = (one.registration for one in known if one.digest == crowned.digest and not crowned.registration.description)
    return crowned.model_copy(update={"registration": next(same, crowned.registration)})


def _outdated(name: str, address: str) -> OutdatedVerdictError:
    return OutdatedVerdictError(
        f"another home has made another model champion of {name} in {address}; the candidate must be compared again"
    )


def _object_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise StoreError(f"{name!r} is no name of a registered model")
    return f"champions/{name}.json"
