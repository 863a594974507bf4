"""Commands about where models come from (`lifecycle lineage`, `diff`), with their text output."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import click

from flows.cli.answers import JSON_OPTION, print_json

if TYPE_CHECKING:
    from flows.champion.differing import ComparedSide, Differences
    from flows.report.lineage import ContentFile, LearnedMedia, Lineage, LineageSubject, Node
    from flows.store.record import Index

NAMED = "ARTIFACT|models:/NAME@ALIAS"
MAX_FILES = 8
SHOWN_DIGITS = 12


@click.command()
@click.argument("name", metavar=NAMED)
@JSON_OPTION
def lineage(name: str, as_json: bool) -> None:
    """Show what a champion or an artifact was made from, down to the files that came from outside, and its scores.

    An artifact is named by its version, its stage (the newest), or both; a registered version also by its number.
    """
    from flows.ledger.home import store_root
    from flows.report.lineage import lineage_of
    from flows.store.shared import with_shared
    from flows.store.store import Store

    store = Store(store_root())
    index = with_shared(store, store.index())
    tree = lineage_of(_subject(name, index), index)
    print_json(tree.model_dump(mode="json")) if as_json else click.echo(lineage_as_text(tree))


@click.command()
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
@JSON_OPTION
def diff(old: str, new: str, as_json: bool) -> None:
    """Show the differences between two champions, refreshes or artifacts: data, config, code, scores.

    Each is an artifact by version or stage, a refresh by its id, or models:/NAME@ALIAS or models:/NAME/NUMBER.
    """
    from flows.champion.differing import compare
    from flows.ledger.home import store_root
    from flows.planning.changes import CONTENTS_CACHE
    from flows.store.store import Store

    index = _index()
    differences = compare(_side(old, index), _side(new, index), Store(store_root()).cache_folder(CONTENTS_CACHE))
    print_json(differences.model_dump(mode="json")) if as_json else click.echo(differences_as_text(differences))


def _index() -> Index:
    from flows.ledger.home import store_root
    from flows.store.store import Store

    return Store(store_root()).index()


def _subject(name: str, index: Index) -> LineageSubject:
    from flows.champion.champions import URI_PREFIX, registered_subject
    from flows.cli.show import find_artifact
    from flows.report.lineage import artifact_subject

    if name.startswith(URI_PREFIX):
        return registered_subject(name, index)
    return artifact_subject(name, find_artifact(index, name), index)


def _side(name: str, index: Index) -> ComparedSide:
    from flows.champion.differing import side_of_refresh, side_of_subject
    from flows.cli.show import find_refresh

    ledger = find_refresh(name)
    return side_of_refresh(ledger.read(), index) if ledger else side_of_subject(_subject(name, index), index)


def lineage_as_text(lineage: Lineage) -> str:
    """Return a lineage as a text tree, with files of outside stages; an artifact that occurs twice is shown once."""
    registered = f": {lineage.registered}" if lineage.registered else ""
    approved = [f"approval: {lineage.approval}"] if lineage.approval else []
    lines = [f"{lineage.name}{registered}", *approved, *_lines(lineage.tree, "", "", set()), "evaluations"]
    for one in lineage.evaluations:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in one.scores.items())
        lines.append(f"  {one.stage}-{one.version}: {scores or 'no scores'}")
    return "\n".join([*lines, *([] if lineage.evaluations else ["  none in the store"])])


def _lines(node: Node, field: str, indent: str, shown: set[str]) -> Iterator[str]:
    """Yield the lines of one artifact in a lineage. field: config field by which the stage above names it."""
    title = f"{field}: " if field else ""
    again = f"{node.kind}/{node.version}" in shown
    shown.add(f"{node.kind}/{node.version}")
    yield f"{title}{node.stage}-{node.version} ({node.kind}){', as above' if again else ''}"
    if again:
        return
    branches = [*node.upstream.items()]
    bar = "│ " if branches else "  "
    yield from (f"{indent}{bar} {line}" for line in _facts(node))
    for number, (name, child) in enumerate(branches, 1):
        is_last = number == len(branches)
        first, *rest = _lines(child, name, indent + ("   " if is_last else "│  "), shown)
        yield f"{indent}{'└─ ' if is_last else '├─ '}{first}"
        yield from rest


def _facts(node: Node) -> Iterator[str]:
    if node.folder is None:
        yield "no longer in the store: nothing else is known of it"
        return
    if node.rebuilt:
        yield "REBUILT since with other content"
    yield from (f"DAMAGED: {damage}" for damage in node.damage)
    built = f"built {node.finished:%Y-%m-%d %H:%M} UTC" if node.finished else "built"
    of = f"recipe {node.recipe}" + (f", refresh {node.refresh}" if node.refresh else "")
    yield f"{built} by commit {node.git_commit or 'unknown'}; {of}"
    if node.source:
        yield f"from {node.source}, revision {node.revision}"
    if node.counts:
        yield ", ".join(
            f"{name.removeprefix('num_').replace('_', ' ')} {value:,}" for name, value in node.counts.items()
        )
    if node.media:
        yield from _media(node.media)
    if node.source or node.product == "dataset":
        yield from map(_file, node.files[:MAX_FILES])
        if len(node.files) > MAX_FILES:
            yield f"… and {len(node.files) - MAX_FILES} more files (`--json` lists all)"


def _media(media: LearnedMedia) -> Iterator[str]:
    yield f"learned from {media}, sha256 {media.sha256[:SHOWN_DIGITS]}"
    if media.list_file is None:
        return
    with media.list_file.open(encoding="utf-8") as lines:
        for line in islice(lines, MAX_FILES):
            digest, _, path = line.rstrip("\n").partition("  ")
            yield f"  {path}: sha256 {digest[:SHOWN_DIGITS]}"
        if next(lines, None):
            yield f"  … and more: {media.list_file} lists all"


def _file(file: ContentFile) -> str:
    amount = f"{file.size_bytes:,} bytes" if file.num_rows is None else f"{file.num_rows:,} rows"
    return f"{file.name}: {amount}, sha256 {file.sha256[:SHOWN_DIGITS]}"


def differences_as_text(differences: Differences) -> str:
    """Return the differences between two models or refreshes as text, under headings such as data, config and code."""
    lines = [f"from {differences.old}", f"to   {differences.new}"]
    for heading in ("data", "config", "code", "stages", "scores"):
        sentences = getattr(differences, heading)
        lines += [heading, *(f"  {line}" for line in sentences)] if sentences else []
    if differences.rebuilt:
        lines.append(f"built again, since what it stands on differs: {', '.join(differences.rebuilt)}")
    if differences.none:
        lines.append("nothing differs")
    if differences.same:
        lines.append(f"the same in both: {', '.join(differences.same)}")
    return "\n".join(lines)
