"""Commands about the local servers and the machine: `lifecycle up`, `down`, `status`, `metrics`, `mcp`, `doctor`."""

from dataclasses import asdict

import click

from flows.cli.answers import JSON_OPTION, print_json
from stages.core.errors import ResourceError, ServerError
from stages.core.shipped import MAKE_TARGETS


@click.command()
@click.option(
    "--foreground",
    is_flag=True,
    help="Stay in the foreground and supervise the servers, as systemd wants it; SIGTERM stops them, as `down` does.",
)
@JSON_OPTION
def up(foreground: bool, as_json: bool) -> None:
    """Start the local Prefect and MLflow servers, and the worker that runs scheduled refreshes, unless they run.

    A supervisor stays, which starts again what dies or does not answer.
    """
    from flows.servers import local as servers

    servers.up(worker=True)
    _show_status(as_json)
    if foreground:
        servers.supervise()


@click.command()
@JSON_OPTION
def down(as_json: bool) -> None:
    """Stop the servers and the worker that `up` or `run` started.

    A refresh that the worker runs is cancelled, and can be retried later.
    """
    from flows.servers import local as servers

    stopped = servers.down()
    if as_json:
        print_json({"stopped": stopped})
    else:
        click.echo(f"stopped {' and '.join(stopped)}" if stopped else "nothing to stop")


@click.command()
@click.option("--open", "opened", is_flag=True, help="Open the web pages of the local servers in a browser, logged in.")
@JSON_OPTION
@click.pass_context
def status(context: click.Context, opened: bool, as_json: bool) -> None:
    """Show the addresses of the Prefect and MLflow servers, and whether they answer."""
    answering = _show_status(as_json)
    if opened:
        from flows.servers import login
        from flows.tracking.pages import runs_page

        for line in login.open_pages({"mlflow": runs_page()}):
            click.echo(line, err=as_json)
    if not answering:
        context.exit(ServerError.exit_code)


@click.command("mcp")
@click.option("--allow-running", is_flag=True, help="Also offer a tool that starts refreshes.")
def model_context_protocol(allow_running: bool) -> None:
    """Serve agents and editors on stdin and stdout (Model Context Protocol): plan, show, logs, report."""
    from flows.cli.mcp_server import serve

    serve(may_run=allow_running)


@click.command()
@click.argument("part", type=click.Choice([*MAKE_TARGETS]))
def install(part: str) -> None:
    """Install what is not part of the own environment: vLLM (serve), llama.cpp, EvalScope; or packages for it."""
    from flows.cli.install_commands import INSTALLERS

    INSTALLERS[part]()


@click.command()
def metrics() -> None:
    """Print metrics of all refreshes as Prometheus text, as the worker serves them at /metrics."""
    from flows.tracking.exposition import metrics_text

    click.echo(metrics_text(), nl=False)


@click.command()
@JSON_OPTION
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check what this machine has, and show what is missing for a refresh and what to do about it."""
    from flows.cli import doctor as examination

    findings = examination.examine()
    if as_json:
        print_json(examination.as_json(findings))
    else:
        click.echo(examination.as_text(findings))
    if not examination.can_run(findings):
        context.exit(ResourceError.exit_code)


def _awaiting_approval() -> list[str]:
    """Return a phrase on each promotion that waits for a person: version, model, who may decide and until when."""
    from flows.champion.approvals import awaited
    from flows.ledger.home import store_root
    from flows.store.store import Store

    return [candidate.text for candidate in awaited(Store(store_root()).index())]


def _show_status(as_json: bool) -> bool:
    """Print the servers' addresses; return whether all servers that a refresh needs answer."""
    from flows.servers import local as servers
    from flows.servers.programs import MLFLOW, MLFLOW_SWITCH, uses_mlflow

    statuses, waiting = servers.status(), _awaiting_approval()
    if as_json:
        print_json({server.name: asdict(server) for server in statuses} | ({"waiting": waiting} if waiting else {}))
    else:
        for server in statuses:
            state = "unknown" if server.host else "healthy" if server.healthy else "down"
            where = server.url or (f"on {server.host}" if server.host else "not running")
            click.echo(f"{server.name:<8} {where:<30} {state}")
            if server.trouble:
                click.echo(f"{'':<8} {server.trouble}")
        if not uses_mlflow():
            click.echo(f"{MLFLOW.name:<8} switched off by {MLFLOW_SWITCH}: no champions, no promotions")
        for candidate in waiting:
            click.echo(candidate)
    return all(server.healthy or not server.needed for server in statuses)
