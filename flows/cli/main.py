"""Entry point of the `lifecycle` command line: parses arguments, runs commands, maps errors to exit codes.

Each command imports everything beyond click itself, so that `lifecycle --help` answers at once.
"""

import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import click

from flows.cli.answers import JSON_OPTION, SET_OPTION, print_json, warn_of_missing_worker
from flows.cli.compare_commands import calibrate, compare
from flows.cli.key_commands import keys
from flows.cli.lineage_commands import diff, lineage
from flows.cli.model_commands import approve, canary, champion, reject, rollback
from flows.cli.notify_commands import notify
from flows.cli.recipe_commands import data, init, layouts, render
from flows.cli.refresh_commands import logs, report, retry, runs
from flows.cli.schedule_commands import schedule, schedules
from flows.cli.server_commands import doctor, down, install, metrics, model_context_protocol, status, up
from flows.cli.store_commands import adopt, backup, chat, gc, restore, serve, show, verify
from stages.core.errors import INTERNAL_ERROR, USAGE_ERROR, LifecycleError, RefreshStoppedError, error_classes
from stages.core.garbage import collect_rarely
from stages.core.lines import VisibleStream, say
from stages.core.redaction import redact

RECIPE = click.argument("recipe", type=click.Path(path_type=Path))
UNTIL_OPTION = click.option(
    "--until", metavar="STAGE", help="Run only this stage and the stages that it depends on; default: all."
)
FORCE_OPTION = click.option(
    "--force", multiple=True, metavar="STAGE", help="Build this stage although it is cached; repeatable."
)


def _exit_codes() -> str:
    """Return the help text about exit codes: one line for each error class."""
    codes = {error.exit_code: name for name, error in error_classes().items() if error is not LifecycleError}
    codes |= {0: "success", USAGE_ERROR: "wrong command line", INTERNAL_ERROR: "internal error, please report it"}
    return "\n".join(["\b", "Exit codes:", *(f"  {code:>2}  {codes[code]}" for code in sorted(codes))])


@click.group(epilog=_exit_codes(), context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="llm-lifecycle")
def cli() -> None:
    """Refresh language models: one recipe from download to evaluation, every stage cached and tracked."""
    from flows.ledger.home import home_above
    from flows.servers.keyed import named_settings

    os.environ |= home_above()
    os.environ |= named_settings()


@cli.command()
@RECIPE
@SET_OPTION
@UNTIL_OPTION
@FORCE_OPTION
@JSON_OPTION
def run(recipe: Path, overrides: Sequence[str], until: str | None, force: Sequence[str], as_json: bool) -> int:
    """Run a recipe; stages that are built already are reused."""
    from flows.running.request import RefreshRequest

    return _run(RefreshRequest(str(recipe.absolute()), tuple(overrides), until, tuple(force)), as_json)


@cli.command()
@RECIPE
@click.option("--stage", required=True, metavar="NAME", help="Stage to build again.")
@SET_OPTION
@JSON_OPTION
def rerun(recipe: Path, stage: str, overrides: Sequence[str], as_json: bool) -> int:
    """Build a stage again, and the stages that depend on it; reuse all others."""
    from flows.recipe.recipe import load_recipe
    from flows.running.request import RefreshRequest

    loaded = load_recipe(recipe, overrides)
    force = (stage, *loaded.dependents_of(stage)) if stage in loaded.stages else (stage,)
    return _run(RefreshRequest(str(recipe.absolute()), tuple(overrides), None, force), as_json)


def _run(request: Any, as_json: bool) -> int:
    from flows.cli import run_command

    return run_command.print_outcome(run_command.run_refresh(request, quiet=as_json), as_json)


@cli.command()
@RECIPE
@SET_OPTION
@UNTIL_OPTION
@FORCE_OPTION
@JSON_OPTION
def plan(recipe: Path, overrides: Sequence[str], until: str | None, force: Sequence[str], as_json: bool) -> None:
    """Show what `run` would do: which stages are cached and which would run, and why."""
    from flows.cli.plan_output import plan_as_json, plan_as_text, without_secrets
    from flows.running.request import RefreshRequest, make_plan

    made = make_plan(
        RefreshRequest(str(recipe.absolute()), tuple(overrides), until, tuple(force)), may_be_unreachable=True
    )
    if as_json:
        print_json(without_secrets({**plan_as_json(made.plan), "notes": list(made.notes)}))
    else:
        click.echo(redact("\n".join([plan_as_text(made.plan), *made.notes])))
    warn_of_missing_worker()


@cli.command()
def schema() -> None:
    """Print the JSON schema of recipes (draft-07), for completion and checks in editors."""
    from flows.recipe.editors import editor_schema

    print_json(editor_schema())


COMMANDS = (
    *(
        init,
        data,
        retry,
        runs,
        logs,
        compare,
        calibrate,
        layouts,
        show,
        report,
        adopt,
        verify,
        backup,
        restore,
        gc,
        serve,
        chat,
    ),
    *(
        lineage,
        diff,
        champion,
        approve,
        reject,
        rollback,
        canary,
        keys,
        schedule,
        schedules,
        notify,
        render,
        up,
        down,
        status,
        install,
        metrics,
        model_context_protocol,
        doctor,
    ),
)
WATCHED = ("run", "rerun", "retry", "compare")
"""Commands that run for long, so that each output line, error messages included, begins with the time."""
for command in COMMANDS:
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `lifecycle` and exit with the error class's code; a user's mistake shows no traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    collect_rarely()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else it reads what every package has installed
    os.umask(0o077)  # stores, logs and databases are readable by their owner only
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps: memory holds keys
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background programs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    with redirect_stdout(VisibleStream(sys.stdout)), redirect_stderr(VisibleStream(sys.stderr)):
        code = _run_command(arguments)
    sys.exit(code)


def _run_command(arguments: Sequence[str]) -> int:
    """Run one command of `lifecycle` from its arguments and return its exit code."""
    try:
        code = cli.main(list(arguments), prog_name="lifecycle", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = USAGE_ERROR
    except click.ClickException as error:
        code = _fail("UsageError", error.format_message(), USAGE_ERROR, arguments)
    except LifecycleError as error:
        code = _fail(type(error).__name__, str(error), error.exit_code, arguments)
    except (KeyboardInterrupt, click.Abort):
        code = _fail("RefreshStoppedError", "stopped", RefreshStoppedError.exit_code, arguments)
    except Exception as error:
        code = _fail_unexpectedly(error, arguments)
    return code or 0


def _fail_unexpectedly(error: Exception, arguments: Sequence[str]) -> int:
    """Report an unexpected exception as an internal error, or as an unusable lifecycle home if that caused it."""
    from flows.ledger.home import unusable

    if expected := unusable(error):
        return _fail(type(expected).__name__, str(expected), expected.exit_code, arguments)
    click.echo(redact(traceback.format_exc()), err=True)
    message = redact(f"internal error, please report it: {error}")
    return _fail(type(error).__name__, message, INTERNAL_ERROR, arguments)


def _fail(error_class: str, message: str, code: int, arguments: Sequence[str]) -> int:
    words = f"{error_class}: {message}"
    if arguments and arguments[0] in WATCHED:
        say(words, sys.stderr)
    else:
        click.echo(words, err=True)
    if "--json" in arguments:
        print_json({"error": message, "error_class": error_class, "exit_code": code})
    return code
