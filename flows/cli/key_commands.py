"""Commands about people's keys for served models: `lifecycle keys`."""

import click

from flows.cli.answers import JSON_OPTION, print_json


@click.group()
def keys() -> None:
    """Give people keys of their own for the models that this home serves, with quotas, and revoke them."""


@keys.command()
@click.argument("name")
@click.option(
    "--tokens-a-day",
    type=click.IntRange(1),
    help="Largest number of tokens a day (UTC), of prompts and answers; default: no limit.",
)
@JSON_OPTION
def add(name: str, tokens_a_day: int | None, as_json: bool) -> None:
    """Make a key for NAME and show it, this once; running servers take it within a second."""
    from flows.ledger.home import home
    from stages.serving.person_keys import add_key, keys_folder

    key = add_key(keys_folder(home()), name, tokens_a_day)
    print_json({"name": name, "key": key, "tokens_a_day": tokens_a_day}) if as_json else click.echo(key)


@keys.command()
@click.argument("name")
@JSON_OPTION
def revoke(name: str, as_json: bool) -> None:
    """Revoke the key of NAME: within a second it is refused, and answers under way are cut off."""
    from flows.ledger.home import home
    from stages.serving.person_keys import keys_folder, revoke_key

    revoked = revoke_key(keys_folder(home()), name).revoked
    print_json({"name": name, "revoked": revoked}) if as_json else click.echo(f"the key of {name} is revoked")


@keys.command("list")
@JSON_OPTION
def list_keys(as_json: bool) -> None:
    """List who has a key, the tokens that each may use a day, and has used today."""
    from flows.ledger.home import home
    from stages.serving.people import tokens_of
    from stages.serving.person_keys import keys_folder, read_keys

    folder = keys_folder(home())
    used, known = tokens_of(folder), read_keys(folder)
    if as_json:
        rows = [
            {
                "name": key.name,
                "added": key.added,
                "revoked": key.revoked,
                "tokens_a_day": key.tokens_a_day,
                "tokens_today": used[key.name],
            }
            for key in known.values()
        ]
        print_json({"keys": rows})
        return
    for key in known.values():
        quota = f"of {key.tokens_a_day:,} tokens" if key.tokens_a_day else "tokens, no limit"
        state = f"revoked {key.revoked}" if key.revoked else f"used {used[key.name]:,} {quota} today"
        click.echo(f"{key.name:<24} {state}")
    if not known:
        click.echo("no one has a key; add one with `lifecycle keys add NAME`")
