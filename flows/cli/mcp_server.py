"""Server of the Model Context Protocol, by which agents and editors plan, run and read refreshes: `lifecycle mcp`.

Its tools are commands of this program, each a process of its own whose output is bounded in size and time; the
protocol has stdin and stdout for itself. Only with leave to run does a tool start anything that changes the home.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

from flows.ledger.home import home
from stages.core.errors import ResourceError
from stages.core.redaction import redact
from stages.core.shipped import install_command

PROGRAM = "from flows.cli.main import main; main()"
MAX_CHARACTERS = 20_000
COMMAND_TIMEOUT_S = 120.0
BEGINNING_S = 20.0
"""Seconds for which the tool `run` waits for a refusal, such as a wrong recipe, before it leaves the refresh alone."""
NEEDED = f"the package `mcp` is missing; `{install_command('mcp')}` installs it"
INSTRUCTIONS = """\
Refreshes of language models. A recipe is a YAML file of stages; `plan` shows which would run and why, without running
any. `show` lists refreshes, or tells of one by its name; `logs` prints what the processes of a stage wrote; `report`
writes the page of a refresh and returns its path. Outputs end after 20,000 characters."""


def serve(*, may_run: bool) -> None:
    """Serve the tools on stdin and stdout until the client closes them. Raises ResourceError without the package."""
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise ResourceError(f"serving the Model Context Protocol: {NEEDED}") from error
    server: Any = MCPServer("llm-lifecycle", instructions=INSTRUCTIONS, log_level="WARNING")
    for tool in (plan, show, logs, report):
        server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)(tool)
    if may_run:
        changing = ToolAnnotations(read_only_hint=False, destructive_hint=False)
        server.tool(annotations=changing, structured_output=False)(run)
    server.run("stdio")


def plan(recipe: str, overrides: list[str] | None = None, until: str | None = None) -> str:
    """Show which stages of a recipe (path of its file) would run, which are cached, and why; checks the recipe.

    overrides: changes such as stages.sft.learning_rate=1e-4. until: last stage to look at.
    """
    return _printed(["plan", *_of_recipe(recipe, overrides, until)])


def show(name: str | None = None) -> str:
    """Show the recent refreshes, or one refresh or artifact by its name."""
    return _printed(["show", *_named(name)])


def logs(stage: str, refresh: str | None = None) -> str:
    """Return the end of what the processes of a stage printed, in its latest attempt or in that of a refresh."""
    chosen = [f"--refresh={refresh}"] if refresh else []
    return _printed(["logs", *chosen, "--", stage], keeps_end=True)


def report(refresh: str | None = None) -> str:
    """Write the HTML page about a refresh (default: the latest), and return its path."""
    return _printed(["report", *_named(refresh)])


def run(recipe: str, overrides: list[str] | None = None, until: str | None = None) -> str:
    """Start a refresh in the background, and return what it has printed in its first seconds.

    It goes on when this server ends; `show` tells of its progress. overrides, until: as of `plan`.
    """
    folder = home() / "mcp"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"run-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{time.monotonic_ns()}.log"
    with file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, "run", *_of_recipe(recipe, overrides, until)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives this server
        )
    with suppress(subprocess.TimeoutExpired):
        process.wait(BEGINNING_S)
    ended = "it goes on" if process.returncode is None else f"it ended with exit code {process.returncode}"
    return f"{_bounded(file.read_text(errors='replace'), keeps_end=True)}\n({ended}; its output is in {file})"


def _of_recipe(recipe: str, overrides: Sequence[str] | None, until: str | None) -> list[str]:
    options = [f"--set={override}" for override in overrides or ()] + ([f"--until={until}"] if until else [])
    return [*options, "--", recipe]


def _named(name: str | None) -> list[str]:
    return ["--", name] if name else []


def _printed(arguments: Sequence[str], *, keeps_end: bool = False) -> str:
    """Run a command of this program, and return what it printed, errors included, with its exit code if that is bad."""
    command = [sys.executable, "-P", "-c", PROGRAM, *arguments]
    with TemporaryFile() as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=COMMAND_TIMEOUT_S
            )
            ended = f"\n(exit code {done.returncode})" if done.returncode else ""
        except subprocess.TimeoutExpired:
            ended = f"\n(ended after {COMMAND_TIMEOUT_S:g} s without an answer)"
        output.seek(0)
        text = output.read(64 * MAX_CHARACTERS).decode(errors="replace") if not keeps_end else _end_of(output)
    return _bounded(text, keeps_end=keeps_end) + ended


def _end_of(output: Any) -> str:
    size = output.seek(0, 2)
    output.seek(max(0, size - 4 * MAX_CHARACTERS))
    return str(output.read().decode(errors="replace"))


def _bounded(text: str, *, keeps_end: bool) -> str:
    """Return a text without secrets, of at most `MAX_CHARACTERS`, which says where something is left out."""
    text = redact(text)
    if len(text) <= MAX_CHARACTERS:
        return text
    left_out = f"… {len(text) - MAX_CHARACTERS:,} characters are left out …"
    kept = text[-MAX_CHARACTERS:] if keeps_end else text[:MAX_CHARACTERS]
    return "\n".join((left_out, kept) if keeps_end else (kept, left_out))
