"""Commands to show, add, check, delete or serve artifacts: `lifecycle show`, `adopt`, `verify`, `gc`, `serve`, …"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from flows.cli.answers import JSON_OPTION, print_json
from stages.core.errors import ModelError, RecipeError, StoreError

if TYPE_CHECKING:
    from flows.champion.follow import FollowSettings
    from flows.store.collect import Collected
    from flows.store.store import Store
    from stages.serving.samples import Samples


@click.command()
@click.argument("name", required=False, metavar="[REFRESH|ARTIFACT]")
@click.option(
    "--samples",
    is_flag=True,
    help="Show samples of an evaluation, or episodes: each question, the model's answer and the expected answer.",
)
@JSON_OPTION
def show(name: str | None, samples: bool, as_json: bool) -> None:
    """Show a refresh by its id, or an artifact by stage or version; without a name, list all."""
    from flows.cli import show as shown
    from flows.ledger.home import store_root
    from flows.store.ledgers import shared_ledger
    from flows.store.store import Store

    store = Store(store_root())
    index = store.index()
    if samples:
        if name is None:
            raise click.UsageError(
                "--samples needs the name of an evaluation, or a stage with episodes, by stage or version"
            )
        found = shown.samples_of(shown.find_artifact(index, name))
        print_json({"samples": list(found)}) if as_json else click.echo(shown.samples_as_text(found))
    elif name is None:
        print_json(shown.recent_as_json(index)) if as_json else click.echo(shown.recent_as_text(index))
    elif ledger := shown.find_refresh(name) or shared_ledger(store, name):
        record = shown.read_now(ledger)
        print_json(shown.refresh_as_json(record)) if as_json else click.echo(shown.refresh_as_text(record))
    else:
        artifact = shown.find_artifact(index, name)
        if as_json:
            print_json(shown.artifact_as_json(artifact, index))
        else:
            click.echo(shown.artifact_as_text(artifact, index))


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--kind",
    type=click.Choice(["model", "adapter", "dataset"]),
    required=True,
    help="Type of the files at PATH.",
)
@click.option("--name", required=True, help="Stage name to give the artifact.")
@click.option("--base", help="Base model's artifact, by stage or version; for an adapter.")
@JSON_OPTION
def adopt(path: Path, kind: Literal["model", "adapter", "dataset"], name: str, base: str | None, as_json: bool) -> None:
    """Copy a model, an adapter or a dataset from PATH into the store, with the same checks as a download."""
    from flows.cli import show as shown
    from flows.ledger.home import store_root
    from flows.running import adopt as adoption
    from flows.store.store import Store

    if (base is None) == (kind == "adapter"):
        raise RecipeError("--base names the model of an adapter: expected with `--kind adapter`, and with that alone")
    store = Store(store_root())
    its_base = shown.find_artifact(store.index(), base) if base else None
    built = adoption.adopt(store, path, kind, name, NullObserver(), its_base)
    if as_json:
        print_json({"name": name, "version": built.version, "state": built.state, "artifact": str(built.artifact)})
    else:
        click.echo(f"{name} {built.version}: {built.state}, in {built.artifact}")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@JSON_OPTION
def backup(folder: Path, as_json: bool) -> None:
    """Save this home in a folder of backups, while it runs; contents that an earlier backup has are not copied."""
    from flows.service.backup import back_up

    saved = back_up(folder)
    if as_json:
        print_json(saved.model_dump())
        return
    mib, new_mib = (number / 2**20 for number in (saved.num_bytes, saved.new_bytes))
    click.echo(f"backup {saved.name}: {saved.num_files:,} files, {mib:,.1f} MiB, of which {new_mib:,.1f} are new")
    for variable in saved.left_out:
        click.echo(f"not in it: the database that {variable} names, which is no PostgreSQL; save it yourself", err=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--backup", "name", metavar="NAME", help="Restore this backup; default: the latest.")
@JSON_OPTION
def restore(folder: Path, name: str | None, as_json: bool) -> None:
    """Restore a backup as the home that LIFECYCLE_HOME names, which must not exist. It is a copy: schedules pause."""
    from flows.ledger.home import home
    from flows.service.backup import restore as restored_from

    restored = restored_from(folder, name)
    if as_json:
        print_json(restored.model_dump())
    else:
        click.echo(f"restored {restored.name} to {home()}: {restored.num_files:,} files; `lifecycle up` starts it")


@click.command()
@JSON_OPTION
def verify(as_json: bool) -> None:
    """Check every artifact against its recorded hashes, and list the damaged ones.

    Of a shared store only names and sizes are compared: contents are hashed when a home receives them.
    """
    from flows.ledger.home import store_root
    from flows.store import collect
    from flows.store.store import Store

    verified, store = [], Store(store_root())
    for verification in collect.verify(store):
        verified.append(verification)
        if not as_json:
            click.echo(f"{'whole' if verification.whole else 'DAMAGED':<8} {verification.artifact.folder}")
            for trouble in ("damaged", "missing", "extra"):
                for file in getattr(verification, trouble):
                    click.echo(f"         {trouble}: {file}")
    lacks, unread = _shared_lacks(store)
    bad = [verification for verification in verified if not verification.whole]
    if as_json:
        damaged = [
            {"artifact": str(one.artifact.folder), "damaged": one.damaged, "missing": one.missing, "extra": one.extra}
            for one in bad
        ]
        of_shared = {"lacking": lacks, "unreadable": unread} if store.remote else {}
        print_json({"verified": len(verified), "damaged": damaged, **of_shared})
    for reason in () if as_json else unread:
        click.echo(f"DAMAGED  {reason}")
    if bad and not as_json:
        names = ", ".join(verification.artifact.record.stage for verification in bad)
        raise StoreError(f"{len(bad)} of {len(verified)} artifacts are damaged: {names}; --force builds a stage again")
    if lacks and not as_json:
        listed = "\n".join(f"  {name}: {', '.join(files)}" for name, files in lacks.items())
        raise StoreError(
            f"the shared store lacks contents of {len(lacks)} artifacts:\n{listed}\nBuild them again with --force, "
            "which sends them"
        )
    if bad or lacks or unread:
        sys.exit(StoreError.exit_code)


def _shared_lacks(store: Store) -> tuple[dict[str, list[str]], list[str]]:
    """Return which files of which artifacts (`KIND/VERSION`) the shared store lacks, and why records are unreadable."""
    from flows.store.upkeep import lacking

    lacks, unread = {}, []
    for record, names in lacking(store.remote) if store.remote else ():
        if isinstance(record, StoreError):
            unread.append(str(record))
        elif names:
            lacks[f"{record.kind}/{record.version}"] = list(names)
    return lacks, unread


@click.command()
@click.option(
    "--policy",
    "by_policy",
    is_flag=True,
    help="Also remove old refreshes, beyond those that retention.yaml in the lifecycle home keeps.",
)
@click.option(
    "--shared",
    is_flag=True,
    help="Also delete from the shared store what no home needs: all of them receive it from there.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--older-than-days", type=click.FloatRange(min=0), default=7.0, show_default=True)
@JSON_OPTION
def gc(by_policy: bool, shared: bool, dry_run: bool, older_than_days: float, as_json: bool) -> None:
    """Remove what nothing needs any more: superseded artifacts, leftovers of killed processes, and old caches.

    What an alias of a registered model points to is kept. With --policy, as the worker does it each night: refreshes
    that `keep` in LIFECYCLE_HOME/retention.yaml does not name go, from Prefect and MLflow, too, and the artifacts of
    those that stay are kept.
    """
    from flows.champion.retention import Housekeeping
    from flows.store.collect import Collected
    from flows.store.policy import policy_file, read_policy

    policy = read_policy() if by_policy else None
    if by_policy and policy is None:
        raise RecipeError(f"there is no {policy_file()}; expected such as `keep: {{refreshes: 30, days: 90}}`")
    housekeeping = Housekeeping(policy, older_than_days)
    done = Collected(tuple(housekeeping.garbage), ()) if dry_run else housekeeping.collect()
    if shared:
        of_all = _collect_shared(dry_run, older_than_days)
        done = Collected(done.removed + of_all.removed, done.failures + of_all.failures)
    if as_json:
        removed = done.removed
        items = [{"path": str(item.path), "size_bytes": item.size_bytes, "reason": item.reason} for item in removed]
        print_json({"dry_run": dry_run, "garbage": items, "failures": done.failures})
        if done.failures:
            sys.exit(StoreError.exit_code)
        return
    for item in done.removed:
        click.echo(f"{item.size_bytes / 2**20:9.1f} MiB  {item.path}  {item.reason}")
    total_mib = sum(item.size_bytes for item in done.removed) / 2**20
    click.echo(f"{total_mib:.1f} MiB {'would be' if dry_run else 'were'} freed")
    if done.failures:
        listed = "\n".join(f"  {failure}" for failure in done.failures)
        raise StoreError(
            f"{len(done.failures)} of what may go could not be removed:\n{listed}\nSee to what is named there, or "
            f"remove it by hand, and run `lifecycle gc` again"
        )


def _collect_shared(dry_run: bool, older_than_days: float) -> Collected:
    from flows.champion.shared_champions import SharedChampions
    from flows.ledger.home import store_root
    from flows.store import upkeep
    from flows.store.collect import Collected
    from flows.store.store import Store

    store = Store(store_root())
    if store.remote is None:
        raise RecipeError(f"--shared: this home shares no store; {store.root.parent}/store.yaml would name one")
    found, unread = upkeep.find_unneeded(store.remote, SharedChampions(store).artifacts(), older_than_days)
    if dry_run:
        return Collected(tuple(upkeep.as_garbage(one) for one in found), unread)
    done = upkeep.delete(store.remote, found)
    return Collected(done.removed, done.failures + unread)


class Percentage(click.ParamType):
    """Parameter type of a percentage, such as `10%`, which becomes 0.1."""

    name = "percent"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)%", str(value))
        if found is None or not 0 < float(found[1]) <= 100:
            self.fail(f"{value!r} is no share of the requests; expected more than 0% up to 100%, such as 10%")
        return float(found[1]) / 100


@click.command()
@click.argument("artifact", metavar="ARTIFACT|models:/NAME@ALIAS")
@click.option("--follow", is_flag=True, help="Switch to a new champion when the alias moves; only for models:/….")
@click.option(
    "--canary", type=Percentage(), metavar="PERCENT", help="Share of requests that the challenger gets, such as 10%."
)
@click.option(
    "--canary-gate",
    type=click.IntRange(2),
    metavar="N",
    help="Promote or withdraw the challenger after champion and challenger have had N requests each.",
)
@click.option(
    "--sample-requests",
    type=Percentage(),
    metavar="PERCENT",
    help="Share of conversations to record, such as 10%; needs --samples.",
)
@click.option(
    "--samples",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write the recorded conversations to, as a dataset.",
)
@click.option(
    "--samples-mib",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Largest size of the folder of --samples, in MiB.",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on; default: any free port.")
@click.option("--descriptor", type=int, hidden=True)
def serve(
    artifact: str,
    follow: bool,
    canary: float | None,
    canary_gate: int | None,
    sample_requests: float | None,
    samples: Path | None,
    samples_mib: int,
    host: str,
    port: int | None,
    descriptor: int | None,
) -> None:
    """Serve a model until Ctrl-C: an artifact, a serve stage's model, or a champion.

    The API key is VLLM_API_KEY, or a new one, which is printed. `--canary` is about the version that `lifecycle canary`
    made the challenger.
    """
    if (sample_requests is None) != (samples is None):
        raise click.UsageError("--sample-requests and --samples are given together: the share, and the folder")
    if canary_gate and not canary:
        raise click.UsageError("--canary-gate judges a challenger: expected --canary, too")
    if follow and descriptor is None:
        _keep_following(artifact, host, port)
    if follow:
        with ExitStack() as stack:
            sampler = _sampling(samples, sample_requests, samples_mib, stack) if samples and sample_requests else None
            _following(artifact, canary or 0.0, canary_gate).serve(host, socket(fileno=descriptor), sampler)
        return
    if canary or samples:
        raise click.UsageError("--canary and --sample-requests are about what is served with --follow")
    _become_server(_what_to_serve(artifact, is_trial=False), ["--host", host, *(["--port", str(port)] if port else [])])


class Temperature(click.FloatRange):
    """Parameter type of a sampling temperature: a finite number from 0 to 2, the range of OpenAI's API."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, parameter, context)
        if math.isnan(number):  # NaN passes the comparisons with both ends of the range
            self.fail(f"{value!r} is not in the range 0<=x<=2.", parameter, context)
        return float(number)


