"""Files of a publication: the model's or adapter's, its card, the licences of its base, and a list of checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from stages.adapters.headers import CONFIG_FILE as ADAPTER_CONFIG_FILE
from stages.core.errors import ModelError
from stages.core.files import read_json_object, write_atomically
from stages.core.hashing import sha256_of_files
from stages.core.redaction import shortened
from stages.kinds.publish.card import CARD_FILE, licence_files, model_card, repository_of
from stages.kinds.publish.records import Promoted
from stages.kinds.publish.targets.target import LocalFile

SUMS_FILE = "SHA256SUMS"
"""List of checksums, as `sha256sum --check` reads it.

A later publication recognises the files of this one by it.
"""


def write_bundle(promoted: Promoted, licence: str | None, folder: Path) -> dict[str, LocalFile]:
    """Return name → file; files that are not in the artifact are written into `folder`.

    Raises ModelError for a damaged artifact.
    """
    folder.mkdir(exist_ok=True)
    content = promoted.model.content
    paths = {path.relative_to(content).as_posix(): path for path in sorted(content.rglob("*")) if path.is_file()}
    sums = sha256_of_files(paths)
    _check_undamaged(promoted, sums)
    added = {name: path for name, path in licence_files(promoted.bases).items() if name not in paths}
    texts = {CARD_FILE: model_card(promoted, licence)}
    if ADAPTER_CONFIG_FILE in paths:
        texts[ADAPTER_CONFIG_FILE] = _adapter_config(promoted, paths[ADAPTER_CONFIG_FILE])
    added |= _write(texts, folder)
    sums |= sha256_of_files(added)
    listed = _write({SUMS_FILE: "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))}, folder)
    sums |= sha256_of_files(listed)
    paths |= added | listed
    return {name: LocalFile(path, path.stat().st_size, sums[name]) for name, path in sorted(paths.items())}


def names_in(sums: str) -> set[str]:
    """Return the names in a list of checksums."""
    return {name for _, _, name in (line.partition("  ") for line in sums.splitlines()) if name}


def _write(texts: Mapping[str, str], folder: Path) -> dict[str, Path]:
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return {name: folder / name for name in texts}


def _check_undamaged(promoted: Promoted, sums: Mapping[str, str]) -> None:
    """Raise ModelError unless the files to publish are those that were judged, to the byte."""
    made = promoted.model
    prefix = f"{made.content.name}/"
    files = made.record.files.items()
    recorded = {name.removeprefix(prefix): entry.sha256 for name, entry in files if name.startswith(prefix)}
    if differing := sorted({name for name, _ in recorded.items() ^ sums.items()}):
        shown = shortened(", ".join(differing[:3]), 300)
        raise ModelError(
            f"publishing {made.folder}: {shown} is not what was recorded when it was built; "
            f"run again with `--force {made.record.stage}` to build it again"
        )


def _adapter_config(promoted: Promoted, file: Path) -> str:
    """Return the adapter's config with its base's name on the hub, instead of an artifact's."""
    config, base = read_json_object(file), promoted.bases[0]
    if name := repository_of(base):
        config |= {"base_model_name_or_path": name, "revision": base.result.tags["revision"]}
    return json.dumps(config, indent=2) + "\n"
