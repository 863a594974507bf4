"""Commands about the origin of models: `lifecycle lineage`, `diff`.

Each command imports what it needs, so that `lifecycle --help` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flows.cli.answers import JSON_OPTION, print_json

if TYPE_CHECKING:
    from flows.champion.differing import Side
    from flows.report.lineage import Subject
    from flows.store.record import Index

NAMED = "ARTIFACT|models:/NAME@ALIAS"


@click.command()
@click.argument("name", metavar=NAMED)
@JSON_OPTION
def lineage(name: str, as_json: bool) -> None:
    """Show what a champion or an artifact was made from, down to the files that came from outside, and its scores.

    An artifact is named by its version, its stage (the newest), or both; a registered version also by its number.
    """
    from flows.cli.lineage_text import lineage_as_text
    from flows.report.lineage import lineage_of

    index = _index()
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
    from flows.cli.lineage_text import differences_as_text
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


def _subject(name: str, index: Index) -> Subject:
    from flows.champion.champions import URI_PREFIX, registered_subject
    from flows.cli.show import find_artifact
    from flows.report.lineage import artifact_subject

    if name.startswith(URI_PREFIX):
        return registered_subject(name, index)
    return artifact_subject(name, find_artifact(index, name), index)


def _side(name: str, index: Index) -> Side:
    from flows.champion.differing import side_of_refresh, side_of_subject
    from flows.cli.show import find_refresh

    ledger = find_refresh(name)
    return side_of_refresh(ledger.read(), index) if ledger else side_of_subject(_subject(name, index), index)