@click.command()
@click.argument("artifact", metavar="ARTIFACT|models:/NAME@ALIAS")
@click.argument("beside", required=False, metavar="[ARTIFACT]")
@click.option("--temperature", type=Temperature(), help="Sampling temperature; default: the model's own, else 0.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help="Largest number of tokens in an answer; default: what fits into the context.",
)
@click.option("--system", help="System message that begins each conversation.")
@click.option(
    "--image",
    "images",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Picture before the first question of each conversation; may be given several times.",
)
@click.option(
    "--video",
    "videos",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Video before the first question of each conversation, after the pictures; may be given several times.",
)
@click.option(
    "--audio",
    "sounds",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Sound before the first question of each conversation, after other media; may be given several times.",
)
def chat(
    artifact: str,
    beside: str | None,
    temperature: float | None,
    max_tokens: int | None,
    system: str | None,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    sounds: tuple[Path, ...],
) -> None:
    """Talk to a model in the terminal: an artifact, a serve stage's model, or a champion.

    With two, each question is answered by both. Servers are started first, on a CPU without compiling, and end with
    the conversation (Ctrl-D). `/new` begins another one.
    """
    options = ["--chat"]
    for name, value in (("temperature", temperature), ("max-tokens", max_tokens), ("system", system)):
        options += [] if value is None else [f"--{name}={value}"]
    for kind, files in (("image", images), ("video", videos), ("audio", sounds)):
        options += [f"--{kind}={file}" for file in files]
    served = _what_to_serve(artifact, is_trial=True)
    if beside is not None:
        second = _what_to_serve(beside, is_trial=True)
        if second == served:
            raise click.UsageError(f"{artifact} and {beside} are the same artifact; name two that differ")
        options.append(f"--beside={json.dumps(second)}")
    _become_server(served, options)


