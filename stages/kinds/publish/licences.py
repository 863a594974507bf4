"""Licences: what the card of a downloaded model or dataset says of its own (`license:` at the top of `README.md`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from stages.core.errors import RecipeError
from stages.core.yaml_bounds import check_bounds
from stages.kinds.publish.records import Made, Promoted

_METADATA = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}")
_LINK = re.compile(r"https://[\w./%+-]{1,300}|LICENSE[\w.-]{0,32}")
LICENCE_FILES = re.compile(r"(LICENSE|LICENCE|NOTICE|USE_POLICY)(\.txt|\.md)?", re.IGNORECASE)


@dataclass(frozen=True)
class Licence:
    """name: as hubs know it, such as `apache-2.0`, or `other`; then it has a name of its own, and a link."""

    name: str
    own_name: str | None = None
    link: str | None = None

    def __str__(self) -> str:
        return self.own_name or self.name


def stated_licence(promoted: Promoted, licence: str | None) -> Licence | None:
    """Of what is published. licence: what the recipe says of it, in place of the base's own."""
    return Licence(licence) if licence else licence_of([promoted.model, *promoted.bases])


def licence_of(made: Iterable[Made]) -> Licence | None:
    """Of the first of these artifacts whose card states one. What is no name of a licence is taken for none."""
    return next((found for one in made if (found := _read(one.content / "README.md"))), None)


def licence_files(made: Iterable[Made]) -> dict[str, Path]:
    """Name → path of the licences, notices and policies that came with the first of these artifacts that has some."""
    for one in made:
        found = {path.name: path for path in sorted(one.content.iterdir()) if LICENCE_FILES.fullmatch(path.name)}
        if found:
            return found
    return {}


def _read(card: Path) -> Licence | None:
    metadata = _METADATA.match(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    if metadata is None:
        return None
    try:
        check_bounds(metadata[1], yaml.SafeLoader)
        said = yaml.safe_load(metadata[1])
    except (RecipeError, yaml.YAMLError):  # of a card that somebody else wrote
        return None
    fields = said if isinstance(said, dict) else {}
    name, own_name, link = (str(fields.get(key) or "") for key in ("license", "license_name", "license_link"))
    if not _NAME.fullmatch(name):
        return None
    return Licence(name, own_name if _NAME.fullmatch(own_name) else None, link if _LINK.fullmatch(link) else None)
