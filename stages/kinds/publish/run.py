"""Publish stage: sends a promoted model with its model card, checksums and licence files to a publishing target.

Out: `files/` (files written for it) and `publication.json`. Only missing files are sent, and the target's checksums are
compared afterwards. The promotion is complete before: nothing here undoes it.
"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.adapters.headers import CONFIG_FILE as ADAPTER_CONFIG_FILE
from stages.core.contract import StageContext, StageResult
from stages.core.errors import ModelError, PublishError
from stages.core.fields import StrictModel
from stages.core.files import read_json_object, write_atomically
from stages.core.hashing import sha256_of_files
from stages.core.redaction import shortened
from stages.hubs.delivery import MIB, Progress
from stages.hubs.listing import Digest, digest_of
from stages.kinds.publish.card import CARD_FILE, licence_files, model_card, repository_of, stated_licence
from stages.kinds.publish.check import check_stores
from stages.kinds.publish.config import PublishConfig
from stages.kinds.publish.records import PromotedModel, read_promoted
from stages.kinds.publish.targets.registry import parse_address, target_of
from stages.kinds.publish.targets.target import LocalFile, Target, TargetContents

SUMS_FILE = "SHA256SUMS"
"""Published list of checksums (`sha256sum --check`), by which a later publication recognises these files."""
PUBLICATION_FILE = "publication.json"
NOT_PROMOTED = "not promoted"
NUM_NAMED = 3

Bundle = Mapping[str, LocalFile]
"""Files to publish, by the names that they get at the publishing target."""
State = Literal["published", "was there", "dry run", "not promoted"]


def write_bundle(promoted: PromotedModel, licence: str | None, folder: Path) -> dict[str, LocalFile]:
    """Collect the files to publish by name, new ones written into `folder`; raise ModelError for a damaged artifact."""
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
    """Return the file names in a published list of checksums."""
    return {name for _, _, name in (line.partition("  ") for line in sums.splitlines()) if name}


def _write(texts: Mapping[str, str], folder: Path) -> dict[str, Path]:
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return {name: folder / name for name in texts}


def _check_undamaged(promoted: PromotedModel, sums: Mapping[str, str]) -> None:
    """Raise ModelError unless the model's files still have the checksums that were recorded when they were built."""
    made = promoted.model
    prefix = f"{made.content.name}/"
    files = made.record.files.items()
    recorded = {name.removeprefix(prefix): entry.sha256 for name, entry in files if name.startswith(prefix)}
    # Pairs of name and checksum on one side only: files that are missing, added or changed.
    if differing := sorted({name for name, _ in recorded.items() ^ sums.items()}):
        shown = shortened(", ".join(differing[:3]), 300)
        raise ModelError(
            f"publishing {made.folder}: {shown} is not what was recorded when it was built; "
            f"run again with `--force {made.record.stage}` to build it again"
        )


def _adapter_config(promoted: PromotedModel, file: Path) -> str:
    """Return an adapter's config for publishing, which names the base model by its repository on the hub."""
    config, base = read_json_object(file), promoted.bases[0]
    if name := repository_of(base):
        config |= {"base_model_name_or_path": name, "revision": base.result.tags["revision"]}
    return json.dumps(config, indent=2) + "\n"


class PublishedFile(StrictModel):
    """Published file with its size and checksum; `sent` is False if the target had the file already."""

    size_bytes: int
    sha256: str
    sent: bool


class Publication(StrictModel):
    """Content of `publication.json`. revision: the target's name for it; for files and buckets, the list's hash."""

    name: str
    to: str
    state: State
    revision: str | None = None
    files: dict[str, PublishedFile] = Field(default_factory=dict)
    removed: tuple[str, ...] = Field(
        (), description="Files of an earlier publication that were removed, since the new one does not have them."
    )