def _become_server(served: list[str], options: list[str]) -> NoReturn:
    """Replace this process by the program that serves a model, with arguments from `_what_to_serve`."""
    command = [sys.executable, "-m", "stages.kinds.serve", *served, *options]
    # The exec discards what is still in Python's buffer.
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 (no shell)


def _sampling(folder: Path, share: float, size_mib: int, stack: ExitStack) -> Samples:
    """Record a share of the served conversations into a folder, until `stack` is closed."""
    from stages.core.lines import print_timed
    from stages.serving.samples import Samples

    print_timed(f"{share:.1%} of the conversations are written to {folder}, which holds {size_mib} MiB of them at most")
    return stack.enter_context(Samples(folder, share, size_mib * 2**20))


def _keep_following(uri: str, host: str, port: int | None) -> NoReturn:
    """Turn this process into a supervisor that runs the same `serve` command in another process and restarts it."""
    from flows.champion import champions
    from flows.champion.supervised_serving import serve_supervised

    serve_supervised(*champions.parse(uri), host, port, sys.argv[1:])


def _following(uri: str, canary_share: float, gate_requests: int | None) -> FollowSettings:
    from flows.champion import champions
    from flows.champion.follow import FollowSettings
    from stages.core.lines import print_timed

    name, alias = champions.parse(uri)
    print_timed(f"asking MLflow for {uri}")
    return FollowSettings(champions.connect(), name, alias, canary_share, gate_requests)


