"""Versions of artifacts: twelve hex digits hashed from all that decides an artifact's content (its identity)."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from stages.core.contract import StageConfig
from stages.core.redaction import shortened

Identity = dict[str, JsonValue]
"""Identity of an artifact, the JSON object from which its version is hashed. Keys: kind, stage_version, config,
upstream (version by field path), outside (content hash, revision, … by field path)."""
DIGEST = re.compile("[0-9a-f]{64}")
"""Pattern of a SHA-256; a changed one is shown as `has changed`, other values, such as commits, themselves."""


@dataclass(frozen=True)
class Difference:
    """Field with different values in two identities; None if absent. `str()`: `field old → new`, or `has changed`."""

    field: str
    old: JsonValue
    new: JsonValue

    def __str__(self) -> str:
        if all(isinstance(one, str) and DIGEST.fullmatch(one) for one in (self.old, self.new)):
            return f"{self.field} has changed"
        return f"{self.field} {_show(self.old)} → {_show(self.new)}"


def identity_of(config: StageConfig, upstream: Mapping[str, str], outside: Mapping[str, JsonValue]) -> Identity:
    """Return all that decides the content of a stage's artifact: kind, config, upstream versions, outside inputs.

    upstream: stage name → version. outside: resolved inputs from outside the store. Stage names are no part of it:
    renaming a stage builds nothing again.
    """
    return _document(config, config.identity(), upstream, outside)


def version_of(identity: Identity) -> str:
    """Return an artifact's version: the first 12 hex digits of the SHA-256 of its identity as canonical JSON."""
    # 48 bits: among a million artifacts two have the same version with a chance of 0.2%.
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]


def resume_key_of(config: StageConfig, upstream: Mapping[str, str], outside: Mapping[str, JsonValue]) -> str:
    """Return the key of a stage's work folder; attempts with the same key may resume from each other's checkpoints.

    It is a version of `config.resume_identity()`, which leaves out fields that do not hinder resuming.
    """
    return version_of(_document(config, config.resume_identity(), upstream, outside))


def canonical_json(value: JsonValue) -> str:
    """Return equal values' same JSON text: sorted keys, no spaces, ASCII. Raises ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def differences(old: Identity, new: Identity) -> list[Difference]:
    """Return the fields in which the identities of two artifacts differ, sorted by their path in the recipe.

    Unset and empty on one side equals absent on the other. A mapping's entries are listed if the other's is empty.
    """
    before, after = fields_of(old), fields_of(new)
    return [Difference(field, before.get(field), after.get(field)) for field in sorted(differing(before, after))]


def differing(before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]) -> list[str]:
    """Return the paths of the fields, as `fields_of` has them, in which two identities differ, in no order."""
    empty: tuple[JsonValue, ...] = (None, [], {})
    return [
        field
        for field in before.keys() | after.keys()
        if before.get(field) != after.get(field) and not (before.get(field) in empty and after.get(field) in empty)
    ]


def fields_of(identity: Identity) -> dict[str, JsonValue]:
    """Return the fields of an identity by their path in the recipe."""
    return dict(_flatten(identity))


def _document(
    config: StageConfig, fields: dict[str, JsonValue], upstream: Mapping[str, str], outside: Mapping[str, JsonValue]
) -> Identity:
    # Upstream stages count by field path and version, so that renaming a stage changes no version.
    return {
        "kind": config.kind,
        "stage_version": config.STAGE_VERSION,
        # `kind` is beside it already.
        "config": {key: value for key, value in fields.items() if key != "kind"},
        "upstream": {path: upstream[stage] for path, stage in config.references().items()},
        "outside": dict(outside),
    }


def _flatten(identity: Identity) -> Iterator[tuple[str, JsonValue]]:
    for section, value in identity.items():
        if section == "config":
            yield from _leaves(value)
        elif isinstance(value, dict):
            label = {"upstream": "version of ", "outside": "content of "}[section]
            yield from ((f"{label}{field}", leaf) for field, leaf in _leaves(value))
        else:
            yield section, value


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for key, value in tree.items():
        # An empty mapping is a leaf: it has no entries that could differ.
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _show(value: JsonValue) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        # 1e-05 -> 1e-5, as people write it.
        return f"{value:g}".replace("e-0", "e-").replace("e+0", "e+")
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 40)