def run(config: PublishConfig, context: StageContext) -> StageResult:
    """Publish the promoted model, and record what was sent in `publication.json`.

    Raises PublishError, ModelError for a damaged artifact, TransientError if the target does not answer.
    """
    started_s = time.monotonic()
    promoted = read_promoted(context.inputs, config.promotion)
    if promoted.outcome == NOT_PROMOTED:
        context.milestone(f"{promoted.name} was not promoted: nothing is published")
        return _result(Publication(name=promoted.name, to=config.to, state="not promoted"), context, started_s)
    bundle = write_bundle(promoted, config.license, context.work / "files")
    if config.dry_run:
        publication = _publication(promoted.name, config.to, "dry run", bundle)
        context.milestone(f"a dry run: {len(bundle)} files would go to {config.to}, nothing was sent")
        return _result(publication, context, started_s)
    target = target_of(parse_address(config.to), private=config.private)
    check_stores(config, context.inputs)
    target.check()
    licence = stated_licence(promoted, config.license)
    target.prepare(licence.name if licence else None)
    publication = _publish(target, bundle, Publication(name=promoted.name, to=config.to, state="was there"), context)
    return _result(publication, context, started_s)


def _publish(target: Target, bundle: Bundle, planned: Publication, context: StageContext) -> Publication:
    """Send the files that the publishing target lacks, remove outdated ones, and verify the checksums there."""
    held = target.held(bundle)
    missing = _differing(bundle, held)
    # Only files that an earlier publication listed are removed: others at the target are not ours.
    before = target.read_text(SUMS_FILE) if SUMS_FILE in held.files else None
    stale = sorted((names_in(before or "") - bundle.keys()) & held.files.keys())
    if not missing and not stale:
        context.milestone(f"{planned.to} holds all {len(bundle)} files already: nothing was sent")
        return _publication(planned.name, planned.to, "was there", bundle, revision=held.revision)
    size_bytes = sum(bundle[name].size_bytes for name in missing)
    context.milestone(f"sending {len(missing)} of {len(bundle)} files, {size_bytes / MIB:.1f} MiB, to {planned.to}")
    target.send(bundle, missing, stale, Progress(context, size_bytes).add)
    held = target.held(bundle)
    if wrong := _differing(bundle, held):
        raise PublishError(
            f"publishing to {planned.to}: after all was sent, {', '.join(wrong[:NUM_NAMED])} there has another "
            "checksum than here, or is missing; does another program write there? Run again to send it again"
        )
    revision = held.revision or bundle[SUMS_FILE].sha256
    context.milestone(f"published at {planned.to}, revision {revision}, read back")
    return _publication(planned.name, planned.to, "published", bundle, missing, stale, held.revision)


def _differing(bundle: Bundle, held: TargetContents) -> list[str]:
    """Return files that the target lacks or has otherwise; the checksum list last, to confirm that all arrived."""
    names = sorted(bundle, key=lambda name: (name == SUMS_FILE, name))
    return [name for name in names if not _is_held(bundle[name], held.files.get(name))]


def _is_held(file: LocalFile, digest: Digest | None) -> bool:
    if digest is None:
        return False
    if digest.algorithm == "sha256":
        return digest.hex == file.sha256
    return digest_of(file.path, digest.algorithm) == digest


def _publication(
    name: str,
    to: str,
    state: State,
    bundle: Bundle,
    sent: Iterable[str] = (),
    removed: Iterable[str] = (),
    revision: str | None = None,
) -> Publication:
    files = {
        file_name: PublishedFile(size_bytes=file.size_bytes, sha256=file.sha256, sent=file_name in set(sent))
        for file_name, file in bundle.items()
    }
    return Publication(
        name=name,
        to=to,
        state=state,
        revision=revision or bundle[SUMS_FILE].sha256,
        files=files,
        removed=tuple(removed),
    )


def _result(publication: Publication, context: StageContext, started_s: float) -> StageResult:
    write_atomically(context.work / PUBLICATION_FILE, publication.model_dump_json(indent=2))
    sent = [file for file in publication.files.values() if file.sent]
    tags = {"publication": publication.state, "published_to": publication.to}
    return StageResult(
        metrics={
            "files_sent": float(len(sent)),
            "bytes_sent": float(sum(file.size_bytes for file in sent)),
            "num_files": float(len(publication.files)),
            "bytes": float(sum(file.size_bytes for file in publication.files.values())),
            "seconds": time.monotonic() - started_s,
        },
        tags={**tags, "published_revision": publication.revision} if publication.revision else tags,
        files=[PUBLICATION_FILE, *(["files/README.md"] if publication.files else [])],
    )
