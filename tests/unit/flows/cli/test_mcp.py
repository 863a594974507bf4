"""Agents plan and read refreshes by the official client of the Model Context Protocol, over stdin and stdout."""

import asyncio
import os
import subprocess
import sys

import pytest

from flows.cli import mcp_server
from stages.core.errors import ResourceError
from tests.serving import wait_for


def test_outputs_are_bounded_and_names_are_no_options(monkeypatch):
    text = "x" * (mcp_server.MAX_CHARACTERS + 5)
    assert mcp_server._bounded(text, keeps_end=False).endswith("x\n… 5 characters are left out …")
    assert mcp_server._bounded(text, keeps_end=True).startswith("… 5 characters are left out …\nx")
    asked = []
    monkeypatch.setattr(mcp_server, "_printed", lambda arguments, **_: asked.append(arguments))
    mcp_server.plan("--force", ["--help"], "--json")
    mcp_server.show("--samples")
    mcp_server.logs("--follow", "--follow")
    assert asked[0] == ["plan", "--set=--help", "--until=--json", "--", "--force"]
    assert asked[1:] == [["show", "--", "--samples"], ["logs", "--refresh=--follow", "--", "--follow"]]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(ResourceError, match=r"the package `mcp` is missing; `make mcp`"):
        mcp_server.serve(may_run=False)


@pytest.mark.nightly
def test_their_client_plans_reads_and_runs_only_where_it_may(tmp_path):
    from mcp import Client, StdioServerParameters

    recipe = tmp_path / "agents.yaml"
    recipe.write_text("name: agents\nstages:\n  rows: {kind: download, dataset: builtin/addition}\n")
    environment = {**os.environ, "LIFECYCLE_HOME": str(tmp_path / "home"), "LIFECYCLE_MLFLOW": "off"}

    def client_of(*options):
        program = ["-c", mcp_server.PROGRAM, "mcp", *options]
        return Client(StdioServerParameters(command=sys.executable, args=program, env=environment, cwd=str(tmp_path)))

    async def asked(client, tool, **arguments):
        answer = await client.call_tool(tool, arguments)
        return "".join(part.text for part in answer.content), answer.is_error

    async def reads():
        async with client_of() as client:
            tools = (await client.list_tools()).tools
            assert sorted(tool.name for tool in tools) == ["logs", "plan", "report", "show"]
            assert all(tool.annotations.read_only_hint for tool in tools)
            planned, is_wrong = await asked(client, "plan", recipe=str(recipe))
            assert "first build" in planned and not is_wrong
            wrong, _ = await asked(client, "plan", recipe=str(recipe), overrides=["stages.rows.kind=5"])
            assert "stages.rows" in wrong and "(exit code 3)" in wrong
            assert "exit code" in (await asked(client, "logs", stage="rows"))[0]
            assert (await asked(client, "run", recipe=str(recipe)))[1], "it is not offered"
            assert not (tmp_path / "home" / "ledger").exists()

    async def runs():
        async with client_of("--allow-running") as client:
            assert "run" in {tool.name for tool in (await client.list_tools()).tools}
            await asked(client, "run", recipe=str(recipe))

    async def shows():
        async with client_of() as client:
            return (await asked(client, "show"))[0], (await asked(client, "report"))[0]

    try:
        asyncio.run(reads())
        asyncio.run(runs())
        wait_for(lambda: "completed" in asyncio.run(shows())[0], 300)
        assert asyncio.run(shows())[1].strip().endswith("report.html")
    finally:
        subprocess.run([sys.executable, "-c", mcp_server.PROGRAM, "down"], env=environment, check=True)