def _what_to_serve(name: str, *, is_trial: bool) -> list[str]:
    """Return `python -m stages.kinds.serve`'s arguments for a named model; a refused artifact only for a trial."""
    from flows.champion import champions
    from flows.cli import show as shown
    from flows.ledger.home import store_root
    from flows.store.store import Store
    from stages.core.lines import print_timed

    if name.startswith(champions.URI_PREFIX):
        parsed = champions.parse(name)
        print_timed(f"asking MLflow for {name}")
        version = champions.find(champions.connect(), *parsed)
        spec = champions.launch_spec(version)
        return [*shown.launch_arguments(spec), "--version", version.number]
    index = Store(store_root()).index()
    artifact = shown.find_artifact(index, name)
    if artifact.record.product not in ("model", "adapter", "server"):
        expected = "a model, an adapter or a serve stage's"
        raise ModelError(f"serving {name}: it is a {artifact.record.product}, expected {expected}")
    if refusal := artifact.record.refusal(artifact.folder):
        if not is_trial:
            raise refusal
        print_timed(f"warning: {refusal}")
    return [*shown.serve_arguments(artifact, index), "--version", artifact.record.version]


class NullObserver:
    """Observer of a stage outside any refresh, such as by `lifecycle adopt`, which prints only its waits."""

    def __init__(self) -> None:
        self._has_reported_wait = False

    def waiting(self) -> None:
        if not self._has_reported_wait:
            click.echo("waiting: a refresh is building the same artifact", err=True)
        self._has_reported_wait = True

    def started(self, attempt: object) -> None:
        pass

    def tick(self) -> None:
        pass

    def ended(self, outcome: object) -> None:
        pass
