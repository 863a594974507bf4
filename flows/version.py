"""Versions: what identifies an artifact → twelve hex digits, and how two identities differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from stages.contract import StageConfig

Identity = dict[str, JsonValue]
"""{"kind", "stage_version", "config": …, "upstream": {field path: version}, "outside": {field path: …}}"""


@dataclass(frozen=True)
class Difference:
    """One field that two identities do not share; None where a side lacks it. `str()` gives `field old → new`."""

    field: str
    old: JsonValue
    new: JsonValue


def identity_of(config: StageConfig, upstream: Mapping[str, str], outside: Mapping[str, JsonValue]) -> Identity:
    """What identifies the artifact of `config`, given upstream {stage name: version} and resolved outside inputs."""
    raise NotImplementedError


def version_of(identity: Identity) -> str:
    """First 12 hex digits of the sha256 over the canonical JSON of an identity."""
    raise NotImplementedError


def resume_key_of(config: StageConfig, upstream: Mapping[str, str], outside: Mapping[str, JsonValue]) -> str:
    """Like the version, but over `config.resume_identity()`: attempts that share it may share a work folder."""
    raise NotImplementedError


def differences(old: Identity, new: Identity) -> list[Difference]:
    """Field by field, sorted by field."""
    raise NotImplementedError
